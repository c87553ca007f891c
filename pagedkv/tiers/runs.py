"""Runs of bytes in host memory, copied in one call without the GIL: other threads compute meanwhile."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from pagedkv.kernels import cpu

Addresses = npt.NDArray[np.int64]


def copy_runs(targets: Addresses, sources: Addresses, num_bytes: int) -> None:
    """Copy `num_bytes` bytes from each source to its target. Runs must not overlap.

    Shapes: targets, sources int64 [n], addresses
    """
    if not cpu.missing():
        cpu.extension().copy_runs(targets.ctypes.data, sources.ctypes.data, len(targets), num_bytes)
        return
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        ctypes.memmove(target, source, num_bytes)
