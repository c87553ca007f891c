"""Speed of vLLM on a CPU: its own parts and ours, in turn in one engine."""
