"""`pagedkv bench bandwidth`: choose the cells of decode, measure, and print operations beside their ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from pagedkv.bench.bandwidth import runner, words
from pagedkv.bench.bandwidth.plot import WORDS, shape_of
from pagedkv.cli.bench.attention import Choice
from pagedkv.cli.bench.run import Row, Shown, run

__all__ = ["measured"]


def measured(asked: Any, axes: dict[str, Sequence[Any]], shown: Shown) -> None:
    """Measure, append the rows, print a table or a list of JSON objects, and draw.

    axes: values of the axes of decode, by name. Without any, the cells are those of a grid.
    """
    if any(axes.values()):
        cells = Choice(False, ["decode"], axes, asked.threads).cells()
        asked = replace(asked, cells=tuple(dict.fromkeys(replace(cell, threads=1) for cell in cells)))
        asked = replace(asked, cases=asked.cases or ("decode",))
    file = "gpu-bandwidth" if asked.device == "cuda" else None  # tables and the report are about the CPU
    run("bandwidth", partial(runner.measure, asked=asked), shown, _print, file=file)


def _print(rows: list[Row]) -> None:
    about = rows[0]
    table = Table(caption=f"medians; {about['machine']}; {about['commit']}", caption_justify="left")
    for head in ("operation", "threads", "by", "GB/s", "of its ceiling, GB/s"):
        table.add_column(head, justify="left" if head in ("operation", "by") else "right", overflow="fold")
    for row in (row for row in rows if row["case"] != "state"):
        share = f"{row['efficiency']:.2f} of {row['bound']} {row['ceiling']:.3g}{'' if row['clean'] else ', disturbed'}"
        operation = f"{WORDS.get(row['case'], row['case'])}: {shape_of(row)}"
        table.add_row(operation, str(row.get("threads", "")), row["variant"], f"{row['median']:.3g}", share)
    console = Console(highlight=False)
    console.print(table)
    for row in rows:
        if row["case"] == "state" and row["states"]:
            console.print(words.states_of(row), soft_wrap=True)
