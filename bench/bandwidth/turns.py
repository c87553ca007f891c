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
from pagedkv.bench.clock import WARM_UP, Elsewhere, Step, Timing, in_turn, on_this_cpu
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

    def measured(self) -> tuple[float, bool]:
        """Return bytes per second of the ceiling now, and whether the reading was clean."""
        for _ in range(TRIES):
            seconds, is_clean = on_this_cpu(self.bound.step())
            if is_clean:
                break
        return self.bound.num_bytes / seconds, is_clean


def bracketed(step: Step, speeds: Speeds, rates: list[float]) -> Step:
    """Return a step whose ceiling is measured before and after it; it is clean without a change of state.

    rates: takes the mean speed of the ceiling around each repetition
    """

    def prepare() -> Callable[[], Elsewhere]:
        run = step()

        def timed() -> Elsewhere:
            before, first = speeds.measured()
            seconds, is_clean = on_this_cpu(run)
            after, last = speeds.measured()
            rates.append((before + after) / 2)
            is_clean &= first and last
            holds = is_steady(before, after)
            if len(rates) > WARM_UP:
                speeds.readings += [(before, first), (after, last)]
                speeds.switched += not is_clean
                speeds.changed += is_clean and not holds
            return Elsewhere(seconds, is_clean and holds)

        return timed

    return prepare


def rows(subjects: Iterable[Subject], bounds: dict[str, Speeds], repetitions: int, axes: dict[str, Any]) -> list[Row]:
    """Measure subjects in turn; return a row for each variant. axes: of all rows, behind those of the subject."""
    every, steps = list(subjects), dict[tuple[int, str], Step]()
    rates: dict[tuple[int, str], list[float]] = {}
    for i, subject in enumerate(every):
        for name, step in subject.variants.items():
            if not isinstance(step, str):
                around = rates.setdefault((i, name), [])
                steps[i, name] = bracketed(awake(step), bounds[subject.bound], around)
    timings = in_turn(steps, repetitions, reads_memory=False)
    return [_row(every[i], name, timing, rates[i, name][WARM_UP:], axes) for (i, name), timing in timings.items()]


def _row(subject: Subject, variant: str, timing: Timing, rates: Sequence[float], axes: dict[str, Any]) -> Row:
    speeds = [seconds and subject.num_bytes / seconds for seconds in timing.turns]
    ratios = [speed / rate for speed, rate in zip(speeds, rates, strict=True) if speed]
    counted = [speed / 1e9 for speed in speeds if speed]
    row = {"case": subject.case} | subject.axes | axes | {"variant": variant, "unit": "GB/s"}
    row |= {"median": statistics.median(counted), "best": max(counted), "worst": min(counted)}
    row |= {"turns": [speed and round(speed / 1e9, 4) for speed in speeds], "bound": subject.bound}
    row |= {"efficiency": statistics.median(ratios), "ratios": [round(ratio, 4) for ratio in ratios]}
    return row | {"ceiling": statistics.median(rates) / 1e9, "bytes": subject.num_bytes, "clean": timing.clean}
