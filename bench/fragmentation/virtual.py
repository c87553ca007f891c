"""Virtual memory: contiguous addresses for the longest context, pages mapped as a sequence grows (vAttention).

vAttention (Prabhu et al., ASPLOS 2025, arXiv 2405.04437) reserves addresses for each K and V of each layer and maps
physical pages of 2 MiB, or of 64 KiB with its own driver. So a page holds page / (bytes of a token in one tensor)
tokens: 1,024 of Llama 3 8B in 2 MiB. Addresses cost nothing. Pages of all tensors grow together. A fork copies, since a
page belongs to one address. Pages behind a window stay mapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedkv.bench.fragmentation.account import HEADROOM, Account, Allocator, Demand, Memory


class VirtualMemory(Allocator):
    """Pages of `page` bytes, mapped for each tensor."""

    def __init__(self, name: str, memory: Memory, page: int) -> None:
        self.name, self.memory, self._page = name, memory, page
        self._token = memory.token_bytes // memory.tensors
        self._groups = memory.capacity // (page * memory.tensors)  # a page for each tensor
        self._num_free = self._groups
        self._lengths: dict[int, int] = {}

    def _pages(self, length: int) -> int:
        return -(-length * self._token // self._page)

    def admit(self, sequence: int, length: int, final: int) -> bool:
        kept = int(HEADROOM * self._groups) if self._lengths else 0
        if self._pages(length) + kept > self._num_free:
            return False
        self._num_free -= self._pages(length)
        self._lengths[sequence] = length
        return True

    def grow(self, demands: Sequence[Demand]) -> list[Demand]:
        left = []
        for demand in demands:
            length = self._lengths[demand.sequence]
            pages = self._pages(length + demand.tokens) - self._pages(length)
            if pages > self._num_free:
                left.append(demand)
                continue
            self._num_free -= pages
            self._lengths[demand.sequence] = length + demand.tokens
        return left

    def fork(self, parent: int, child: int) -> bool:
        length = self._lengths[parent]
        if self._pages(length) > self._num_free:
            return False
        self._num_free -= self._pages(length)
        self._lengths[child] = length
        self.moved += length
        return True

    def overwrite(self, sequence: int, source: int) -> None:
        self.moved += self._lengths[source]

    def free(self, sequence: int) -> None:
        self._num_free += self._pages(self._lengths.pop(sequence))

    def account(self, remaining: Mapping[int, int]) -> Account:
        useful = reserved = internal = 0
        for sequence, length in self._lengths.items():
            stored = length * self.memory.token_bytes
            spare = self._pages(length) * self._page * self.memory.tensors - stored
            later = min(remaining.get(sequence, 0) * self.memory.token_bytes, spare)
            useful, reserved, internal = useful + stored, reserved + later, internal + spare - later
        return Account(useful, reserved, internal, 0, self.memory.capacity - useful - reserved - internal)
