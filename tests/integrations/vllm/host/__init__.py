"""Tests that need vLLM: `make test-vllm`, `make test-vllm-next`."""
