"""Interleaved timing: the variants take turns, repetition by repetition; the median is over undisturbed repetitions.

Each repetition draws a new order of the variants, so that no variant always follows the same one: the time of a call
depends on what ran before (another process leaves cold caches and sleeping threads). A `Step` prepares one repetition,
untimed, and returns the function that is timed. On a CPU a repetition is clean if no involuntary context switch fell
into it (getrusage). Another device supplies its own `Timer`.
This file knows nothing of attention.
"""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from pagedkv.bench.progress import track

Step = Callable[[], Callable[[], object]]
Timer = Callable[[Callable[[], object]], tuple[float, bool]]
Name = TypeVar("Name", bound=Hashable)

LEAST_CLEAN: Final = 5
WARM_UP: Final = 2
SECONDS_EACH: Final = 1.5
"""A variant that has taken longer than this in all is repeated no more, after three repetitions at least."""


@dataclass(frozen=True)
class Timing:
    """The time of one variant.

    seconds: the median of the `clean` clean repetitions. If fewer than LEAST_CLEAN of them (or half, if there are few
             repetitions) are clean, it is the median of all repetitions, and `clean` is 0.
    turns:   the seconds of each turn that counts; None for the others.
    """

    seconds: float
    best: float
    clean: int
    repetitions: int
    turns: tuple[float | None, ...] = ()


def compare(one: Timing, other: Timing, figure: Callable[[float, float], float]) -> float:
    """Return the median of `figure`(seconds of one, seconds of the other) over the turns in which both timings count.

    If these turns are too few, return `figure` of the two medians. The machine may be faster by a half in one minute
    than in the next; within one turn this affects both timings alike.
    """
    both = [(a, b) for a, b in zip(one.turns, other.turns, strict=False) if a is not None and b is not None]
    if not both or len(both) < _least(min(one.repetitions, other.repetitions)):
        return figure(one.seconds, other.seconds)
    return statistics.median(figure(a, b) for a, b in both)


def on_this_cpu(run: Callable[[], object]) -> tuple[float, bool]:
    """Time one call of `run`: return its seconds and whether it was clean.

    If `run` returns an `Elsewhere`, another process has timed the call, and its figures count.
    """
    switches, began = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.perf_counter()
    result = run()
    seconds = time.perf_counter() - began
    if isinstance(result, Elsewhere):
        return result.seconds, result.clean
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == switches


@dataclass(frozen=True)
class Elsewhere:
    """The timing that another process reports of its own call."""

    seconds: float
    clean: bool


def in_turn(steps: dict[Name, Step], repetitions: int, timer: Timer = on_this_cpu) -> dict[Name, Timing]:
    """Time each step `repetitions` times, the steps taking turns, after WARM_UP untimed turns."""
    taken: dict[Name, list[tuple[float, bool]]] = {name: [] for name in steps}
    for order in by_lot(steps, repetitions, warm_up=WARM_UP):
        for name in order:
            before = taken[name]
            if len(before) < 3 + WARM_UP or sum(seconds for seconds, _ in before[WARM_UP:]) < SECONDS_EACH:
                before.append(timer(steps[name]()))
    return {name: _settle(all_runs[WARM_UP:]) for name, all_runs in taken.items()}


def by_lot(variants: Iterable[Name], turns: int, text: str = "turns", *, warm_up: int = 1) -> Iterator[list[Name]]:
    """Yield the variants in an order drawn anew for each of `warm_up` turns, which do not count, and of `turns` turns.

    text: the text of a progress bar.
    """
    lots, order = random.Random(0), list(variants)
    for _ in track(range(warm_up + turns), text):
        lots.shuffle(order)
        yield list(order)


def _least(repetitions: int) -> int:
    return min(LEAST_CLEAN, -(-repetitions // 2))


def _settle(runs: list[tuple[float, bool]]) -> Timing:
    clean = sum(is_clean for _, is_clean in runs)
    enough = clean >= _least(len(runs))
    turns = tuple(seconds if is_clean or not enough else None for seconds, is_clean in runs)
    counted = [seconds for seconds in turns if seconds is not None]
    return Timing(statistics.median(counted), min(counted), clean if enough else 0, len(runs), turns)
