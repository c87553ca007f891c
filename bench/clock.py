"""Interleaved timing: the variants take turns, repetition by repetition; the median is over undisturbed repetitions.

Each repetition draws a new order of the variants, so that no variant always follows the same one: the time of a call
depends on what ran before (another process leaves cold caches and sleeping threads). A `Step` prepares one repetition,
untimed, and returns the function that is timed. Another device supplies its own `Timer`.

A repetition is disturbed, and does not count, if
    others ran on its cores      each of its involuntary context switches (getrusage) may have taken SLICE; together
                                 they may take LOST of its seconds, so less than 80 ms bear none
    memory changed its state     bare reads before its turn and after it differ (memory.py)
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from pagedkv.bench.memory import bare_read, is_steady

Step = Callable[[], Callable[[], object]]
Timer = Callable[[Callable[[], object]], tuple[float, bool]]
Name = TypeVar("Name", bound=Hashable)
T = TypeVar("T")

LEAST_CLEAN: Final = 5
WARM_UP: Final = 2
SLICE: Final = 0.004
"""Seconds that another process may have had the core for, at each involuntary context switch."""
LOST: Final = 0.05
TRIES: Final = 3
PAUSE: Final = 0.1
"""Seconds before a reading of memory is repeated: our own threads have gone to sleep then."""
SECONDS_EACH: Final = 1.5
"""A variant that has taken longer than this in all is repeated no more, after three repetitions at least."""


@dataclass(frozen=True)
class Timing:
    """The time of one variant.

    seconds: the median of the `clean` clean repetitions. If fewer than LEAST_CLEAN of them (or half, if there are few
             repetitions) are clean, it is the median of all repetitions, and `clean` is 0.
    turns:   the seconds of each turn that counts; None for the others.
    memory:  the slowest and the fastest reading of memory in these turns, GB/s; () if nothing was read.
    """

    seconds: float
    best: float
    clean: int
    repetitions: int
    turns: tuple[float | None, ...] = ()
    memory: tuple[float, ...] = ()

    def fields(self, figure: Callable[[float], float]) -> dict[str, Any]:
        """Return the fields of a row: median, best, worst, the figure of each turn, the clean turns, and memory."""
        turns = [None if seconds is None else round(figure(seconds), 6) for seconds in self.turns]
        worst = max(seconds for seconds in self.turns if seconds is not None)
        ends = {"median": figure(self.seconds), "best": figure(self.best), "worst": figure(worst)}
        return ends | {"turns": turns, "clean": self.clean} | ({"memory": self.memory} if self.memory else {})


def ratios(one: Timing, other: Timing, figure: Callable[[float, float], float]) -> list[float]:
    """Return `figure`(seconds of one, seconds of the other) of each turn in which both timings count."""
    pairs = zip(one.turns, other.turns, strict=False)
    return [figure(a, b) for a, b in pairs if a is not None and b is not None]


def compare(one: Timing, other: Timing, figure: Callable[[float, float], float]) -> float:
    """Return the median of `ratios`. If these turns are too few, return `figure` of the two medians.

    The machine may be faster by a half in one minute than in the next; within one turn this affects both timings alike.
    """
    both = ratios(one, other, figure)
    if not both or len(both) < _least(min(one.repetitions, other.repetitions)):
        return figure(one.seconds, other.seconds)
    return statistics.median(both)


def own_switches() -> int:
    """Return the involuntary context switches of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def switches_below() -> int:
    """Return the involuntary context switches of this process and of all its descendants so far."""
    count, found = 0, [os.getpid()]
    while found:
        with contextlib.suppress(OSError):  # a process or a thread that ended meanwhile
            for thread in Path(f"/proc/{found.pop()}/task").iterdir():
                found += map(int, (thread / "children").read_text(encoding="utf-8").split())
                status = (thread / "status").read_text(encoding="utf-8")
                count += int(status.rpartition("nonvoluntary_ctxt_switches:")[2])
    return count


def watched(run: Callable[[], T], switches: Callable[[], int] = own_switches) -> tuple[T, float, bool]:
    """Return what `run` returns, its seconds, and whether it was undisturbed by other processes."""
    before, began = switches(), time.perf_counter()
    result = run()
    seconds = time.perf_counter() - began
    return result, seconds, is_undisturbed(switches() - before, seconds)


def together(
    run: Callable[[], list[tuple[float, bool]]], switches: Callable[[], int] = own_switches
) -> tuple[float, bool]:
    """Return the median of calls that `run` times one by one, and whether half of them, or all together, were clean.

    run: returns the seconds of each, and whether it was clean; the median is that of the clean ones, as in `settled`
    """
    taken, _, is_clean = watched(run, switches)
    timing = settled(taken)
    return timing.seconds, is_clean or 2 * timing.clean >= len(taken)


def is_undisturbed(switches: int, seconds: float) -> bool:
    """Whether involuntary context switches took little enough of a repetition."""
    return switches * SLICE <= LOST * seconds


