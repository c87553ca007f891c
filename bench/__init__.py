"""Microbenchmarks, one runner each: `pagedkv bench manager`; `pagedkv bench all` runs them all.

setup.py installs the folder `bench` of a checkout as `pagedkv.bench`, so that a wheel contains the runners. A wheel
contains no results.
"""
