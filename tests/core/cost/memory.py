"""The memory of one array, page by page: the memory of the process also has what its other threads take."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np

PAGEMAP = Path("/proc/self/pagemap")
"""Linux has it: one word of 64 bits for each page of this process."""
IS_THERE = os.access(PAGEMAP, os.R_OK)
AT_ONCE = 2**20
"""Words that are read at a time."""


def resident(array: np.ndarray) -> int:
    """Return the bytes of the pages of `array` that are in memory, or swapped out."""
    page = resource.getpagesize()
    first, last, count = array.ctypes.data // page, -(-(array.ctypes.data + array.nbytes) // page), 0
    with PAGEMAP.open("rb", buffering=0) as pagemap:
        for at in range(first, last, AT_ONCE):
            size = min(AT_ONCE, last - at)
            pagemap.seek(8 * at)
            words = np.frombuffer(pagemap.read(8 * size), np.uint64)
            assert len(words) == size
            count += int(np.count_nonzero(words >> np.uint64(62)))
    return page * count
