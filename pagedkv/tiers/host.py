"""HostTier: pages in host memory, under the pool of a GPU or beside that of a CPU.

    bytes  uint8 [slots, frame_bytes]    on huge pages; pinned if the pool is on a GPU, so that copies run beside work
    seals  [slots]                       the name and the checksum of the page in each slot, 48 bytes

The copy of a page computes its checksum (see PoolView): that of a store is kept, that of a load is compared with it. No
prompt can find the frame of a load before it was compared. If the pool is on a GPU, the checksum is that of the slot.

With a limit, a copy is spread over the time that the limit gives it: the threads of the C++ kernels can make it then.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from pagedkv.core.arguments import flag
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import huge_pages
from pagedkv.tiers.checksum import SUM_BYTES
from pagedkv.tiers.pool_view import Numbers, PoolView
from pagedkv.tiers.slots import CHANGED, CORRUPT, PART, Move, SlotTier

LEAST_SPEED: Final = 1e9
"""Bytes per second: a copy is spread over no more time than at this speed, since its owner may wait for it."""
OF_LIMIT: Final = 0.95
"""The part of its time that a copy may take, so that the next one begins in time."""
MOST_PART: Final = 64 << 20
PARTS_PER_SECOND: Final = 32
"""With a limit, a part has the bytes of 1/32 s, at least PART and at most MOST_PART: each part wakes a thread."""
_NO_SUM: Final = bytes(SUM_BYTES)
"""The checksum of a page that is not verified."""


class HostTier(SlotTier):
    """Pages in host memory. The memory is taken when the tier is registered, and written as pages come.

    size:   bytes, or text like "16GiB".
    verify: whether each load compares a checksum. Without, a bit that flips in host memory is not seen.
    limit:  the most bytes a second that the tier moves, "2GB" or an int; None for no limit. With a limit, the threads
            of the C++ kernels copy the pages, if there is one for each CPU of the process. A load then waits for one
            part of the transfers before it, and takes a quarter of its own time at least.
    policy: the order in which pages are evicted, see MemoryManager.
    Raises: InvalidRequest. When the cache is made: InvalidRequest if the machine has too little memory
    """

    kind = "host"

    def __init__(
        self, size: str | int, *, verify: bool = True, limit: str | int | None = None, policy: str = "lru"
    ) -> None:
        super().__init__(size, limit=limit, policy=policy)
        self._verifies = flag(verify, "verify")

    def register(self, pool: PoolView, fingerprint: bytes) -> None:
        """See Tier.register."""
        if self.size > _present():
            raise _too_large(self.size)
        super().register(pool, fingerprint)

    def _begin(self, pool: PoolView, fingerprint: bytes, num_slots: int) -> list[tuple[int, bytes, bytes]]:
        memory = _allocate(num_slots * pool.frame_bytes, is_pinned=pool.is_cuda)
        self._memory = memory.view(num_slots, pool.frame_bytes)
        self._seals = [b""] * num_slots
        return []

    def _store(self, moves: Sequence[Move]) -> None:
        slots, frames = _places(moves)
        fence, seconds = moves[0].job.fence, self._seconds(len(moves))
        sums = self._pool.read(frames, self._memory, slots, fence, is_summed=self._verifies, seconds=seconds)
        held = self._pool.hold(
            frames, np.array([move.stamp for move in moves])
        )  # a page that changed meanwhile is seen
        for move, total, is_whole in zip(moves, sums or [_NO_SUM] * len(moves), held.tolist(), strict=True):
            if is_whole:
                self._seals[move.slot] = move.key.name + total
            else:
                move.why = CHANGED

    def _load(self, moves: Sequence[Move]) -> None:
        slots, frames = _places(moves)
        fence, seconds = moves[0].job.fence, self._seconds(len(moves))
        sums = self._pool.write(frames, self._memory, slots, fence, is_summed=self._verifies, seconds=seconds)
        for move, total in zip(moves, sums or [_NO_SUM] * len(moves), strict=True):
            if self._seals[move.slot] != move.key.name + total:
                move.why = CORRUPT

    def _part(self) -> int:
        if self._limit is None or self._pool.is_cuda:
            return PART
        return max(PART, min(MOST_PART, int(self._limit) // PARTS_PER_SECOND))

    def _seconds(self, num_pages: int) -> float:
        """Return how long a copy of so many pages may take: the time that the limit gives it, if there is a limit."""
        if self._limit is None:
            return 0.0
        return OF_LIMIT * num_pages * self._pool.frame_bytes / max(self._limit, LEAST_SPEED)

    def _void(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._seals[slot] = b""

    def _end(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)


def _places(moves: Sequence[Move]) -> tuple[Numbers, Numbers]:
    """Return the slots and the frames of moves, int64 [n] each."""
    return np.array([move.slot for move in moves]), np.array([move.frame for move in moves])


def _allocate(num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
    """Return uint8 [num_bytes]. Raises: InvalidRequest if this machine has too little memory"""
    try:
        if is_pinned:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return huge_pages.allocate(num_bytes)
    except (MemoryError, OSError, RuntimeError):
        raise _too_large(num_bytes) from None


def _present() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _too_large(num_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"a host tier of {num_bytes / 2**30:.1f} GiB was asked for, and the memory of this machine, "
        f"{_present() / 2**30:.1f} GiB, does not hold it; give a smaller size"
    )
