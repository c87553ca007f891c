"""`pagedkv bench compare`: a table of two files of rows, the worst ratio first."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pagedkv.bench import rows
from pagedkv.bench.compare import Change, compared
from pagedkv.errors import InvalidRequest


def run(first: Path, second: Path, *, is_relative: bool, tolerance: float, as_json: bool) -> int:
    """Print the ratio of each cell; return 1 if one has fallen by more than the noise and the tolerance."""
    before, after = (_newest(path) for path in (first, second))
    changes = compared(before, after, is_relative=is_relative)
    if not changes:
        kind = "no ratio to a bound or a peer" if is_relative else "no cell"
        raise InvalidRequest(f"{first} and {second} have {kind} in common; compare runs of the same benchmark")
    fallen = [change for change in changes if change.has_fallen(tolerance)]
    if as_json:
        print(json.dumps([asdict(change) | {"fell": change in fallen} for change in changes]))
    else:
        _print(changes, tolerance)
    return 1 if fallen else 0


def _newest(path: Path) -> list[rows.Row]:
    by_benchmark: dict[str, list[rows.Row]] = {}
    for row in rows.read(path):
        by_benchmark.setdefault(row["bench"], []).append(row)
    return [row for some in by_benchmark.values() for row in rows.latest(some)]


def _print(changes: list[Change], tolerance: float) -> None:
    table = Table(title="second ÷ first; above 1 is better", title_justify="left")
    table.add_column("cell", overflow="fold")
    for head in ("ratio", "95 of 100", ""):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for change in changes:
        ends = "too few clean turns" if change.low is None else f"{change.low:.2f} to {change.high:.2f}"
        verdict = "FELL" if change.has_fallen(tolerance) else "rose" if change.has_risen(tolerance) else ""
        table.add_row(f"{change.bench}: {change.name}", f"{change.ratio:.2f}", ends, verdict)
    console = Console(highlight=False)
    console.print(table)
    judged = [change for change in changes if change.low is not None]
    fallen = sum(change.has_fallen(tolerance) for change in judged)
    console.print(f"{fallen} of {len(judged)} ratios fell by more than the noise and a tolerance of {tolerance:.0%}")
