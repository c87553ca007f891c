"""Turns with a ceiling before and after each repetition, and rows.

    ratio of a repetition  =  bytes / seconds / mean speed of the ceiling before it and after it

A repetition is left out, and counted, if other processes disturbed it (clock.py), or if the speed of the ceiling
after it differs from that before it: then memory changed its state meanwhile (memory.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pagedkv.bench.attention.runner import awake
from pagedkv.bench.bandwidth.ceilings import Bound
from pagedkv.bench.bandwidth.subjects import Subject
from pagedkv.bench.clock import WARM_UP, Timer, Timing, in_turn, on_this_cpu
from pagedkv.bench.memory import is_steady

Row = dict[str, Any]
TRIES: Final = 3
"""Readings of a ceiling, at most, until no context switch falls into one."""


@dataclass
class Speeds:
    """The readings of a ceiling in a run, (bytes per second, is clean), and the repetitions that were left out."""

    bound: Bound
    readings: list[tuple[float, bool]] = field(default_factory=list)
    switched: int = 0
    changed: int = 0

    def row(self, axes: dict[str, Any]) -> Row:
        """Return the speed of the ceiling over the whole run, and how many repetitions were left out."""
        rates = [rate / 1e9 for rate, is_clean in self.readings if is_clean] or [r / 1e9 for r, _ in self.readings]
        row = {"case": "state", "bound": self.bound.name} | axes | {"variant": "memory", "unit": "GB/s"}
        row |= {"median": statistics.median(rates), "best": max(rates), "worst": min(rates)}
        return row | {"readings": len(rates), "switched": self.switched, "changed": self.changed}


@dataclass(frozen=True)
class _Repetition:
    """A prepared repetition: its name in the turns, its ceiling, and the function that is timed."""

    name: tuple[int, str]
    bound: str
    call: Callable[[], object]

    def __call__(self) -> object:
        return self.call()


class Bracket:
    """A timer that measures the ceiling before a repetition and after it. rates: of each repetition, by name."""

    def __init__(self, bounds: dict[str, Speeds], timer: Timer = on_this_cpu) -> None:
        self.bounds, self.timer = bounds, timer
        self.rates: dict[tuple[int, str], list[float]] = {}

    def __call__(self, run: Callable[[], object]) -> tuple[float, bool]:
        """Time `run`, a repetition; it is clean without a context switch and without a change of state."""
        assert isinstance(run, _Repetition)
        speeds = self.bounds[run.bound]
        (before, first), (seconds, is_clean), (after, last) = self._speed(speeds), self.timer(run), self._speed(speeds)
        rates = self.rates.setdefault(run.name, [])
        rates.append((before + after) / 2)
        is_clean &= first and last
        holds = not speeds.bound.is_memory or is_steady(before, after)
        if len(rates) > WARM_UP:
            speeds.readings += [(before, first), (after, last)]
            speeds.switched += not is_clean
            speeds.changed += is_clean and not holds
        return seconds, is_clean and holds

    def _speed(self, speeds: Speeds) -> tuple[float, bool]:
        for _ in range(TRIES):
            seconds, is_clean = self.timer(speeds.bound.step())
            if is_clean:
                break
        return speeds.bound.num_bytes / seconds, is_clean


def rows(
    subjects: Iterable[Subject], bounds: dict[str, Speeds], repetitions: int, axes: dict[str, Any],
    timer: Timer = on_this_cpu,
) -> list[Row]:  # fmt: skip
    """Measure subjects in turn; return a row for each variant. axes: of all rows, behind those of the subject."""
    every, bracket = list(subjects), Bracket(bounds, timer)
    steps = {}
    for i, subject in enumerate(every):
        for name, step in subject.variants.items():
            if not isinstance(step, str):
                steps[i, name] = _named((i, name), subject.bound, awake(step))
    timings = in_turn(steps, repetitions, bracket, reads_memory=False)
    return [
        _row(every[i], name, timing, bracket.rates[i, name][WARM_UP:], axes) for (i, name), timing in timings.items()
    ]


def _named(name: tuple[int, str], bound: str, step: Callable[[], Callable[[], object]]) -> Callable[[], _Repetition]:
    return lambda: _Repetition(name, bound, step())


def _row(subject: Subject, variant: str, timing: Timing, rates: Sequence[float], axes: dict[str, Any]) -> Row:
    speeds = [seconds and subject.num_bytes / seconds for seconds in timing.turns]
    ratios = [speed / rate for speed, rate in zip(speeds, rates, strict=True) if speed]
    counted = [speed / 1e9 for speed in speeds if speed]
    row = {"case": subject.case} | subject.axes | axes | {"variant": variant, "unit": "GB/s"}
    row |= {"median": statistics.median(counted), "best": max(counted), "worst": min(counted)}
    row |= {"turns": [speed and round(speed / 1e9, 4) for speed in speeds], "bound": subject.bound}
    row |= {"efficiency": statistics.median(ratios), "ratios": [round(ratio, 4) for ratio in ratios]}
    row |= {"ceiling": statistics.median(rates) / 1e9, "bytes": subject.num_bytes, "clean": timing.clean}
    return row | ({"flop_per_byte": subject.flops / subject.num_bytes} if subject.flops else {})
