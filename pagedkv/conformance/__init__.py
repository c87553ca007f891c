"""The contract of paged attention as a grid of cases, for any backend: `python -m pagedkv.conformance my_module`."""
