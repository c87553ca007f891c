"""The `PAGEDKV_*` environment variables, all of them, read in one place.

| variable              | values   | effect                                                                                    |
|-----------------------|----------|-------------------------------------------------------------------------------------------|
| PAGEDKV_DEBUG         | 0        | no checks beyond those that keep the tables sound (the default)                           |
|                       | 1        | arguments of kernels and plans are checked                                                |
|                       | 2        | and frames are filled with NaN when unmapped, planned slots are proven distinct           |
|                       | 3        | and `check()` proves the invariants I1-I9 after every commit; errors tell who had it last |
| PAGEDKV_KERNELS       | a name   | the backend used where the caller says "auto"                                             |
| PAGEDKV_CPU_ISA       | a name   | the instruction set of the `cpu` backend: avx512_bf16, avx512, avx2 or portable           |
| PAGEDKV_NUM_THREADS   | a number | threads of the `cpu` and `numba` backends, if not as many as torch's                      |
| PAGEDKV_CACHE_DIR     | a folder | where compiled CUDA kernels are kept; by default pagedkv/ in the user's cache folder      |
| PAGEDKV_CUDA_ARCHS    | names    | what the build of a wheel compiles CUDA kernels for, as sm_90,sm_100; none for nothing    |
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from pagedkv.errors import InvalidRequest

MOST_THREADS: Final = 4096
"""An OpenMP runtime that gets no more threads ends the process."""


def level() -> int:
    """The value of PAGEDKV_DEBUG, 0 to 3; anything else is an InvalidRequest at first use."""
    text = os.environ.get("PAGEDKV_DEBUG", "0")
    if text not in ("0", "1", "2", "3"):
        raise InvalidRequest(f"PAGEDKV_DEBUG is {text!r}; it takes 0, 1, 2 or 3")
    return int(text)


def forced_backend() -> str | None:
    """The value of PAGEDKV_KERNELS, or None."""
    return os.environ.get("PAGEDKV_KERNELS") or None


def forced_cpu_isa() -> str | None:
    """The value of PAGEDKV_CPU_ISA, or None."""
    return os.environ.get("PAGEDKV_CPU_ISA") or None


def forced_num_threads() -> int | None:
    """The value of PAGEDKV_NUM_THREADS, or None; what is no such number is an InvalidRequest at first use."""
    text = os.environ.get("PAGEDKV_NUM_THREADS") or None
    if text is not None and (not text.isdecimal() or not 1 <= int(text) <= MOST_THREADS):
        raise InvalidRequest(f"PAGEDKV_NUM_THREADS is {text!r}; it takes a number of threads, 1 to {MOST_THREADS}")
    return None if text is None else int(text)


def cache_folder() -> Path:
    """The value of PAGEDKV_CACHE_DIR, or pagedkv/ in the user's cache folder."""
    own = os.environ.get("PAGEDKV_CACHE_DIR")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedkv"


def cuda_architectures(known: Collection[str]) -> list[str]:
    """Those of `known` that PAGEDKV_CUDA_ARCHS names: all where it is not set, and what it names else is an InvalidRequest."""
    text = os.environ.get("PAGEDKV_CUDA_ARCHS")
    wanted = [] if text == "none" else [name.strip() for name in text.split(",")] if text else list(known)
    if unknown := sorted(set(wanted) - set(known)):
        raise InvalidRequest(
            f"PAGEDKV_CUDA_ARCHS is {text!r}; {unknown[0]!r} is not one of {', '.join(known)}; say none for nothing"
        )
    return wanted
