"""Benchmarks of the GPU kernels: attention against the memory ceiling, the host cost of a launch, and tuning."""
