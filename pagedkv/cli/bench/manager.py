"""`pagedkv bench`: run a benchmark of pagedkv.bench, keep its rows, and print them.

Only pagedkv.bench knows the cases and the way to measure them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pagedkv.bench import record
from pagedkv.bench.headlines import name_of
from pagedkv.bench.manager import runner
from pagedkv.cli.bench.run import Shown, show
from pagedkv.errors import InvalidRequest


def run(rounds: int, cases: Sequence[str], pythons: Sequence[Path], shown: Shown) -> None:
    """Measure the memory manager, append the rows, print a table or a list of JSON objects, and draw.

    Raises: InvalidRequest if no case has one of the texts `cases` in its name
    """
    chosen = [case for case in runner.CASES if not cases or any(text in case.name for text in cases)]
    if not chosen:
        names = ", ".join(case.name for case in runner.CASES)
        raise InvalidRequest(f"no case is named by --case {' --case '.join(cases)}; the cases are: {names}")
    figures = runner.measure(rounds, [str(path) for path in pythons], chosen)
    show("manager", _kept(figures, shown), shown, _print)


def scaling(rounds: int, shown: Shown) -> None:
    """Measure a step against pool size and context length; append the rows, draw them, and print each line's rise."""
    from pagedkv.bench.manager.scaling import measure, spread

    figures = measure(rounds)

    def lines(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            print(f"{row['median']:8.1f} us   {row['case']}")
        for line, ratio in spread(figures).items():
            print(f"{ratio:8.2f} x    from the cheapest to the dearest: {line}")

    show("manager", _kept(figures.values(), shown), shown, lines)


def _kept(figures: Iterable[runner.Figure], shown: Shown) -> list[dict[str, Any]]:
    about = record.provenance()
    rows = [{"bench": "manager"} | figure.row() | about for figure in figures]
    record.append(rows, shown.keep, "manager")
    return rows


def _print(rows: list[dict[str, Any]]) -> None:
    """Print a line for each case: our figure, the limit, and each peer's figure with its ratio to ours."""
    names = list(dict.fromkeys(row["who"] for row in rows))
    shown = [name for name in names[1:] if any(row["who"] == name and row["median"] is not None for row in rows)]
    found = {(row["who"], row["case"]): row for row in rows}
    about = rows[0]
    table = Table(caption=f"medians; {about['machine']}; {about['commit']}", caption_justify="left")
    for name in ("", "unit", *names[:1], "limit", *(name_of(name) for name in shown)):
        table.add_column(name, justify="left" if name in ("", "unit") else "right")
    for row in (row for row in rows if row["who"] == names[0]):
        limit = "" if row["limit"] is None else f"{row['limit']:,.4g}{' over' if row['median'] > row['limit'] else ''}"
        others = (_against(row, found.get((name, row["case"]))) for name in shown)
        table.add_row(row["case"], row["unit"], f"{row['median']:,.1f}", limit, *others)
    console = Console(highlight=False)
    console.print(table)
    for name in names[1:]:
        theirs = [row for row in rows if row["who"] == name]
        console.print(f"{name}: {theirs[0]['version'] or 'not measured'}")
        for why in dict.fromkeys(row["why_not"] for row in theirs if row["why_not"]):
            console.print(f"  –: {why}", soft_wrap=True)


def _against(ours: dict[str, Any], theirs: dict[str, Any] | None) -> str:
    if theirs is None or theirs["median"] is None:
        return "–"
    return f"{theirs['median']:,.1f} ({theirs['median'] / ours['median']:.1f}x)"
