"""Two files of rows, compared cell by cell: how many times as good the second one's figures are, and how sure that is.

    ratio     goodness of the second / goodness of the first; goodness is the figure, or its inverse for a time
    interval  a bootstrap: the turns of each side are drawn again with replacement, and the ratio of their medians is
              taken; 95 of 100 ratios lie within it

Relative goodness is that of a ratio within one run, to a bound or a peer. It carries over to other machines with the
same instruction set. With another one the kernels are others, and their cells are not compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pagedkv.bench.figures import Figure, figures

DRAWS: Final = 2000
INSIDE: Final = 0.95
LEAST: Final = 3
"""Turns on each side for an interval; with fewer, and for disturbed figures, a ratio is shown and not judged.

A figure that is counted and not timed needs no turns: its interval is its ratio.
"""
OURS: Final = ("pagedkv", "pages")
IN_TIMES: Final = ("of its bound", "of an unknown prompt", "of computing it", "of a step alone")
"""Ratios whose smaller values are better."""


@dataclass(frozen=True)
class Goodness:
    """The goodness of a figure, and of its turns."""

    bench: str
    name: str
    good: float
    turns: tuple[float, ...]
    is_exact: bool


@dataclass(frozen=True)
class Change:
    """A cell of both files. low and high are None if one side has too few turns."""

    bench: str
    name: str
    ratio: float
    low: float | None
    high: float | None

    def has_fallen(self, tolerance: float) -> bool:
        """Whether the ratio is surely below 1 - tolerance."""
        return self.high is not None and self.high < 1 - tolerance

    def has_risen(self, tolerance: float) -> bool:
        """Whether the ratio is surely above 1 + tolerance."""
        return self.low is not None and self.low > 1 + tolerance


def compared(first: Iterable[dict[str, Any]], second: Iterable[dict[str, Any]], *, is_relative: bool) -> list[Change]:
    """Return the changes of all cells that both sides have, the worst first."""
    judge = relative if is_relative else absolute
    before, after = (judge(figures(rows)) for rows in (first, second))
    lots = np.random.default_rng(0)
    found = [_change(before[key], after[key], lots) for key in before if key in after]
    return sorted(found, key=lambda change: change.ratio)


def absolute(found: Iterable[Figure]) -> dict[tuple[str, ...], Goodness]:
    """Return the goodness of each figure of ours."""
    goodness = {}
    for one in found:
        if one.variant.startswith(OURS) and one.median:
            turns = tuple(turn for turn in one.turns if turn)
            goodness[one.bench, one.key, one.variant] = _goodness(one, "", one.median, turns, one.is_better_if_larger)
    return goodness


def relative(found: Iterable[Figure]) -> dict[tuple[str, ...], Goodness]:
    """Return the goodness of each figure of ours over a bound or a peer of its own run."""
    every = list(found)
    goodness: dict[tuple[str, ...], Goodness] = {}
    for one in every:
        if one.ratio and (one.variant.startswith(OURS) or one.against == "pages × this"):
            is_larger = one.against not in IN_TIMES
            key = (one.bench, one.isa, one.key, one.variant)
            goodness[key] = _goodness(one, one.against, one.ratio, one.ratios, is_larger)
    ours = {(one.bench, one.key): one for one in every if one.variant == "pagedkv" and one.ratio is None and one.median}
    for peer in every:
        one = ours.get((peer.bench, peer.key))
        if one and peer is not one and peer.median:
            pairs = zip(peer.turns, one.turns, strict=False)
            turns = tuple(own / theirs for theirs, own in pairs if theirs and own and not peer.is_disturbed)
            value = statistics.median(turns) if len(turns) >= LEAST else one.median / peer.median
            key = (peer.bench, one.isa, peer.key, f"over {peer.variant}")
            goodness[key] = _goodness(one, f"over {peer.variant}", value, turns, one.is_better_if_larger)
    return goodness


def _goodness(one: Figure, against: str, value: float, turns: tuple[float, ...], is_larger: bool) -> Goodness:
    turns = () if one.is_disturbed else turns
    name = ", ".join(filter(None, (one.case, one.axes, one.variant, against)))
    if is_larger:
        return Goodness(one.bench, name, value, turns, one.is_exact)
    return Goodness(one.bench, name, 1 / value, tuple(1 / turn for turn in turns), one.is_exact)


def _change(before: Goodness, after: Goodness, lots: np.random.Generator) -> Change:
    ratio = after.good / before.good
    is_exact = before.is_exact and after.is_exact
    low, high = (ratio, ratio) if is_exact else interval(before.turns, after.turns, lots)
    return Change(before.bench, before.name, ratio, low, high)


def interval(
    before: tuple[float, ...], after: tuple[float, ...], lots: np.random.Generator
) -> tuple[float | None, float | None]:
    """Return the ends of the interval of median(after) / median(before); None where turns are too few."""
    if min(len(before), len(after)) < LEAST:
        return None, None
    drawn = [np.median(lots.choice(turns, (DRAWS, len(turns))), axis=1) for turns in (before, after)]
    ends = np.quantile(drawn[1] / drawn[0], [(1 - INSIDE) / 2, (1 + INSIDE) / 2])
    return float(ends[0]), float(ends[1])
