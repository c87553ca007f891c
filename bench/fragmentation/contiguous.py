"""Contiguous caches in an arena: reservations for a whole life, and caches that move as they grow.

The three baselines of the PagedAttention paper reserve in a buddy allocator (its section 6.1):

    maximum        the longest context of the model
    power of two   the prompt, and the output rounded up to a power of two: an output of 25 reserves 32
    oracle         the true length, which no system knows

A cache of one tensor for each K and V of each layer, in the caching arena, that grows by concatenation is a
DynamicCache: the new tensor is written while the old one is there. A fork copies everything. A cache with a sliding
window is a ring: it never needs more than the window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pagedkv.bench.fragmentation.account import HEADROOM, Account, Allocator, Demand, Memory
from pagedkv.bench.fragmentation.arenas import Arena, MakeArena

Limit = Callable[[Memory, int, int], int]
"""(memory, prompt, final length) to the tokens to reserve."""


def to_maximum(memory: Memory, prompt: int, final: int) -> int:
    """Reserve for the longest context of the model."""
    return memory.longest


def to_power_of_two(memory: Memory, prompt: int, final: int) -> int:
    """Reserve at most twice the true output."""
    return min(memory.longest, prompt + power_of_two(final - prompt))


def to_true_length(memory: Memory, prompt: int, final: int) -> int:
    """Reserve exactly what is needed, as an oracle would."""
    return final


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(slots=True)
class _Held:
    """The blocks of one sequence, a block for each tensor, the tokens that each can hold, and the tokens stored."""

    addresses: list[int]
    capacities: list[int]
    length: int


class _Contiguous(Allocator):
    """An allocator whose sequences hold blocks of an arena. is_split: each K and V of each layer has its own block."""

    def __init__(self, name: str, memory: Memory, make_arena: MakeArena, *, is_split: bool = False) -> None:
        self.name, self.memory = name, memory
        self._blocks = memory.tensors if is_split else 1
        self._token = memory.token_bytes // self._blocks  # bytes of a token in one block
        self._arena: Arena = make_arena(memory.capacity, self._token)
        self._held: dict[int, _Held] = {}

    def overwrite(self, sequence: int, source: int) -> None:
        self.moved += self._held[source].length

    def free(self, sequence: int) -> None:
        for address in self._held.pop(sequence).addresses:
            self._arena.release(address)


class Reserving(_Contiguous):
    """An allocator that reserves the memory of a whole life when a sequence is admitted, so it never preempts."""

    def __init__(
        self, name: str, memory: Memory, limit: Limit, make_arena: MakeArena, *, window: int | None = None
    ) -> None:
        super().__init__(name, memory, make_arena)
        self._limit, self._window = limit, window

    def admit(self, sequence: int, length: int, final: int) -> bool:
        limit = self._limit(self.memory, length, final)
        return self._reserve(sequence, min(limit, self._window or limit), length)

    def _reserve(self, sequence: int, limit: int, length: int) -> bool:
        addresses = allocated(self._arena, self._blocks, limit * self.memory.token_bytes // self._blocks)
        if addresses is not None:
            self._held[sequence] = _Held(addresses, [limit], length)
        return addresses is not None

    def grow(self, demands: Sequence[Demand]) -> list[Demand]:
        for demand in demands:
            self._held[demand.sequence].length += demand.tokens
        return []

    def fork(self, parent: int, child: int) -> bool:
        ours = self._held[parent]
        self.moved += ours.length
        return self._reserve(child, ours.capacities[0], ours.length)

    def account(self, remaining: Mapping[int, int]) -> Account:
        token, limits, useful, reserved = self.memory.token_bytes, 0, 0, 0
        for sequence, held in self._held.items():
            [limit] = held.capacities
            stored = min(held.length, limit)
            limits += limit
            useful += stored
            reserved += min(remaining.get(sequence, 0), limit - stored)
        free = self.memory.capacity - self._arena.held
        rounded = self._arena.held - limits * token
        return Account(useful * token, reserved * token, (limits - useful - reserved) * token, rounded, free)


def allocated(arena: Arena, blocks: int, size: int) -> list[int] | None:
    """Return the addresses of so many blocks of `size` bytes, or None; then no block was allocated."""
    addresses: list[int] = []
    for _ in range(blocks):
        address = arena.allocate(size)
        if address is None:
            for other in addresses:
                arena.release(other)
            return None
        addresses.append(address)
    return addresses


class Growing(_Contiguous):
    """An allocator that moves a sequence to a larger block when it grows beyond its block.

    capacity_for: returns the capacity, in tokens, of a block for so many tokens.
    """

    is_blind = True

    def __init__(
        self,
        name: str,
        memory: Memory,
        capacity_for: Callable[[int], int],
        make_arena: MakeArena,
        *,
        is_split: bool = False,
    ) -> None:
        super().__init__(name, memory, make_arena, is_split=is_split)
        self._capacity_for = capacity_for
        self._headroom = int(HEADROOM * memory.capacity)

    def admit(self, sequence: int, length: int, final: int) -> bool:
        need = self._capacity_for(length) * self.memory.token_bytes
        if self._held and self.memory.capacity - self._arena.held < need + self._headroom:
            return False
        return self._place(sequence, length)

    def _place(self, sequence: int, length: int) -> bool:
        capacity = self._capacity_for(length)
        addresses = allocated(self._arena, self._blocks, capacity * self._token)
        if addresses is not None:
            self._held[sequence] = _Held(addresses, [capacity] * self._blocks, length)
        return addresses is not None

    def grow(self, demands: Sequence[Demand]) -> list[Demand]:
        return [demand for demand in demands if not self._grown(demand)]

    def _grown(self, demand: Demand) -> bool:
        """Grow a sequence, tensor by tensor. Tensors that have grown stay so if the next one finds no memory."""
        held = self._held[demand.sequence]
        needed = held.length + demand.tokens
        for block in range(self._blocks):
            if held.capacities[block] < needed:
                capacity = self._capacity_for(needed)
                address = self._arena.allocate(capacity * self._token)
                if address is None:
                    return False
                self._arena.release(held.addresses[block])
                held.addresses[block], held.capacities[block] = address, capacity
                if block == 0:
                    self.moved += held.length
        held.length += demand.tokens
        return True

    def fork(self, parent: int, child: int) -> bool:
        length = self._held[parent].length
        self.moved += length
        return self._place(child, length)

    def account(self, remaining: Mapping[int, int]) -> Account:
        capacities = useful = reserved = 0
        for sequence, held in self._held.items():
            capacity, stored = sum(held.capacities) * self._token, held.length * self.memory.token_bytes
            capacities += capacity
            useful += stored
            reserved += min(remaining.get(sequence, 0) * self.memory.token_bytes, capacity - stored)
        free = self.memory.capacity - self._arena.held
        return Account(useful, reserved, capacities - useful - reserved, self._arena.held - capacities, free)
