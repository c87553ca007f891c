"""Arenas: allocators of contiguous ranges of bytes. They know sizes and addresses, no sequences.

Buddy         Knowlton, CACM 1965: blocks of a power of two units; a freed block merges with its equal half. A size that
              is no power of two is divided into roots, the largest first: 15.7K slots are 8192 + 4096 + 2048 + ...
CachingArena  the policy that torch documents for its CUDA caching allocator ("Memory management" in the notes on CUDA,
              and the constants of c10/core): sizes are rounded up to 512 bytes; up to 1 MiB come from segments of
              2 MiB, below 10 MiB from segments of 20 MiB, and larger ones have a segment of their own, rounded up to
              2 MiB. The smallest free block that fits is taken and split if the rest is at least 512 bytes (small
              pool) or over 1 MiB (large pool). Free neighbours of one segment merge. Without memory for a new segment,
              all segments without a used block are given back first.
Both are O(log n) for n free blocks. tests/bench holds a slow twin of each.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

KIB, MIB = 1 << 10, 1 << 20
SMALLEST_BLOCK: Final = 512
SMALL: Final = MIB
SMALL_SEGMENT: Final = 2 * MIB
LARGE: Final = 10 * MIB
LARGE_SEGMENT: Final = 20 * MIB
SEGMENT_ROUNDING: Final = 2 * MIB


class Arena(Protocol):
    """An allocator of ranges.

    held: bytes of all used blocks, rounding included.
    """

    held: int

    def allocate(self, size: int) -> int | None:
        """Return the address of a new block of at least `size` bytes, or None."""

    def release(self, address: int) -> None:
        """Free a block."""


MakeArena = Callable[[int, int], Arena]
"""(capacity, unit) to an arena of so many bytes; unit: the smallest block that is of use."""


class Buddy:
    """A buddy allocator of blocks of `unit` · 2^k bytes. It takes the smallest block that fits, the lowest first."""

    def __init__(self, capacity: int, unit: int) -> None:
        self.held = 0
        self._unit = unit
        units = capacity // unit
        self._free: list[list[int]] = [[] for _ in range(units.bit_length())]  # heaps of addresses, stale ones included
        self._is_free: set[tuple[int, int]] = set()  # (order, address), in units
        self._order: dict[int, int] = {}
        self._roots: set[tuple[int, int]] = set()
        at = 0
        for order in reversed(range(units.bit_length())):
            if units >> order & 1:
                self._roots.add((order, at))
                self._put(order, at)
                at += 1 << order

    def allocate(self, size: int) -> int | None:
        """Return the address of a new block of at least `size` bytes, or None."""
        wanted = (-(-size // self._unit) - 1).bit_length()
        for order in range(wanted, len(self._free)):
            at = self._take(order)
            if at is not None:
                break
        else:
            return None
        while order > wanted:
            order -= 1
            self._put(order, at + (1 << order))
        self._order[at] = wanted
        self.held += self._unit << wanted
        return at * self._unit

    def release(self, address: int) -> None:
        """Free a block, and merge it with its free halves."""
        at = address // self._unit
        order = self._order.pop(at)
        self.held -= self._unit << order
        while (order, at) not in self._roots and (order, at ^ 1 << order) in self._is_free:
            self._is_free.discard((order, at ^ 1 << order))
            at &= ~(1 << order)
            order += 1
        self._put(order, at)

    def _put(self, order: int, at: int) -> None:
        self._is_free.add((order, at))
        heapq.heappush(self._free[order], at)

    def _take(self, order: int) -> int | None:
        heap = self._free[order]
        while heap:
            at = heapq.heappop(heap)
            if (order, at) in self._is_free:
                self._is_free.discard((order, at))
                return at
        return None


@dataclass(slots=True)
class _Block:
    """A block of a segment, with its neighbours there."""

    size: int
    address: int
    is_small: bool
    is_used: bool = True
    before: _Block | None = None
    after: _Block | None = None


def _merged(first: _Block, second: _Block) -> _Block:
    """Return `first` with the bytes of its neighbour `second`."""
    first.size += second.size
    first.after = second.after
    if first.after:
        first.after.before = first
    return first


class CachingArena:
    """Best fit in cached segments, as torch divides the memory of a GPU."""

    def __init__(self, capacity: int, unit: int = SMALLEST_BLOCK) -> None:
        """`unit` is ignored: torch has its own."""
        self.held = 0
        self.reserved = 0  # bytes of all segments
        self._capacity = capacity
        self._used: dict[int, _Block] = {}
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}  # by is_small; size, address
        self._next = 0  # addresses are never used again, as segments may be given back

    def allocate(self, size: int) -> int | None:
        """Return the address of a new block of at least `size` bytes, or None."""
        size = max(1, -(-size // SMALLEST_BLOCK)) * SMALLEST_BLOCK
        is_small = size <= SMALL
        free = self._free[is_small]
        place = bisect.bisect_left(free, (size, -1))
        block = free.pop(place)[2] if place < len(free) else self._new_segment(size, is_small)
        if block is None:
            return None
        rest = block.size - size
        if rest >= SMALLEST_BLOCK if is_small else rest > SMALL:
            tail = _Block(rest, block.address + size, is_small, False, block, block.after)
            if tail.after:
                tail.after.before = tail
            block.size, block.after = size, tail
            self._cache(tail)
        block.is_used = True
        self._used[block.address] = block
        self.held += block.size
        return block.address

    def release(self, address: int) -> None:
        """Cache a block, merged with its free neighbours."""
        block = self._used.pop(address)
        self.held -= block.size
        block.is_used = False
        if (before := block.before) and not before.is_used:
            self._uncache(before)
            block = _merged(before, block)
        if (after := block.after) and not after.is_used:
            self._uncache(after)
            block = _merged(block, after)
        self._cache(block)

    def _new_segment(self, size: int, is_small: bool) -> _Block | None:
        segment = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        if size >= LARGE:
            segment = -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
        if self.reserved + segment > self._capacity:
            self._give_back()
        if self.reserved + segment > self._capacity:
            return None
        self.reserved += segment
        self._next += segment
        return _Block(segment, self._next - segment, is_small)

    def _give_back(self) -> None:
        """Give back the segments that are one free block."""
        for is_small, free in self._free.items():
            whole = [entry for entry in free if entry[2].before is None and entry[2].after is None]
            self.reserved -= sum(size for size, _, _ in whole)
            self._free[is_small] = [entry for entry in free if entry[2].before or entry[2].after]

    def _cache(self, block: _Block) -> None:
        bisect.insort(self._free[block.is_small], (block.size, block.address, block))

    def _uncache(self, block: _Block) -> None:
        free = self._free[block.is_small]
        free.pop(bisect.bisect_left(free, (block.size, block.address)))
