"""Laws of the pool."""
