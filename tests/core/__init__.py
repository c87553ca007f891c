"""Laws of the memory manager."""
