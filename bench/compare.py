"""Two files of rows, compared cell by cell: how many times as good the second one's figures are, and how sure that is.

    ratio     goodness of the second / goodness of the first; goodness is the figure, or its inverse for a time
    interval  a bootstrap: the turns of each side are drawn again with replacement, and the ratio of their medians is
              taken; 95 of 100 ratios lie within it

Relative goodness is that of a ratio within one run, to a bound or a peer. It carries over to other machines with the
same instruction set.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pagedkv.bench.record import Row, axes_of

DRAWS: Final = 2000
INSIDE: Final = 0.95
LEAST: Final = 3
"""Turns on each side for an interval; with fewer, and for disturbed figures, a ratio is shown and not judged.

A figure without turns is counted and not timed: its interval is its ratio.
"""
OURS: Final = ("pagedkv", "pages", "cpu")
PEER: Final = "lists of Python"
"""The peer that every machine has; the manager's relative goodness is its time over ours."""
RATIOS: Final = {
    "over_bound": False, "times_as_fast": True, "efficiency": True, "of_bare": True, "of_computing": False,
    "ratio": True, "over_static": False,
}  # fmt: skip
"""Field of a row with its ratio to a bound or a peer → whether larger is better."""
LARGER_IS_BETTER: Final = ("/s", "of 100", "%")
"""Ends of units whose larger values are better; all other units are times, bytes and errors."""


@dataclass(frozen=True)
class Change:
    """A cell of both files. low and high are None if one side has too few turns."""

    name: str
    ratio: float
    low: float | None
    high: float | None

    def has_fallen(self, tolerance: float) -> bool:
        """Whether the ratio is surely below 1 - tolerance."""
        return self.high is not None and self.high < 1 - tolerance


def compared(first: Iterable[Row], second: Iterable[Row], *, is_relative: bool) -> list[Change]:
    """Return the changes of all cells that both sides have, the worst first. The last row of a cell counts."""
    before, after = (goodness(list(rows), is_relative=is_relative) for rows in (first, second))
    lots = np.random.default_rng(0)
    found = [_change(name, before[name], after[name], lots) for name in before if name in after]
    return sorted(found, key=lambda change: change.ratio)


def goodness(rows: list[Row], *, is_relative: bool) -> dict[str, np.ndarray]:
    """Return for each figure of ours [1 + turns] its goodness, then that of each turn; NaN for a disturbed figure."""
    found, peers = {}, {_cell(row): row for row in rows if row["variant"] == PEER and row["median"]}
    for row in rows:
        if not row["variant"].startswith(OURS) or not row["median"]:
            continue
        is_larger, values = row["unit"].endswith(LARGER_IS_BETTER), [row["median"], *filter(None, row.get("turns", ()))]
        if is_relative:
            field = next((name for name in RATIOS if row.get(name) is not None), None)
            peer = peers.get(_cell(row))
            if field:
                is_larger, values = RATIOS[field], [row[field], *row.get("ratios", ())]
            elif peer:
                pairs = zip(peer["turns"], row["turns"], strict=False)
                values = [theirs / ours for theirs, ours in pairs if theirs and ours]
                is_larger, values = True, [statistics.median(values or [peer["median"] / row["median"]]), *values]
            else:
                continue
        values = [*values[:1], np.nan] if row.get("clean") == 0 else values
        found[f"{_cell(row)}, {row['variant']}"] = np.array(values, float) ** (1 if is_larger else -1)
    return found


def _cell(row: Row) -> str:
    axes = [f"{name} {value}" for name, value in axes_of(row).items()]
    return ", ".join([f"{row['bench']}: {row['case']}", *axes])


def _change(name: str, before: Any, after: Any, lots: np.random.Generator) -> Change:
    ratio = float(after[0] / before[0])
    if len(before) == len(after) == 1:
        return Change(name, ratio, ratio, ratio)
    if min(len(before), len(after)) <= LEAST:
        return Change(name, ratio, None, None)
    drawn = [np.median(lots.choice(turns[1:], (DRAWS, len(turns) - 1)), axis=1) for turns in (before, after)]
    low, high = np.quantile(drawn[1] / drawn[0], [(1 - INSIDE) / 2, (1 + INSIDE) / 2])
    return Change(name, ratio, float(low), float(high))


def report(changes: list[Change], tolerance: float, *, as_json: bool) -> int:
    """Print the ratio of each cell; return 1 if one has fallen by more than the noise and the tolerance."""
    fallen = [change for change in changes if change.has_fallen(tolerance)]
    if as_json:
        print(json.dumps([vars(change) | {"fell": change in fallen} for change in changes]))
        return int(bool(fallen))
    for change in changes:
        ends = "too few clean turns" if change.low is None else f"{change.low:.2f} to {change.high:.2f}"
        print(f"{change.ratio:6.2f}  {ends:20} {'FELL ' if change in fallen else '     '} {change.name}")
    judged = sum(change.low is not None for change in changes)
    print(f"second ÷ first: {len(fallen)} of {judged} fell by more than the noise and a tolerance of {tolerance:.0%}")
    return int(bool(fallen))
