"""`pagedkv bench transformers`: generate() with the caches of transformers and with pages.

Only pagedkv.bench knows how to measure. Each row is kept as soon as it is measured.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pagedkv.bench import record
from pagedkv.errors import InvalidRequest


def run(turns: int, *, is_quick: bool, as_json: bool, keep: Path | None) -> None:
    """Measure, append the rows, and print a table or a list of JSON objects."""
    if find_spec("transformers") is None:
        raise InvalidRequest("bench transformers needs transformers; install pagedkv[hf]")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from pagedkv.bench.transformers import runner

    rows: list[dict[str, Any]] = []
    about = record.provenance()
    about["versions"]["transformers"] = record.version_of("transformers")
    folder = record.results()
    path = keep or (folder / "transformers.jsonl" if folder else None)

    def keep_row(row: dict[str, Any]) -> None:
        rows.append(row | about)
        try:
            record.append(rows[-1:], path)
        except OSError as why:
            raise InvalidRequest(f"the rows cannot be kept: {why}; --record FILE names another file") from None

    shapes = runner.QUICK if is_quick else runner.SHAPES
    runner.measure(shapes, turns, keep_row)
    runner.report_memory(keep_row, shapes[0])
    if as_json:
        print(json.dumps(rows))
    else:
        _print(rows, about)


def _print(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    table = Table(caption=f"medians; {about['machine']}; {about['commit']}", caption_justify="left")
    for name in ("case", "shape", "cache", "median", "unit", "pages: times as fast", "promised"):
        table.add_column(name, justify="right" if name in ("median", "pages: times as fast", "promised") else "left")
    for row in rows:
        shape = f"{row['batch']} x {row['context']:,}" if "batch" in row else ""
        ratio = row.get("pages_over_this") or row.get("hit_over_miss")
        must = row.get("must")
        table.add_row(
            row["case"], shape, row["variant"], f"{row['median']:,.3g}", row["unit"],
            "" if ratio is None else f"{ratio:.2f}", "" if must is None else f"{must:g}",
        )  # fmt: skip
    Console(highlight=False).print(table)
