"""The charts of `pagedkv bench manager`: each case beside its peers, and a step against sizes. Drawn from kept rows."""

from __future__ import annotations

import re
from typing import Any, Final

from pagedkv.bench.chart import Axis, Bar, Chart, Series, bars, lines
from pagedkv.bench.headlines import name_of

UNITS: Final = {"us": "µs", "ns": "ns", "ms": "ms", "bytes": "bytes"}
SIZED: Final = re.compile(r"step of (\d+) sequences, ([\d,]+) (frames, free|frames, all cached|tokens of context)")


def charts(rows: list[dict[str, Any]]) -> list[Chart]:
    """Return a chart for each unit in which peers were measured, then the cost against pool size and context."""
    measured = [row for row in rows if row["median"] is not None and not SIZED.match(row["case"])]
    shared = {row["case"] for row in measured if row["who"] != "pagedkv"}
    made = []
    for unit, title in (("us", "A decode step"), ("ns", "One block"), ("bytes", "Memory of a block")):
        found = [
            Bar(name_of(row["who"]), row["median"], "ours" if row["who"] == "pagedkv" else "peer", row["case"])
            for case in dict.fromkeys(row["case"] for row in measured)
            for row in sorted((row for row in measured if row["case"] == case), key=lambda row: row["median"])
            if case in shared
            and row["unit"] == unit
            and not case.endswith(("in a loop", "alone", "by 64", "evicts one"))
        ]
        made += [bars(title, found, unit=UNITS[unit], is_scaled_by_group=True)] if found else []
    return [*made, *_sizes(rows)]


def _sizes(rows: list[dict[str, Any]]) -> list[Chart]:
    found: dict[str, list[tuple[float, float]]] = {}
    batch = ""
    for row in rows:
        if match := SIZED.match(row["case"]):
            batch, size, line = match.groups()
            found.setdefault(line, []).append((float(size.replace(",", "")), row["median"]))
    y, made = Axis(f"µs a step of {batch} sequences", low=0), []
    pools = [("frames, free", "free frames", "ours"), ("frames, all cached", "all cached: a page evicts one", "")]
    for title, x, series in (
        ("The cost of a decode step against the size of the pool", "frames in the pool", pools),
        ("The cost of a decode step against the length of contexts", "tokens of context, each sequence",
         [("tokens of context", "pagedkv", "ours")]),
    ):  # fmt: skip
        given = [Series(name, sorted(found[line]), kind) for line, name, kind in series if line in found]
        made += [lines(title, given, x=Axis(x, log=True), y=y)] if given else []
    return made
