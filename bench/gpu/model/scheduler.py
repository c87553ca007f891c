"""One scheduler of an SM and the warps that share it: the cycles of a tile.

In each cycle the scheduler issues the next instruction of one warp: of the last one again if it can, else of another
(greedy, as on recent GPUs). A warp can issue if its registers are there, the pipe is free, it has waited for its stall,
and no barrier holds it. Products of a warpgroup queue up and hold no issue slot until their wait. Memory costs no time:
copies have landed. So the result is what computing alone allows; predict.py sets it against memory.

    cycles / warps   = cycles of the scheduler for one tile, in the steady state of warps that run the same loop
    cycles           = cycles of a tile as one of these warps sees it

Complexity: about a microsecond of the host for each cycle and warp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from pagedkv.bench.gpu.model.pipes import PIPES, Needs, needs_of

TILES: Final = 6
"""Tiles that are run for each warp."""

SKIPPED: Final = 2
"""Tiles of each warp that fill the pipes at the start and do not count."""


def pipe_cycles(code: Sequence[str]) -> dict[str, int]:
    """Return the cycles of each pipe that one pass through the code takes; "issue" has one for each instruction."""
    found: Counter[str] = Counter(issue=len(code))
    for needs in map(needs_of, code):
        if needs.pipe:
            found[needs.pipe] += needs.cycles
    return {pipe: found[pipe] for pipe in PIPES if found[pipe]}


def cycles(code: Sequence[str], warps: int, together: int = 1) -> float:
    """Return the cycles of a tile of one warp when `warps` warps share the scheduler.

    code:     the instructions of a tile, without predicates
    together: warps of one program on this scheduler: they meet at its barriers.
    """
    scheduler = _WarpScheduler([needs_of(text) for text in code], warps, together)
    while len(scheduler.marks) < TILES * warps:
        scheduler.step()
    return (scheduler.marks[-1] - scheduler.marks[SKIPPED * warps - 1]) / (TILES - SKIPPED)


class _WarpScheduler:
    """The state of a scheduler: the place of each warp, when registers and pipes are ready."""

    def __init__(self, code: list[Needs], warps: int, together: int) -> None:
        self.code, self.together, self.now = code, together, 0
        self.at, self.next_issue = [0] * warps, [0] * warps
        self.products = [0] * warps  # when the last product of a warpgroup ends
        self.ready: list[dict[str, int]] = [{} for _ in range(warps)]
        self.free: dict[str, int] = {}
        self.met = [0] * warps  # barriers passed
        self.marks: list[int] = []  # when each tile ended, of any warp
        self.last = 0

    def step(self) -> None:
        """Issue at most one instruction, and let a cycle pass."""
        count = len(self.at)
        for turn in range(count):
            warp = (self.last + turn) % count
            if self._can_issue(warp):
                self._issue(warp)
                self.last = warp
                break
        self.now += 1

    def _can_issue(self, warp: int) -> bool:
        needs, ready, now = self.code[self.at[warp]], self.ready[warp], self.now
        if self.next_issue[warp] > now or (self.free.get(needs.pipe, 0) > now and not needs.starts):
            return False
        if needs.waits and self.products[warp] > now:
            return False
        if needs.meets and not self._all_arrived(warp):
            return False
        return all(ready.get(register, 0) <= now for register in (*needs.reads, *needs.writes))

    def _all_arrived(self, warp: int) -> bool:
        """Whether every warp of the program stands at this barrier or has passed it."""
        first = warp // self.together * self.together
        return all(
            self.met[other] > self.met[warp]
            or (
                self.met[other] == self.met[warp]
                and self.code[self.at[other]].meets
                and self.next_issue[other] <= self.now
            )
            for other in range(first, min(first + self.together, len(self.at)))
        )

    def _issue(self, warp: int) -> None:
        needs, now = self.code[self.at[warp]], self.now
        if needs.pipe:
            self.free[needs.pipe] = max(now, self.free.get(needs.pipe, 0)) + needs.cycles
        for register in needs.writes:
            self.ready[warp][register] = now + needs.latency
        if needs.starts:
            self.products[warp] = self.free[needs.pipe] + USUAL_PRODUCT
        self.next_issue[warp] = now + needs.stall
        self.met[warp] += needs.meets
        self.at[warp] += 1
        if self.at[warp] == len(self.code):
            self.at[warp] = 0
            self.marks.append(now)


USUAL_PRODUCT: Final = 30
"""Cycles from the last product of a warpgroup until its sums may be read."""
