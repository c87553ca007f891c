"""The charts of `pagedkv bench fragmentation`, drawn from kept rows.

Useful memory by allocator and workload, waste against the block size, a burst over time, memory saved by sharing, and
the speed of a copy in pieces.
"""

from __future__ import annotations

import math
from typing import Any, Final

from pagedkv.bench.chart import Axis, Bar, Chart, Series, bars, lines
from pagedkv.bench.fragmentation.cells import BLOCK, BLOCKS, LARGE_PAGES, MAXIMUM, ORACLE, OURS, UNAWARE, blocks_of

Row = dict[str, Any]
WORDS: Final = {
    "sharegpt": "ShareGPT-like lengths", "alpaca": "Alpaca-like lengths", "code": "code-like lengths",
    "uniform": "uniform lengths", "zipf": "Zipf lengths", "bursts": "bursts", "window": "a window of 256",
    "mooncake": "the Mooncake trace", "drafts": "four drafts a step",
}  # fmt: skip
COMPARED: Final = ("sharegpt", "code", "mooncake", "window")
"""Workloads with bars of their own; the others are in the table."""


def charts(rows: list[Row]) -> list[Chart]:
    """Return the charts for which there are rows."""
    found = [_useful(rows), _by_block(rows), _over_time(rows), _saved(rows), _memcpy(rows)]
    return [chart for chart in found if chart]


def _rows(rows: list[Row], case: str, workload: str = "") -> list[Row]:
    return [row for row in rows if row["case"] == case and workload in ("", row.get("workload"))]


def _useful(rows: list[Row]) -> Chart | None:
    given = [
        Bar(row["variant"], row["median"], _kind(row), WORDS[workload], _paper(row))
        for workload in COMPARED
        for row in sorted(_rows(rows, "useful", workload), key=lambda row: row["median"])
        if "blocks of" not in row["variant"]
    ]
    return bars("KV memory that holds tokens, while requests wait: more is better", given, unit="%") if given else None


def _kind(row: Row) -> str:
    return {OURS: "ours", UNAWARE: "also"}.get(row["variant"], "peer")


def _paper(row: Row) -> str:
    return f"paper {row['published']}" if "published" in row else ""


def _by_block(rows: list[Row]) -> Chart | None:
    names = {"sharegpt": "ours", "alpaca": ""}
    series = []
    for workload, kind in names.items():
        found = {row["variant"]: row["median"] for row in _rows(rows, "waste", workload)}
        points = [(float(size), found[blocks_of(size)]) for size in BLOCKS if blocks_of(size) in found]
        series += [Series(WORDS[workload], points, kind)] if len(points) > 1 else []
    if not series:
        return None
    title = "Slots of mapped frames that hold no token, against the block size"
    return lines(title, series, x=Axis("tokens in a block", log=True), y=Axis("% of mapped slots", low=0))


def _over_time(rows: list[Row]) -> Chart | None:
    chosen = {OURS: "ours", LARGE_PAGES: "", ORACLE: "", MAXIMUM: "peer"}
    found = {row["variant"]: row["over_time"] for row in _rows(rows, "useful", "bursts")}
    end = 1.6 * found[OURS][-1][0] if OURS in found else math.inf
    series = [
        Series(variant, [(step, useful) for step, useful, *_ in found[variant] if step <= end], kind)
        for variant, kind in chosen.items()
        if variant in found
    ]
    title = "Bursts of 40 requests: KV memory that holds tokens, over time"
    return lines(title, series, x=Axis("steps"), y=Axis("% of the memory", low=0, high=100)) if series else None


def _saved(rows: list[Row]) -> Chart | None:
    given = []
    for row in _rows(rows, "saved"):
        kind, width, *rest = row["workload"].split("-")
        group = {"samples": "Parallel samples", "beams": "Beams"}[kind]
        group += ", ShareGPT-like lengths" if rest else ", Alpaca-like lengths"
        given.append(Bar(f"{width} {kind}", row["median"], "ours", group, _paper(row)))
    title = f"Frames of {BLOCK} tokens that sharing saves, of those without sharing"
    return bars(title, given, unit="%") if given else None


def _memcpy(rows: list[Row]) -> Chart | None:
    points = sorted((row["piece_bytes"] / 1024, row["median"]) for row in _rows(rows, "memcpy"))
    if not points:
        return None
    title = "A copy of 128 MiB in pieces from random places; a frame of Llama 3 8B has 2 MiB"
    series = [Series("one thread", points, "ours")]
    return lines(title, series, x=Axis("KiB of a piece", log=True), y=Axis("GB/s", low=0))
