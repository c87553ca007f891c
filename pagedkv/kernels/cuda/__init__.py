"""cuda: the Python side of the CUDA C++ kernels in csrc/cuda.

The registry loads backend.py. CuPy is imported only when a kernel is compiled or launched.
"""
