"""Triton sources of pagedkv; installed as `pagedkv.kernels.triton`.

setup.py maps the folder. As a top-level module, `triton_kernels` is the name of another project, which must stay
importable.
"""

from __future__ import annotations

if __name__ == "triton_kernels":
    raise ImportError(
        "these are the sources of pagedkv.kernels.triton; install pagedkv (`pip install -e .`) and import that name"
    )
