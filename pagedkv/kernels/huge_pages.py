"""Memory of the host that a kernel streams through: on huge pages where the system has them.

On pages of 4 KiB a stream waits for a translation every 4 KiB: a bare read of weights is a quarter slower.
"""

from __future__ import annotations

import mmap

import torch


def allocate(num_bytes: int) -> torch.Tensor:
    """Allocate uint8 [num_bytes]. The system gives zeroed pages at their first touch, huge ones if it can."""
    # Private: Linux gives shared memory no huge pages.
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)
