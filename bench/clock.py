"""Taking turns: what is compared runs one after the other, repetition by repetition, and the median is over those that nobody disturbed.

Who runs next is drawn anew in each repetition: a call pays for whom it follows (a process of its own leaves cold caches and sleeping
threads), and nobody shall always follow the same. A `Step` prepares one repetition, untimed, and returns what is timed. On a CPU a
repetition is clean if no involuntary context switch fell into it (getrusage). Another device brings a `Timer` of its own.
Knows nothing of attention.
"""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, TypeVar

Step = Callable[[], Callable[[], object]]
Timer = Callable[[Callable[[], object]], tuple[float, bool]]
Name = TypeVar("Name", bound=Hashable)

LEAST_CLEAN: Final = 5
WARM_UP: Final = 2
SECONDS_EACH: Final = 1.5
"""What takes longer than this in all is repeated no more, once it has been repeated thrice."""


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of `clean` repetitions, or of all if fewer than LEAST_CLEAN (half of few) were clean: clean is 0.

    turns: those that counted, each at the number of its turn, None at the others.
    """

    seconds: float
    best: float
    clean: int
    repetitions: int
    turns: tuple[float | None, ...] = ()


def compare(one: Timing, other: Timing, figure: Callable[[float, float], float]) -> float:
    """The median over the turns in which both count of `figure`(seconds of one, of the other); of the medians, if these turns are too few.

    The machine may be faster in one minute than in the next by a half: of one turn that is true of both.
    """
    both = [(a, b) for a, b in zip(one.turns, other.turns, strict=False) if a is not None and b is not None]
    if not both or len(both) < _least(min(one.repetitions, other.repetitions)):
        return figure(one.seconds, other.seconds)
    return statistics.median(figure(a, b) for a, b in both)


def on_this_cpu(run: Callable[[], object]) -> tuple[float, bool]:
    """Seconds of one call and whether they were clean. What times itself elsewhere returns such a pair, which then counts."""
    switches, began = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.perf_counter()
    result = run()
    seconds = time.perf_counter() - began
    if isinstance(result, Elsewhere):
        return result.seconds, result.clean
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == switches


@dataclass(frozen=True)
class Elsewhere:
    """What a process that times itself reports."""

    seconds: float
    clean: bool


def in_turn(steps: dict[Name, Step], repetitions: int, timer: Timer = on_this_cpu) -> dict[Name, Timing]:
    """Each step `repetitions` times, in turn, after a warm-up."""
    taken: dict[Name, list[tuple[float, bool]]] = {name: [] for name in steps}
    lots, order = random.Random(0), list(steps)
    for _ in range(repetitions + WARM_UP):
        lots.shuffle(order)
        for name in order:
            before = taken[name]
            if len(before) < 3 + WARM_UP or sum(seconds for seconds, _ in before[WARM_UP:]) < SECONDS_EACH:
                before.append(timer(steps[name]()))
    return {name: _settle(all_runs[WARM_UP:]) for name, all_runs in taken.items()}


def _least(repetitions: int) -> int:
    return min(LEAST_CLEAN, -(-repetitions // 2))


def _settle(runs: list[tuple[float, bool]]) -> Timing:
    clean = sum(is_clean for _, is_clean in runs)
    enough = clean >= _least(len(runs))
    turns = tuple(seconds if is_clean or not enough else None for seconds, is_clean in runs)
    counted = [seconds for seconds in turns if seconds is not None]
    return Timing(statistics.median(counted), min(counted), clean if enough else 0, len(runs), turns)
