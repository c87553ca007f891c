"""What the memory manager costs, beside the managers that people use today, all in one run: `pagedkv bench manager`.

Every figure is the median over rounds that go through all cases in turn, ours and then each peer's, so that a slow moment of the machine
hits all alike. Peers are driven by peers.py in processes of their own; what cannot be had is reported with its reason. Cases of a pair are
the same work: the same number of sequences, tokens and blocks of 16, prefix cache on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from pagedkv.core import AddressSpace, MemoryManager

OURS: Final = "pagedkv"
BLOCK: Final = 16
SCALE: Final = {"ns": 1e9, "us": 1e6, "ms": 1e3}


@dataclass(frozen=True)
class Case:
    """`make()` returns what does `work` units and says how many seconds they took; `limit` is what issue and manual promise, in `unit`."""

    name: str
    unit: str
    limit: float | None
    work: int
    make: Callable[[], Callable[[], float]]
    rounds: int = 10**9  # at most


@dataclass
class Figure:
    """The median of one case for one manager; or, with nothing measured, why not."""

    who: str
    case: str
    unit: str
    median: float | None = None
    best: float | None = None
    limit: float | None = None
    rounds: int = 0
    why_not: str = ""
    samples: list[float] = field(default_factory=list, repr=False)

    def settle(self) -> None:
        """Median and best of the samples; the first one paid for what was cold."""
        if kept := self.samples[1:] or self.samples:
            self.median, self.best, self.rounds = statistics.median(kept), min(kept), len(kept)

    def row(self) -> dict[str, Any]:
        """What is written down."""
        return {name: value for name, value in asdict(self).items() if name != "samples"}


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def prompt(seed: int, pages: int) -> np.ndarray:
    """int32 [pages * BLOCK + 1]."""
    return np.random.default_rng(seed).integers(0, 30_000, pages * BLOCK + 1).astype(np.int32)


def grown(mm: MemoryManager, ids: np.ndarray) -> AddressSpace:
    """A space that holds `ids`, nothing of them matched."""
    space = mm.open()
    mm.commit(mm.plan([space], [len(ids)]), ids)
    return space


def full_pool(num_frames: int, pages: int) -> MemoryManager:
    """A pool whose frames all hold published pages of prompts 0, 1, 2, ..."""
    mm = MemoryManager(num_frames, BLOCK)
    for seed in range(num_frames // pages):
        grown(mm, prompt(seed, pages)[:-1]).release()
    return mm


def decode(batch: int, mm: MemoryManager, *, context: int = 1, growth: int = 256) -> Callable[[], float]:
    """plan + commit of a step in which each of `batch` sequences of staggered lengths grows by one token; prefix cache on."""
    spaces = [grown(mm, prompt(i, -(-context // BLOCK) + 1)[: context + i % BLOCK]) for i in range(batch)]
    asids, ones = np.array([space.asid for space in spaces], np.int32), np.ones(batch, np.int64)
    ids = np.arange(batch, dtype=np.int32)

    def run() -> float:
        if len(spaces[0]) > context + growth:  # else the pool would fill up
            for i, space in enumerate(spaces):
                space.truncate(context + i % BLOCK)
            mm.evict(mm.num_frames)
            mm.commit(mm.plan(asids, ones), ids)  # the shared tails are copied once
        return timed(lambda: mm.commit(mm.plan(asids, ones), ids))

    return run


def allocate_and_release(batch: int, num_frames: int) -> Callable[[], float]:
    """plan and abort of `batch` frames: slots and positions of all their tokens are made, too."""
    mm = MemoryManager(num_frames, 1)
    space = mm.open()
    return lambda: timed(lambda: mm.abort(mm.plan([space], [batch])))


def match(pages: int, num_frames: int) -> Callable[[], float]:
    """open() of prompts that are wholly known, in a pool full of others."""
    mm = full_pool(num_frames, pages)
    prompts = [prompt(seed, pages) for seed in range(num_frames // pages)]
    turn = iter(range(10**9))

    def run() -> float:
        ids = prompts[next(turn) * 7919 % len(prompts)]
        opened: list[AddressSpace] = []
        seconds = timed(lambda: opened.append(mm.open(ids)))
        assert len(opened[0]) == pages * BLOCK
        opened[0].release()
        return seconds

    return run


def publish(pages: int, num_frames: int) -> Callable[[], float]:
    """commit of a whole new prompt; each page took the place of one that was evicted when it was planned."""
    mm = full_pool(num_frames, pages)
    turn = iter(range(num_frames, 10**9))

    def run() -> float:
        ids = prompt(next(turn), pages)[:-1]
        space = mm.open()
        plan = mm.plan([space], [len(ids)])
        seconds = timed(lambda: mm.commit(plan, ids))
        space.release()
        return seconds

    return run


def fork(pages: int) -> Callable[[], float]:
    """fork() of a space of `pages` pages."""
    mm = MemoryManager(2 * pages, BLOCK)
    parent = grown(mm, prompt(0, pages)[:-1])

    def run() -> float:
        children: list[AddressSpace] = []
        seconds = timed(lambda: children.append(parent.fork()))
        children[0].release()
        return seconds

    return run


def create(num_frames: int) -> Callable[[], float]:
    return lambda: timed(lambda: MemoryManager(num_frames, BLOCK))


CASES: Final = (
    Case("decode step, 256 sequences", "us", 30, 1, lambda: decode(256, MemoryManager(20_000, BLOCK))),
    Case("decode step, 1,024 sequences", "us", 80, 1, lambda: decode(1024, MemoryManager(40_000, BLOCK))),
    Case("the same, pool of 1e6 frames", "us", 80, 1, lambda: decode(1024, MemoryManager(1_000_000, BLOCK))),
    Case("the same, context of 500 tokens", "us", 80, 1, lambda: decode(1024, MemoryManager(100_000, BLOCK), context=500)),
    Case("get and free a block, by 1,000", "ns", 30, 1000, lambda: allocate_and_release(1000, 100_000)),
    Case("match a block, pool of 1e5", "ns", 100, 250, lambda: match(250, 100_000)),
    Case("publish a block, pool of 1e5", "ns", 150, 250, lambda: publish(250, 100_000)),
    Case("fork 4,096 pages", "us", 20, 1, lambda: fork(4096)),
    Case("create a pool of 1e6", "ms", 100, 1, lambda: create(1_000_000), rounds=5),
)


def measure(rounds: int) -> list[Figure]:
    """The figures of `rounds` rounds of CASES."""
    figures = {case.name: Figure(OURS, case.name, case.unit, limit=case.limit) for case in CASES}
    runs = {case.name: case.make() for case in CASES}
    for round_ in range(rounds + 1):
        for case in CASES:
            if round_ <= case.rounds:
                figures[case.name].samples.append(runs[case.name]() / case.work * SCALE[case.unit])
    for figure in figures.values():
        figure.settle()
    return list(figures.values())
