"""spaces: the methods of MemoryManager that open address spaces, one or several at once, and that reorder them."""
