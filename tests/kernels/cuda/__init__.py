"""Tests of the CUDA kernels on a host."""
