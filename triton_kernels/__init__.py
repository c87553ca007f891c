"""Triton sources of pagedkv; installed as `pagedkv.kernels.triton`.

The folder is mapped by setup.py. `triton_kernels` as a top-level module is the name of another project, which must stay importable.
"""

from __future__ import annotations

if __name__ == "triton_kernels":
    raise ImportError(
        "these are the sources of pagedkv.kernels.triton; install pagedkv (`pip install -e .`) and import that name"
    )
