"""Microbenchmarks, one runner each: `pagedkv bench manager` at a shell; `python -m pagedkv.bench` runs them all.

The folder `bench` of a checkout is installed as `pagedkv.bench` (setup.py), so that a wheel brings the runners; results stay behind.
"""
