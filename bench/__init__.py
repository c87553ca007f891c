"""Microbenchmarks, one runner each, run from a checkout: `python -m bench.attention`."""
