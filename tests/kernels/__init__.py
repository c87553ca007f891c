"""Laws of the kernel layer."""
