"""cuda: the Python side of the CUDA C++ kernels in csrc/cuda. The registry enters at backend.py; CuPy is imported when it is needed."""
