"""Microbenchmarks, one runner each: `pagedkv bench manager` at a shell; `python -m pagedkv.bench` runs them all.

setup.py installs the folder `bench` of a checkout as `pagedkv.bench`, so that a wheel contains the runners. A wheel
contains no results.
"""
