"""`pagedkv bench attention`: choose cells, measure them, keep the rows, and print them with the promises.

Only pagedkv.bench knows how to measure. Each row is kept as soon as it is measured, so an interrupted run loses only
the group in progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pagedkv.bench import record
from pagedkv.bench.attention import musts, runner
from pagedkv.bench.attention.cells import BASE, full, quick
from pagedkv.cli.bench.run import Shown, caption, show
from pagedkv.errors import InvalidRequest


@dataclass(frozen=True)
class Choice:
    """The options of the command that select cells.

    Without an axis, the cells are those of a grid; with axes, the product of their values around a typical cell.
    part: "i/N": the i-th of N parts; a group of cells is never divided.
    """

    full: bool
    kinds: Sequence[str]
    axes: dict[str, Sequence[Any]]
    threads: Sequence[int]
    part: str = "1/1"

    def cells(self) -> list[Any]:
        """Return the cells of the selected part. Raises: InvalidRequest for an impossible part or shape."""
        part, parts = _numbers(self.part, f"--part is {self.part!r}; give a part and the number of parts, such as 2/6")
        if part > parts:
            raise InvalidRequest(f"--part is {self.part!r}, but of {parts} parts the last is {parts}/{parts}")
        every = self._all_cells()
        groups = list(dict.fromkeys(cell.group() for cell in every))
        chosen = set(groups[part - 1 :: parts])
        return [cell for cell in every if cell.group() in chosen]

    def _all_cells(self) -> list[Any]:
        threads = self.threads or range(1, min(2, torch.get_num_threads()) + 1)
        given = {name: values for name, values in self.axes.items() if values}
        if not given:
            grid = full(threads) if self.full else quick(threads)
            return [cell for cell in grid if not self.kinds or cell.kind in self.kinds]
        chosen = []
        for kind, *values in product(self.kinds or ["decode"], *given.values(), threads):
            new = (
                {"new": 2048, "context": 2048, "batch": 1}
                if kind in ("prefill", "write")
                else {"batch": 1}
                if kind == "call"
                else {}
            )
            named: dict[str, Any] = new | dict(zip([*given, "threads"], values, strict=True))
            if "heads" in named:
                named["heads"], named["kv_heads"] = _heads(named["heads"])
            cell = replace(BASE, kind=kind, **named)
            chosen.append(replace(cell, new=min(cell.new, cell.context)))
        return chosen


def _heads(text: str) -> tuple[int, int]:
    wrong = f"--heads is {text!r}; give query heads / kv heads, such as 32/8"
    heads, kv_heads = _numbers(text, wrong)
    if heads % kv_heads:
        raise InvalidRequest(wrong)
    return heads, kv_heads


def _numbers(text: str, wrong: str) -> tuple[int, int]:
    """Return the two positive numbers around a slash. Raises: InvalidRequest with the text `wrong`."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise InvalidRequest(wrong)
    return int(parts[0]), int(parts[1])


def run(choice: Choice, asked: Any, shown: Shown) -> None:
    """Measure the chosen cells, append the rows, print tables or a list of JSON objects, and draw."""
    cells = choice.cells()
    if not cells:
        raise InvalidRequest(
            "no cell of the grid is of that kind and in that part; kinds are decode, prefill, write and call"
        )
    about, console = record.provenance(), Console(highlight=False, quiet=shown.as_json)
    measured, rows = [], []
    for row in runner.measure(cells, asked):
        measured.append(row)
        rows.append({"bench": "attention"} | row.record() | about)
        record.append(rows[-1:], shown.keep, "attention")
        console.print(_line(row), soft_wrap=True)
    show("attention", rows, shown, lambda _: None)
    _promises(console, musts.promises(measured), caption(rows))


def _line(row: Any) -> str:
    """Return the lines for a cell: its name, then each variant with its figures."""
    lines = [str(row.cell)]
    for who, result in row.record()["results"].items():
        rate = f"{result['GB_per_s']:7.1f} GB/s" if "GB_per_s" in result else ""
        rate = f"{result['GFLOP_per_s']:7.0f} GFLOP/s" if "GFLOP_per_s" in result else rate
        share = next((f"{value:5.2f} of {name[3:]}" for name, value in result.items() if name.startswith("of_")), "")
        clean = (
            f"{result['clean']} clean of {result['repetitions']}"
            if result["clean"]
            else f"none clean of {result['repetitions']}"
        )
        lines.append(f"  {who:10} {result['us']:11,.1f} us {rate:>16} {share:>17}   {clean}")
    lines += [f"  {who:10} not measured: {why}" for who, why in row.refused.items() if why != runner.PLAIN]
    return "\n".join(lines)


def _promises(console: Console, found: list[Any], caption: str) -> None:
    table = Table(caption=caption, caption_justify="left")
    for name in ("promise", "wanted", "worst", "", "of cells", "where"):
        table.add_column(name, justify="right" if name in ("wanted", "worst", "of cells") else "left")
    for promise in found:
        bound = f"{'<=' if promise.unit == 'us' else '>='} {promise.wanted:g}{' us' if promise.unit == 'us' else ''}"
        judged = ("" if promise.kept else "missed") if promise.cells else "unclean"
        cells = f"{promise.cells}{f' (+ {promise.unclean} unclean)' if promise.unclean else ''}"
        found_here = f"{promise.found:.2f}" + (f"; bare reads {promise.bare:.2f}" if promise.bare else "")
        table.add_row(promise.text, bound, found_here, judged, cells, promise.where)
    console.print(table)
