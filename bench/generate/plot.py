"""The charts of `pagedkv bench generate`: steps over their bounds, and the parts of a step. Drawn from kept rows."""

from __future__ import annotations

from typing import Any, Final

from pagedkv.bench.chart import Bar, Chart, bars
from pagedkv.bench.rows import of_layers

OURS: Final = {"pagedkv": "ours", "pagedkv, F.linear": "also"}


def charts(rows: list[dict[str, Any]]) -> list[Chart]:
    """Return the decode steps over their bounds, then the parts of the longest step taken apart."""
    found = [
        Bar(row["variant"], row["over_bound"], OURS.get(row["variant"], "peer"), _shape(row), f"{row['median']:.0f} ms")
        for row in sorted(rows, key=lambda row: (row["batch"], row["context"]) if "batch" in row else (0, 0))
        if row["case"] == "decode" and "over_bound" in row
    ]
    parts = [row for row in rows if row["case"] == "part"]
    made = [bars("A decode step over the time in which memory gives its bytes", found, unit="×",
                 bound=(1, "bound"))] if found else []  # fmt: skip
    for shape in dict.fromkeys(map(_shape, parts)):
        some = sorted((row for row in parts if _shape(row) == shape), key=lambda row: -row["median"])
        drawn = [Bar(row["variant"], row["median"], "ours") for row in some]
        made.append(bars(f"Parts of a step: {shape}", drawn, unit="ms"))
    return made


def _shape(row: dict[str, Any]) -> str:
    return f"{row['batch']} sequence{'s' if row['batch'] > 1 else ''} of {row['context']:,} tokens{of_layers(row)}"
