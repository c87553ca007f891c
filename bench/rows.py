"""The kept rows, read back: which cell a row measures, and the rows of `results/` that count today.

A cell is all that a row measures but for the variant: a case and its axes. Variants are compared within one run only.
So the rows of a cell come from one run: the newest of the runs with the most peers in the cell. Rows of machines other
than that of the newest row do not count. Rows of a model with fewer layers (`layers`) choose no machine, and count if
their case has no other rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from pagedkv import regular_files
from pagedkv.errors import InvalidRequest

Row = dict[str, Any]
BENCHMARKS: Final = (
    "manager", "attention", "fragmentation", "bandwidth", "generate", "transformers", "vllm", "tiers",
)  # fmt: skip
"""The benchmarks in the order in which people read of them. Their rows are in `results/NAME.jsonl`."""
VARIANT: Final = ("variant", "who")
MOST_BYTES: Final = 2**26
OURS: Final = ("pagedkv", "pages", "cpu")


def read(path: Path) -> list[Row]:
    """Return the rows of a regular file of up to MOST_BYTES, each with its benchmark.

    Raises: InvalidRequest for another file, or a line that is no row
    """
    rows = []
    try:
        lines = regular_files.read(path, MOST_BYTES).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as why:
        raise InvalidRequest(f"{path} cannot be read: {why}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise InvalidRequest(f"{path}, line {number} is no row of a benchmark; give a file of JSON lines")
        if "when" in row and ("cell" in row or "unit" in row):  # older rows have another form
            rows.append({"bench": path.stem} | row)
    return rows


def read_all(folder: Path) -> dict[str, list[Row]]:
    """Return the rows that count, by benchmark, in the order of BENCHMARKS; benchmarks without a row are left out."""
    kept = {name: folder / f"{name}.jsonl" for name in BENCHMARKS}
    found = {name: latest(read(path)) for name, path in kept.items() if path.exists()}
    return {name: rows for name, rows in found.items() if rows}


def shallow(row: Row, layers: int) -> Row:
    """Return a row of a model with fewer layers: it says so, and promises nothing."""
    return {"layers": layers} | row | {"must": None}


def of_layers(row: Row) -> str:
    """Return ", N layers" for a row of a model with fewer layers, else ""."""
    return f", {row['layers']} layers" if "layers" in row else ""


def cell_of(row: Row) -> str:
    """Return the cell of a row as a text that is the same in all runs."""
    if "cell" in row:
        return json.dumps(row["cell"])
    names = list(row)[: list(row).index("unit")]
    return json.dumps({name: row[name] for name in names if name not in ("bench", *VARIANT)})


def latest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that count, in the order of their cells' first rows."""
    if not rows:
        return []
    whole = [row for row in rows if "layers" not in row]
    machine = max(whole or rows, key=lambda row: row["when"])["machine"]
    cells: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        runs = cells.setdefault(cell_of(row), {})
        if row["machine"] == machine:
            runs.setdefault(row["when"], []).append(row)
    found = [row for runs in cells.values() if runs for row in _newest(runs)]
    cases = {row.get("case") for row in found if "layers" not in row}
    return [row for row in found if "layers" not in row or row["case"] not in cases]


def _newest(runs: dict[str, list[Row]]) -> list[Row]:
    return runs[max(runs, key=lambda when: (_num_peers(runs[when]), when))]


def _num_peers(rows: Iterable[Row]) -> int:
    """Return the number of variants that are not ours and were measured in the rows of a cell."""
    found: set[str] = set()
    for row in rows:
        found |= set(row.get("results", ()))
        found |= {row[name] for name in VARIANT if name in row and row.get("median") is not None}
    return sum(not name.startswith(OURS) for name in found)
