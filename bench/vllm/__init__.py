"""Speed of attention inside of vLLM on a CPU: its own kernels and ours, in turn in one engine."""
