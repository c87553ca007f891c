"""The charts of `pagedkv bench tiers`, drawn from kept rows: speed by size of a frame, and first tokens by place."""

from __future__ import annotations

from typing import Any, Final

from pagedkv.bench.chart import Axis, Bar, Chart, Series, bars, lines
from pagedkv.bench.rows import of_layers

Row = dict[str, Any]
WAYS: Final = {"store": "Pages stored", "load": "Pages loaded", "transfer": "Pages that go to another process"}
OURS: Final = "pagedkv, "
PLACES: Final = {"computed": "computed", "pool": "in the pool", "host": "in host memory", "disk": "on disk"}
KINDS: Final = {"pagedkv": "ours", "pagedkv, not verified": "also"}
SERIES: Final = {"pagedkv": "{}", "pagedkv, not verified": "{}, not verified"}


def charts(rows: list[Row]) -> list[Chart]:
    """Return the charts for which there are rows."""
    made = []
    for way, title in WAYS.items():
        found = [row for row in rows if row["case"] == way]
        lot = dict.fromkeys((row["tier"], row["variant"]) for row in found)
        series = [
            Series(SERIES.get(variant, variant).format(tier),
                   sorted((row["frame"] / 1024, row["median"]) for row in found
                          if (row["tier"], row["variant"]) == (tier, variant)),
                   KINDS.get(variant, "peer"))
            for tier, variant in lot
        ]  # fmt: skip
        if series:
            made.append(lines(title, series, x=Axis("KiB of a frame", log=True), y=Axis("GB/s", low=0)))
    tokens = [
        Bar(PLACES[row["variant"].removeprefix(OURS)], row["median"], _kind(row),
            f"a prompt of {row['context']:,} tokens{of_layers(row)}",
            f"({row['of_computing']:.3f} of computing)" if "of_computing" in row else "")
        for row in rows if row["case"] == "first token"
    ]  # fmt: skip
    steps = [
        Bar(row["variant"].removeprefix(OURS), row["median"], _kind(row),
            f"{row['batch']} × {row['context']:,} tokens{of_layers(row)}",
            f"({row['moved_gb_s']:.1f} GB/s, {row['slower_percent']:+.0f} %)" if "of_alone" in row else "")
        for row in rows if row["case"] == "decode beside transfers"
    ]  # fmt: skip
    if tokens:
        made.append(bars("Seconds to the first token, by the place of the prefix", tokens, unit="s"))
    if steps:
        made.append(bars("A decode step while a tier stores and loads", steps, unit="ms"))
    return made


def _kind(row: Row) -> str:
    return "ours" if row["variant"].startswith(OURS) else "peer"
