"""These tests run in an environment with vLLM alone: `make test-vllm`. Elsewhere they are not collected."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
