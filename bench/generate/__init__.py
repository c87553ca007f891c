"""`pagedkv bench generate`: the reference engine beside the speed of memory, and beside transformers."""
