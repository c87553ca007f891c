"""The charts of `pagedkv bench tiers`, drawn from kept rows: speed by size of a frame, and first tokens by place."""

from __future__ import annotations

from typing import Any, Final

from pagedkv.bench.chart import Axis, Bar, Chart, Series, bars, lines

Row = dict[str, Any]
WAYS: Final = {"store": "Pages stored", "load": "Pages loaded and verified"}
PLACES: Final = {"computed": "computed", "pool": "in the pool", "host": "in host memory", "disk": "on disk"}


def charts(rows: list[Row]) -> list[Chart]:
    """Return the charts for which there are rows."""
    made = []
    for way, title in WAYS.items():
        found = [row for row in rows if row["case"] == way]
        series = [
            Series(name, sorted((row["frame"] / 1024, row["median"]) for row in found if row["variant"] == name),
                   "ours" if name in ("host", "disk") else "peer")
            for name in dict.fromkeys(row["variant"] for row in found)
        ]  # fmt: skip
        if series:
            made.append(lines(title, series, x=Axis("KiB of a frame", log=True), y=Axis("GB/s")))
    found = [row for row in rows if row["case"] == "first token"]
    drawn = [
        Bar(PLACES[row["variant"]], row["median"], "peer" if row["variant"] == "computed" else "ours",
            f"a prompt of {row['context']:,} tokens", f"({row['ratio']:.3f} of computing)" if "ratio" in row else "")
        for row in found
    ]  # fmt: skip
    if drawn:
        made.append(bars("Seconds to the first token, by the place of the prefix", drawn, unit="s"))
    return made
