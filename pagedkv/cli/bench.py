"""`pagedkv bench`: runs a benchmark of pagedkv.bench, keeps its rows, and prints them. What is measured, and how, is known there alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pagedkv.bench import manager as runner
from pagedkv.bench import record
from pagedkv.errors import InvalidRequest


def manager(rounds: int, *, as_json: bool, keep: Path | None) -> None:
    """Measure, append the rows, print a table or a list of JSON objects."""
    figures = runner.measure(rounds)
    about = record.provenance()
    rows = [figure.row() | about for figure in figures]
    folder = record.results()
    try:
        record.append(rows, keep or (folder / "manager.jsonl" if folder else None))
    except OSError as why:
        raise InvalidRequest(f"the rows cannot be kept: {why}") from None
    if as_json:
        print(json.dumps(rows))
    else:
        _print(rows, about)


def _print(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    table = Table(caption=f"{about['machine']}; {about['commit']}", caption_justify="left")
    for name in ("", "unit", "median", "best", "limit", ""):
        table.add_column(name, justify="right" if name in ("median", "best", "limit") else "left")
    for row in rows:
        over = "over" if row["limit"] and row["median"] > row["limit"] else ""
        table.add_row(row["case"], row["unit"], f"{row['median']:.1f}", f"{row['best']:.1f}", f"{row['limit']:.0f}", over)
    Console(highlight=False).print(table)
