"""The number of threads of the CPU kernels, and a test whether this process lost its OpenMP team in a fork."""

from __future__ import annotations

import os
from typing import Final

import torch

from pagedkv import debug

_IMPORTED_BY: Final = os.getpid()


def num_threads() -> int:
    """Return PAGEDKV_NUM_THREADS, or the number of threads that torch uses."""
    return debug.forced_num_threads() or torch.get_num_threads()


def is_forked() -> bool:
    """Return True if this process was forked after it imported this file: its OpenMP threads stayed with the parent."""
    return os.getpid() != _IMPORTED_BY
