"""integrations: pagedkv inside other systems. Each module needs an extra; of the layers, only serve imports one.

A new host engine is a module (as sglang.py) or a folder (as vllm/) here, with its extra and its entry points in
pyproject.toml.
"""
