"""`pagedkv bench attention`: the CPU kernels beside the speed of memory and other engines. Start at runner.py."""
