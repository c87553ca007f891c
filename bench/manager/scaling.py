"""The cost of a decode step against pool size and context length: `pagedkv bench manager --scaling`.

The lines should be nearly flat. All points take turns, in a new random order for each round; the first round does not
count. The step is plan + commit for 64 sequences, prefix cache on. In a full pool, each frame that a step takes is
evicted first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pagedkv.bench.clock import by_lot
from pagedkv.bench.manager.peers import BLOCK, turn_of
from pagedkv.bench.manager.runner import OURS, Case, Figure, decode, full_pool
from pagedkv.bench.record import Row
from pagedkv.core import MemoryManager

BATCH: Final = 64
GROWTH: Final = 32  # small enough for the smallest pool to hold the batch
POOLS: Final = (1_000, 10_000, 100_000, 1_000_000)
CONTEXTS: Final = (16, 128, 1024, 8192, 65_536)

FREE: Final = "frames, free"
FULL: Final = "frames, all cached: each new page evicts one"
CONTEXT: Final = "tokens of context"


@dataclass(frozen=True)
class Point:
    """One size on one line of the plot."""

    line: str
    size: int

    def make(self) -> Callable[[], float]:
        """Return a function that runs one step and returns its seconds."""
        if self.line == FULL:
            return decode(BATCH, full_pool(self.size, 250), growth=GROWTH, evicting=False)
        if self.line == FREE:
            return decode(BATCH, MemoryManager(self.size, BLOCK), growth=GROWTH)
        pages = self.size // BLOCK + GROWTH // BLOCK + 3
        return decode(BATCH, MemoryManager(BATCH * pages, BLOCK), context=self.size, growth=GROWTH)


POINTS: Final = (
    *(Point(line, size) for line in (FREE, FULL) for size in POOLS),
    *(Point(CONTEXT, size) for size in CONTEXTS),
)


def measure(rounds: int, report: Callable[[Row], None], points: tuple[Point, ...] = POINTS) -> None:
    """Measure the microseconds per step at each point; hand the rows to `report`, in the order of the points."""
    cases = {p: Case(f"step of {BATCH} sequences, {p.size:,} {p.line}", "us", None, 1, p.make) for p in points}
    runs = {point: case.make() for point, case in cases.items()}
    figures = {point: Figure(OURS, case) for point, case in cases.items()}
    for number, order in enumerate(by_lot(points, rounds, "manager against size")):
        for point in order:
            answer = turn_of(runs[point], cases[point].runs)
            if number:
                figures[point].add(answer)
    for figure in figures.values():
        report(figure.row())
