"""The decode steps of a run as a picture: for each shape the variants' times beside the bound that memory sets."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final

from pagedkv.bench.generate.runner import DYNAMIC, OURS, STATIC, TORCH
from pagedkv.errors import InvalidRequest

COLOURS: Final = {OURS: "tab:blue", TORCH: "tab:cyan", STATIC: "tab:orange", DYNAMIC: "tab:red"}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the picture to `path`. Raises: InvalidRequest without matplotlib, or for an unknown file ending"""
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise InvalidRequest("--plot needs matplotlib; pip install matplotlib") from None
    steps = [row for row in rows if row["case"] == "decode"]
    shapes = list(dict.fromkeys((row["batch"], row["context"]) for row in steps))
    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    for place, (variant, colour) in enumerate(COLOURS.items()):
        for at, shape in enumerate(shapes):
            found = [row for row in steps if (row["batch"], row["context"]) == shape and row["variant"] == variant]
            for row in found:
                left = at + 0.2 * place - 0.4
                axes.bar(left, row["over_bound"], 0.18, align="edge", color=colour)
                axes.text(
                    left + 0.09, row["over_bound"], f"{row['over_bound']:.2f}", ha="center", va="bottom", fontsize=7
                )
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(range(len(shapes)), [f"{batch} x {context:,}" for batch, context in shapes])
    axes.set_xlabel("sequences x tokens of context")
    axes.set_ylabel("time of a step / its bound")
    names = [name for name in COLOURS if any(row["variant"] == name for row in steps)]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in names]
    axes.legend(handles, names, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except ValueError as why:
        raise InvalidRequest(f"--plot {path}: {why}") from None
    pyplot.close(figure)
