"""spaces: the methods of MemoryManager that open address spaces, one by one or several at once."""
