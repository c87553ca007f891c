"""Slow twins of the allocators of `bench/fragmentation`: they hold a mark for each slot, page or block, and search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from pagedkv.bench.fragmentation.account import HEADROOM, Account, Allocator, Demand, Memory
from pagedkv.bench.fragmentation.arenas import KIB, MIB


class SlowBuddy:
    """A buddy allocator without free lists: it looks at every unit for the largest aligned free blocks."""

    def __init__(self, units: int) -> None:
        self.used = [False] * units
        self.sizes: dict[int, int] = {}
        self.roots, at = [], 0
        for order in reversed(range(units.bit_length())):
            if units >> order & 1:
                self.roots.append((at, 1 << order))
                at += 1 << order

    def free_blocks(self) -> list[tuple[int, int]]:
        """Return (size, address) of every free block that no larger free block contains."""
        found, todo = [], list(self.roots)
        while todo:
            at, size = todo.pop()
            if not any(self.used[at : at + size]):
                found.append((size, at))
            elif size > 1:
                todo += [(at, size // 2), (at + size // 2, size // 2)]
        return found

    def allocate(self, units: int) -> int | None:
        size = 1
        while size < units:
            size *= 2
        fitting = [block for block in self.free_blocks() if block[0] >= size]
        if not fitting:
            return None
        at = min(fitting)[1]
        self.used[at : at + size] = [True] * size
        self.sizes[at] = size
        return at

    def release(self, at: int) -> None:
        size = self.sizes.pop(at)
        self.used[at : at + size] = [False] * size


class SlowCachingArena:
    """torch's policy over lists: a segment is [is_small, [[address, size, is_used], ...]], and all are searched."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.next = capacity, 0
        self.segments: list[tuple[bool, list[list[int]]]] = []

    @property
    def reserved(self) -> int:
        return sum(block[1] for _, blocks in self.segments for block in blocks)

    @property
    def held(self) -> int:
        return sum(block[1] for _, blocks in self.segments for block in blocks if block[2])

    def allocate(self, size: int) -> int | None:
        size = (size + 511) // 512 * 512
        is_small = size <= MIB
        fitting = [
            (block[1], block[0], blocks, i)
            for small, blocks in self.segments
            for i, block in enumerate(blocks)
            if small == is_small and not block[2] and block[1] >= size
        ]
        if not fitting:
            length = (
                2 * MIB if is_small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            )
            if self.reserved + length > self.capacity:
                self.segments = [s for s in self.segments if len(s[1]) > 1 or s[1][0][2]]
            if self.reserved + length > self.capacity:
                return None
            self.segments.append((is_small, [[self.next, length, 0]]))
            fitting = [(length, self.next, self.segments[-1][1], 0)]
            self.next += length
        length, address, blocks, i = min(fitting, key=lambda found: found[:2])
        rest = length - size
        if rest >= 512 if is_small else rest > 1024 * KIB:
            blocks[i : i + 1] = [[address, size, 1], [address + size, rest, 0]]
        else:
            blocks[i][2] = 1
        return address

    def release(self, address: int) -> None:
        for _, blocks in self.segments:
            for block in blocks:
                if block[0] == address:
                    block[2] = 0
            i = 1
            while i < len(blocks):
                if blocks[i - 1][2] or blocks[i][2]:
                    i += 1
                else:
                    blocks[i - 1][1] += blocks.pop(i)[1]


class SlowGrowing(Allocator):
    """Caches that move to a larger block: each tensor of a sequence is [address, a mark for each slot of its block]."""

    name, is_blind = "slow growing", True

    def __init__(self, memory: Memory, room: Callable[[int], int], arena: SlowBuddy | SlowCachingArena) -> None:
        self.memory, self.room, self.arena = memory, room, arena
        self.tensors = 1 if isinstance(arena, SlowBuddy) else memory.tensors
        self.slot = 1 if isinstance(arena, SlowBuddy) else memory.token_bytes // memory.tensors
        self.blocks: dict[int, list[tuple[int, list[bool]]]] = {}

    def bytes_held(self) -> int:
        if isinstance(self.arena, SlowBuddy):
            return sum(self.arena.used) * self.memory.token_bytes
        return self.arena.held

    def admit(self, sequence: int, length: int, final: int) -> bool:
        left = self.memory.capacity - self.bytes_held() - self.room(length) * self.memory.token_bytes
        if self.blocks and left < int(HEADROOM * self.memory.capacity):
            return False
        return self.place(sequence, length)

    def place(self, sequence: int, length: int) -> bool:
        room, found = self.room(length), []
        for _ in range(self.tensors):
            address = self.arena.allocate(room * self.slot)
            if address is None:
                for other, _ in found:
                    self.arena.release(other)
                return False
            found.append((address, [i < length for i in range(room)]))
        self.blocks[sequence] = found
        return True

    def grow(self, demands: Sequence[Demand]) -> list[Demand]:
        return [demand for demand in demands if not self.grown(demand)]

    def grown(self, demand: Demand) -> bool:
        tensors = self.blocks[demand.sequence]
        for i, (old, marks) in enumerate(tensors):
            if marks.count(False) < demand.planned:
                room = self.room(sum(marks) + demand.planned)
                new = self.arena.allocate(room * self.slot)
                if new is None:
                    return False
                self.arena.release(old)
                self.moved += sum(marks) if i == 0 else 0
                tensors[i] = new, [slot < sum(marks) for slot in range(room)]
        for _, marks in tensors:
            for _ in range(demand.kept):
                marks[marks.index(False)] = True
        return True

    def fork(self, parent: int, child: int) -> bool:
        length = sum(self.blocks[parent][0][1])
        self.moved += length
        return self.place(child, length)

    def overwrite(self, sequence: int, source: int) -> None:
        self.moved += sum(self.blocks[sequence][0][1])

    def free(self, sequence: int) -> None:
        for address, _ in self.blocks.pop(sequence):
            self.arena.release(address)

    def account(self, remaining: Mapping[int, int]) -> Account:
        useful = later = unused = 0
        slot = self.memory.token_bytes // self.tensors
        for sequence, tensors in self.blocks.items():
            empty = sum(marks.count(False) for _, marks in tensors) * slot
            soon = min(empty, remaining.get(sequence, 0) * self.memory.token_bytes)
            useful += sum(sum(marks) for _, marks in tensors) * slot
            later, unused = later + soon, unused + empty - soon
        held = self.bytes_held()
        return Account(useful, later, unused, held - useful - later - unused, self.memory.capacity - held)


