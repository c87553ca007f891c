"""Our memory manager as an allocator of the benchmark: every figure comes from the live `pagedkv.core.MemoryManager`.

A step is one plan and one commit for all sequences. Pages are not published, as prompts of the benchmark share nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from pagedkv.bench.fragmentation.account import HEADROOM, Account, Allocator, Demand, Memory
from pagedkv.core import AddressSpace, Group, MemoryManager
from pagedkv.errors import OutOfFrames


class Live(Allocator):
    """A MemoryManager with frames of `block_size` tokens.

    window:      positions that a query sees.
    gives_back:  whether the manager knows the window, and frees the frames behind it.
    """

    def __init__(
        self, name: str, memory: Memory, block_size: int, *, window: int | None = None, gives_back: bool = True
    ) -> None:
        self.name, self.memory, self._window = name, memory, window
        self.manager = MemoryManager(
            memory.slots // block_size,
            block_size,
            prefix_cache=False,
            watermark=HEADROOM,
            groups=(Group(window=window if gives_back else None),),
        )
        self.spaces: dict[int, AddressSpace] = {}
        self._lengths: dict[int, int] = {}
        self._runs: list[tuple[int, int]] = []  # pages and runs of each finished sequence

    def admit(self, sequence: int, length: int, final: int) -> bool:
        frames = -(-length // self.manager.block_size)
        if self.spaces and not self.manager.admits(frames):
            return False
        space = self.manager.open()
        self.spaces[sequence], self._lengths[sequence] = space, 0
        if self.grow([Demand(sequence, length)]):
            self.free(sequence)
            return False
        return True

    def grow(self, demands: Sequence[Demand]) -> list[Demand]:
        asids = np.array([self.spaces[demand.sequence].asid for demand in demands], np.int32)
        tokens = np.array([demand.tokens for demand in demands], np.int64)
        try:
            plan = self.manager.plan(asids, tokens)
        except OutOfFrames:
            return list(demands)
        self.moved += plan.num_copies * self.manager.block_size
        self.manager.commit(plan, None)
        for demand in demands:
            self._lengths[demand.sequence] += demand.tokens
        return []

    def fork(self, parent: int, child: int) -> bool:
        self.spaces[child] = self.spaces[parent].fork()
        self._lengths[child] = self._lengths[parent]
        return True

    def overwrite(self, sequence: int, source: int) -> None:
        old, self.spaces[sequence] = self.spaces[sequence], self.spaces[source].fork()
        old.release()

    def free(self, sequence: int) -> None:
        space = self.spaces.pop(sequence)
        runs = space.runs
        if len(runs):
            self._runs.append((int(runs[:, 1].sum()), len(runs)))
        del self._lengths[sequence]
        space.release()

    def account(self, remaining: Mapping[int, int]) -> Account:
        size, token = self.manager.block_size, self.memory.token_bytes
        stats = self.manager.stats()
        useful, wasted = stats.slots_mapped - stats.slots_wasted, stats.slots_wasted
        if self._window:  # no workload forks and has a window
            useful = sum(min(length, self._window) for length in self._lengths.values())
            wasted = stats.slots_mapped - useful
            pages = stats.mapped
        else:
            pages = sum(-(-length // size) for length in self._lengths.values())
        reserved = sum(min(remaining.get(i, 0), -length % size) for i, length in self._lengths.items())
        reserved = min(reserved, wasted)  # the shared tail of a fork counts for each sequence above
        free = self.memory.slots - stats.slots_mapped  # slots beyond the last whole frame count as free
        return Account(
            useful * token,
            reserved * token,
            (wasted - reserved) * token,
            0,
            free * token,
            (pages - stats.mapped) * size * token,
        )

    def figures(self) -> dict[str, float]:
        """Return frames copied on write, and of the finished sequences the median pages, runs and mean run length."""
        found: dict[str, float] = {"copies": self.manager.stats().copies}
        if self._runs:
            pages, runs = zip(*self._runs, strict=True)
            found |= {"pages": statistics.median(pages), "runs": statistics.median(runs)}
            found["mean_run"] = sum(pages) / sum(runs)
        return found
