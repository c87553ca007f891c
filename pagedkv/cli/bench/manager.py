"""`pagedkv bench`: run a benchmark of pagedkv.bench, keep its rows, and print them.

Only pagedkv.bench knows the cases and the way to measure them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pagedkv.bench import record
from pagedkv.bench.manager import runner
from pagedkv.errors import InvalidRequest


def manager(rounds: int, pythons: Sequence[Path], *, as_json: bool, keep: Path | None) -> None:
    """Measure the memory manager, append the rows, and print a table or a list of JSON objects."""
    figures = runner.measure(rounds, [str(path) for path in pythons])
    about = record.provenance()
    rows = [figure.row() | about for figure in figures]
    _keep(rows, keep)
    if as_json:
        print(json.dumps(rows))
    else:
        _print(rows, about)


def scaling(rounds: int, picture: Path, *, as_json: bool, keep: Path | None) -> None:
    """Measure a step against pool size and context length; append the rows, draw them, and print each line's rise."""
    if find_spec("matplotlib") is None:
        raise InvalidRequest("--plot needs matplotlib; install pagedkv[plot]")
    from pagedkv.bench.manager.scaling import draw, measure, spread

    figures = measure(rounds)
    about = record.provenance()
    rows = [figure.row() | about for figure in figures.values()]
    _keep(rows, keep)
    try:
        draw(figures, picture)
    except (OSError, ValueError) as why:
        raise InvalidRequest(f"the plot cannot be written to {picture}: {why}") from None
    if as_json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(f"{row['median']:8.1f} us   {row['case']}")
        for line, ratio in spread(figures).items():
            print(f"{ratio:8.2f} x    from the cheapest to the dearest: {line}")


def _keep(rows: list[dict[str, Any]], path: Path | None) -> None:
    folder = record.results()
    try:
        record.append(rows, path or (folder / "manager.jsonl" if folder else None))
    except OSError as why:
        raise InvalidRequest(f"the rows cannot be kept: {why}; --record FILE names another file") from None


def _print(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Print a line for each case: our figure, the limit, and each peer's figure with its ratio to ours."""
    names = list(dict.fromkeys(row["who"] for row in rows))
    found = {(row["who"], row["case"]): row for row in rows}
    table = Table(caption=f"medians; {about['machine']}; {about['commit']}", caption_justify="left")
    for name in ("", "unit", *names[:1], "limit", *(name.split()[0] for name in names[1:])):
        table.add_column(name, justify="left" if name in ("", "unit") else "right")
    for row in (row for row in rows if row["who"] == names[0]):
        limit = "" if row["limit"] is None else f"{row['limit']:,.4g}{' over' if row['median'] > row['limit'] else ''}"
        others = (_against(row, found.get((name, row["case"]))) for name in names[1:])
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