def on_this_cpu(run: Callable[[], object]) -> tuple[float, bool]:
    """Time one call of `run`: return its seconds and whether it was clean.

    If `run` returns an `Elsewhere`, another process has timed the call, and its figures count.
    """
    result, seconds, is_clean = watched(run)
    return (result.seconds, result.clean) if isinstance(result, Elsewhere) else (seconds, is_clean)


@dataclass(frozen=True)
class Elsewhere:
    """The timing that another process reports of its own call."""

    seconds: float
    clean: bool


class Turns(Generic[Name]):
    """The figures of variants that take turns, and whether each counts. Iterate to get the order of each turn.

    reads_memory: whether memory is read between turns; False where the variants themselves are bracketed by reads.
    """

    def __init__(
        self, variants: Iterable[Name], turns: int, text: str = "turns", *, warm_up: int = 1, reads_memory: bool = True
    ) -> None:
        self.taken: dict[Name, list[tuple[float, bool]]] = {name: [] for name in variants}
        self.turns, self.text, self.warm_up = turns, text, warm_up
        self._read = bare_read() if reads_memory else lambda: math.nan
        self._rates: list[float] = []

    def __iter__(self) -> Iterator[list[Name]]:
        """Yield the variants in a new order for each turn. The first `warm_up` turns do not count."""
        for order in by_lot(self.taken, self.turns, self.text, warm_up=self.warm_up):
            self._read_memory()
            yield order
        self._read_memory()

    def _read_memory(self) -> None:
        """Keep a reading of memory. One that differs from the last one is repeated: a change must last to count."""
        rate = self._read()
        for _ in range(TRIES if self._rates else 0):
            if is_steady(self._rates[-1], rate):
                break
            time.sleep(PAUSE)
            rate = self._read()
        self._rates.append(rate)

    def add(self, name: Name, seconds: float, is_clean: bool) -> None:
        """Keep the seconds of a variant in this turn."""
        self.taken[name].append((seconds, is_clean))

    def drop(self, name: Name) -> None:
        """Forget a variant: it has no timing. The orders of later turns still name it."""
        del self.taken[name]

    def timings(self) -> dict[Name, Timing]:
        """Return the timing of each variant. A change of memory's state disturbs a turn for all."""
        rates = self._rates[self.warm_up :]
        steady = [is_steady(before, after) for before, after in itertools.pairwise(rates)]
        read = [round(rate, 2) for rate in rates if not math.isnan(rate)]
        memory = (min(read), max(read)) if read else ()
        return {
            name: replace(
                settled([(s, ok and on) for (s, ok), on in zip(runs[self.warm_up :], steady, strict=False)]),
                memory=memory,
            )
            for name, runs in self.taken.items()
        }


def in_turn(
    steps: dict[Name, Step], repetitions: int, timer: Timer = on_this_cpu, *, reads_memory: bool = True
) -> dict[Name, Timing]:
    """Time each step `repetitions` times, the steps taking turns, after WARM_UP untimed turns."""
    if not steps:
        return {}
    turns = Turns(steps, repetitions, warm_up=WARM_UP, reads_memory=reads_memory)
    for order in turns:
        for name in order:
            before = turns.taken[name]
            if len(before) < 3 + WARM_UP or sum(seconds for seconds, _ in before[WARM_UP:]) < SECONDS_EACH:
                turns.add(name, *timer(steps[name]()))
    return turns.timings()


def by_lot(variants: Iterable[Name], turns: int, text: str = "turns", *, warm_up: int = 1) -> Iterator[list[Name]]:
    """Yield the variants in a new random order for each of `warm_up` turns, which do not count, and of `turns` turns.

    text: the text of a progress line.
    """
    lots, order = random.Random(0), list(variants)
    for _ in track(range(warm_up + turns), text):
        lots.shuffle(order)
        yield list(order)


def track(steps: Sequence[T], text: str) -> Iterator[T]:
    """Yield each of `steps`. A line on a terminal says how many are done; it changes only between two steps."""
    shown, clear = -math.inf, "\r\033[K"
    for done, step in enumerate(steps):
        if sys.stderr.isatty() and time.monotonic() > shown + 0.1:
            print(f"{clear}{text}: {done} of {len(steps)}", end="", file=sys.stderr, flush=True)
            shown = time.monotonic()
        yield step
    if shown > 0:
        print(clear, end="", file=sys.stderr, flush=True)


def _least(repetitions: int) -> int:
    return min(LEAST_CLEAN, -(-repetitions // 2))


def settled(runs: list[tuple[float, bool]]) -> Timing:
    """Return the timing of repetitions, (seconds, is clean) of each."""
    clean = sum(is_clean for _, is_clean in runs)
    enough = clean >= _least(len(runs))
    turns = tuple(seconds if is_clean or not enough else None for seconds, is_clean in runs)
    counted = [seconds for seconds in turns if seconds is not None]
    return Timing(statistics.median(counted), min(counted), clean if enough else 0, len(runs), turns)
