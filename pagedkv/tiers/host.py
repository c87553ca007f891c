"""HostTier: pages in host memory, under the pool of a GPU or beside that of a CPU.

    bytes  uint8 [slots, frame_bytes]    on huge pages; pinned if the pool is on a GPU, so that copies run beside work
    seals  [slots]                       the name and the checksum of the page in each slot, 48 bytes

A checksum reads a page right before it is copied, and the copy finds the page in a cache and is itself stored past the
caches. A load is verified in the slot. A store takes the checksum of the frame, or of the slot if the pool is on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch

from pagedkv.core.arguments import flag
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import huge_pages
from pagedkv.tiers.checksum import SUM_BYTES, Bytes, checksum
from pagedkv.tiers.pool_view import Numbers, PoolView
from pagedkv.tiers.slots import CHANGED, CORRUPT, Move, SlotTier

IN_CACHE: Final = 1 << 20
"""Bytes whose checksums are computed before they are copied."""


class HostTier(SlotTier):
    """Pages in host memory. The memory is taken when the tier is registered, and written as pages come.

    size:   bytes, or text like "16GiB".
    verify: whether each load compares a checksum. Without, a bit that flips in host memory is not seen.
    limit:  the most bytes a second that the tier moves, "2GB" or an int; None for no limit.
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
        self._bytes = self._memory.numpy()
        self._seals = [b""] * num_slots
        return []

    def _store(self, moves: Sequence[Move]) -> None:
        pool = self._pool
        assert pool is not None
        for part, slots, frames in self._parts(moves):
            sums = [] if pool.is_cuda else [self._sum(pool.bytes_of(move.frame), move) for move in part]
            pool.read(frames, self._memory, slots, part[0].job.fence)
            sums = sums or [self._sum(self._bytes[move.slot], move) for move in part]
            stamps = np.array([move.stamp for move in part])
            # a frame whose page changed after its checksum was computed is seen here
            for move, total, is_whole in zip(part, sums, pool.hold(frames, stamps).tolist(), strict=True):
                if is_whole:
                    self._seals[move.slot] = move.key.name + total
                else:
                    move.why = CHANGED

    def _load(self, moves: Sequence[Move]) -> None:
        assert self._pool is not None
        for part, slots, frames in self._parts(moves):
            for move in part:
                if self._seals[move.slot] != move.key.name + self._sum(self._bytes[move.slot], move):
                    move.why = CORRUPT
            self._pool.write(frames, self._memory, slots, part[0].job.fence)

    def _parts(self, moves: Sequence[Move]) -> Iterator[tuple[Sequence[Move], Numbers, Numbers]]:
        """Yield the moves with their slots and frames: in parts whose bytes fit a cache if a checksum reads them first.

        Each part costs calls that take the interpreter's lock, for which a part that is not verified has no need.
        """
        assert self._pool is not None
        each = max(1, IN_CACHE // self._pool.frame_bytes) if self._verifies else len(moves)
        slots, frames = np.array([move.slot for move in moves]), np.array([move.frame for move in moves])
        for first in range(0, len(moves), each):
            end = first + each
            yield moves[first:end], slots[first:end], frames[first:end]

    def _sum(self, content: Bytes, move: Move) -> bytes:
        return checksum(content, move.key.name) if self._verifies else bytes(SUM_BYTES)

    def _void(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._seals[slot] = b""

    def _end(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._bytes = self._memory.numpy()


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
