"""HostTier: pages in host memory, under the pool of a GPU or beside that of a CPU.

    bytes  uint8 [slots, frame_bytes]    on huge pages; pinned if the pool is on a GPU, so that copies run beside work
    seals  [slots]                       the name and the checksum of the page in each slot, 48 bytes

A load is verified where the bytes arrived: in the frame of a pool on a CPU. For a pool on a GPU the slot is verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch

from pagedkv.kernels import huge_pages
from pagedkv.tiers.checksum import SUM_BYTES, Bytes, checksum
from pagedkv.tiers.slots import CHANGED, CORRUPT, Move, SlotTier
from pagedkv.tiers.tier import PoolView

IN_CACHE: Final = 1 << 20
"""Bytes that are copied before their checksums are computed."""


class HostTier(SlotTier):
    """Pages in host memory. The memory is taken when the tier is registered, and written as pages come.

    size:   bytes, or text like "16GiB".
    verify: whether each load compares a checksum. Without, a bit that flips in host memory is not seen.
    limit, policy: see SlotTier.
    Raises: InvalidRequest for a size that makes no sense
    """

    kind = "host"

    def __init__(
        self, size: str | int, *, verify: bool = True, limit: str | int | None = None, policy: str = "lru"
    ) -> None:
        super().__init__(size, limit=limit, policy=policy)
        self._verifies = bool(verify)

    def _begin(self, pool: PoolView, fingerprint: bytes, num_slots: int) -> list[tuple[int, bytes, bytes]]:
        num_bytes = num_slots * pool.frame_bytes
        memory = (
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            if pool.is_cuda
            else huge_pages.allocate(num_bytes)
        )
        self._memory = memory.view(num_slots, pool.frame_bytes)
        self._bytes = self._memory.numpy()
        self._seals = [b""] * num_slots
        return []

    def _store(self, moves: Sequence[Move]) -> None:
        assert self._pool is not None
        for part in self._parts(moves):
            slots, frames, stamps = (np.array([getattr(m, name) for m in part]) for name in ("slot", "frame", "stamp"))
            self._pool.read(frames, self._memory, slots)
            sums = [self._sum(self._bytes[move.slot], move) for move in part]
            for move, total, is_whole in zip(part, sums, self._pool.hold(frames, stamps).tolist(), strict=True):
                if is_whole:
                    self._seals[move.slot] = move.key.name + total
                else:
                    move.why = CHANGED

    def _load(self, moves: Sequence[Move]) -> None:
        pool = self._pool
        assert pool is not None
        for part in self._parts(moves):
            slots, frames = (np.array([getattr(m, name) for m in part]) for name in ("slot", "frame"))
            pool.write(frames, self._memory, slots)
            for move in part:
                content = self._bytes[move.slot] if pool.is_cuda else pool.bytes_of(move.frame)
                if self._seals[move.slot] != move.key.name + self._sum(content, move):
                    move.why = CORRUPT

    def _parts(self, moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
        """Yield the moves in parts whose bytes fit a cache: a checksum reads them there."""
        assert self._pool is not None
        each = max(1, IN_CACHE // self._pool.frame_bytes)
        return (moves[first : first + each] for first in range(0, len(moves), each))

    def _sum(self, content: Bytes, move: Move) -> bytes:
        return checksum(content, move.key.name) if self._verifies else bytes(SUM_BYTES)

    def _void(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._seals[slot] = b""

    def _end(self) -> None:
        del self._memory, self._bytes
