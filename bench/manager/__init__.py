"""`pagedkv bench manager`: what the memory manager costs, beside the managers of other engines. Start at runner.py."""