class SlowPages(Allocator):
    """Paging with copy-on-write over Python lists: a frame is the set of slots that hold a token."""

    name = "slow pages"

    def __init__(self, memory: Memory, block_size: int) -> None:
        self.memory, self.size = memory, block_size
        self.num_frames = memory.slots // block_size
        self.tables: dict[int, list[set[int]]] = {}
        self.lengths: dict[int, int] = {}

    def frames(self) -> dict[int, set[int]]:
        return {id(frame): frame for table in self.tables.values() for frame in table}

    def refs(self, frame: set[int]) -> int:
        return sum(other is frame for table in self.tables.values() for other in table)

    def num_free(self) -> int:
        return self.num_frames - len(self.frames())

    def admit(self, sequence: int, length: int, final: int) -> bool:
        pages = -(-length // self.size)
        if pages > self.num_free() - (math.ceil(HEADROOM * self.num_frames) if self.tables else 0):
            return False
        self.tables[sequence], self.lengths[sequence] = [], 0
        return not self.grow([Demand(sequence, length, length)])

    def grow(self, demands: Sequence[Demand]) -> list[Demand]:
        needed = 0
        for demand in demands:
            length, table = self.lengths[demand.sequence], self.tables[demand.sequence]
            needed += -(-(length + demand.planned) // self.size) - len(table)
        tails = [self.tables[w.sequence][-1] for w in demands if self.lengths[w.sequence] % self.size]
        for tail in {id(tail): tail for tail in tails}.values():
            writers = sum(other is tail for other in tails)
            needed += min(writers, self.refs(tail) - 1)
        if needed > self.num_free():
            return list(demands)
        for demand in demands:
            table, begin = self.tables[demand.sequence], self.lengths[demand.sequence]
            for position in range(begin, begin + demand.kept):
                page, slot = divmod(position, self.size)
                if page == len(table):
                    table.append(set())
                if self.refs(table[page]) > 1:
                    self.moved += self.size
                    table[page] = set(table[page])
                table[page].add(slot)
            self.lengths[demand.sequence] = begin + demand.kept
        return []

    def fork(self, parent: int, child: int) -> bool:
        self.tables[child], self.lengths[child] = list(self.tables[parent]), self.lengths[parent]
        return True

    def overwrite(self, sequence: int, source: int) -> None:
        self.fork(source, sequence)

    def free(self, sequence: int) -> None:
        del self.tables[sequence], self.lengths[sequence]

    def account(self, remaining: Mapping[int, int]) -> Account:
        token, frames = self.memory.token_bytes, self.frames()
        useful, held = sum(map(len, frames.values())), len(frames) * self.size
        later = sum(min(remaining.get(i, 0), -length % self.size) for i, length in self.lengths.items())
        later = min(later, held - useful)
        saved = (sum(map(len, self.tables.values())) - len(frames)) * self.size
        parts = (useful, later, held - useful - later, 0, self.memory.slots - held, saved)
        return Account(*(part * token for part in parts))


def mapped_bytes(memory: Memory, page: int, lengths: Sequence[int]) -> int:
    """Return the bytes of all pages of virtual memory that a byte of a token touches, token by token."""
    token, found = memory.token_bytes // memory.tensors, 0
    for length in lengths:
        touched = {byte // page for at in range(length) for byte in (at * token, (at + 1) * token - 1)}
        found += len(touched) * page * memory.tensors
    return found
