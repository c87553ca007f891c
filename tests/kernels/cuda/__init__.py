"""The CUDA kernels, proven on a host."""
