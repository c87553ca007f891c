"""The `PAGEDKV_*` environment variables, all of them, read in one place.

| variable             | values   | effect                                                                             |
|----------------------|----------|------------------------------------------------------------------------------------|
| PAGEDKV_DEBUG        | 0        | checks that cost O(batch) and wait for no device (the default)                     |
|                      | 1        | as 0, and values of arguments are checked on every device                          |
|                      | 2        | as 1, and unmapped frames are filled with NaN, planned slots are proven distinct   |
|                      | 3        | as 2, and `check()` proves I1-I9 after every commit; errors name the last callers  |
| PAGEDKV_KERNELS      | a name   | the backend for calls that name none, or "auto"                                    |
| PAGEDKV_CPU_ISA      | a name   | the instruction set of `cpu`, such as avx512, avx2, neon or portable               |
| PAGEDKV_NUM_THREADS  | a number | threads of the `cpu` and `numba` backends; by default as many as torch uses        |
| PAGEDKV_CACHE_DIR    | a folder | the place of what is compiled and measured; by default pagedkv/ in the user's cache|
| PAGEDKV_BACKGROUND   | 0        | no other process compiles what a step calls; the first calls do (the default is 1) |
| PAGEDKV_TIER_KEY     | a text   | the secret of tiers that --tier names: pages written without it are not found      |
| PAGEDKV_API_KEY      | a text   | the key that `pagedkv serve` asks for, unless --api-key names another              |
| PAGEDKV_VLLM         | 1        | vLLM on CPUs: our attention, linear layers, workers that sleep (the default is 0)  |
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from pagedkv.errors import InvalidRequest

MOST_THREADS: Final = 4096
"""The largest PAGEDKV_NUM_THREADS: an OpenMP runtime that cannot start its threads ends the process."""


def level() -> int:
    """Return PAGEDKV_DEBUG, 0 to 3. Raises: InvalidRequest for another value."""
    text = os.environ.get("PAGEDKV_DEBUG", "0")
    if text not in ("0", "1", "2", "3"):
        raise InvalidRequest(f"PAGEDKV_DEBUG is {text!r}; it takes 0, 1, 2 or 3")
    return int(text)


def forced_backend() -> str | None:
    """Return PAGEDKV_KERNELS, or None if it is unset or empty."""
    return os.environ.get("PAGEDKV_KERNELS") or None


def forced_cpu_isa() -> str | None:
    """Return PAGEDKV_CPU_ISA, or None if it is unset or empty."""
    return os.environ.get("PAGEDKV_CPU_ISA") or None


def forced_num_threads() -> int | None:
    """Return PAGEDKV_NUM_THREADS, or None if it is unset or empty. Raises: InvalidRequest unless it is 1 to 4096."""
    text = os.environ.get("PAGEDKV_NUM_THREADS") or None
    if text is not None and (not text.isdecimal() or not 1 <= int(text) <= MOST_THREADS):
        raise InvalidRequest(f"PAGEDKV_NUM_THREADS is {text!r}; it takes a number of threads, 1 to {MOST_THREADS}")
    return None if text is None else int(text)


def asks_for_vllm() -> bool:
    """Return whether PAGEDKV_VLLM is set, and not 0."""
    return os.environ.get("PAGEDKV_VLLM", "0").strip() not in ("", "0")


def may_compile_in_background() -> bool:
    """Return whether PAGEDKV_BACKGROUND is not 0."""
    return os.environ.get("PAGEDKV_BACKGROUND", "1").strip() != "0"


def api_key() -> str | None:
    """Return PAGEDKV_API_KEY, or None if it is unset or empty."""
    return os.environ.get("PAGEDKV_API_KEY") or None


def tier_key() -> bytes | None:
    """Return PAGEDKV_TIER_KEY in UTF-8, or None if it is unset or empty."""
    return os.environ.get("PAGEDKV_TIER_KEY", "").encode() or None


def cache_folder() -> Path:
    """Return PAGEDKV_CACHE_DIR, or pagedkv/ in the user's cache folder if it is unset or empty."""
    folder = os.environ.get("PAGEDKV_CACHE_DIR")
    return Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedkv"
