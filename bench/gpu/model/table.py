"""Predictions as a table, with measured rows beside them: `python -m pagedkv.bench.gpu.model [--rows FILE] [--count]`.

--markdown writes the tables of docs/explanation/gpu-predictions.md again, from counts.json and bench/results; a test
compares. Measured rows are the newest of an H200 for each cell and backend. This file knows no arithmetic.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from pagedkv.bench import record
from pagedkv.bench.attention.cells import Cell
from pagedkv.bench.gpu.model import counts
from pagedkv.bench.gpu.model.predict import Prediction, library, predict

BASE: Final = Cell(batch=32, context=4096, device="cuda")
SIZES: Final = ((1, 4096), (1, 32768), (8, 8192), (32, 4096))
DECODE: Final = tuple(
    replace(BASE, batch=batch, context=context, kv=kv)
    for kv in ("", "fp8_e4m3", "int8", "int4")
    for batch, context in SIZES
)
PREFILL: Final = tuple(
    replace(BASE, kind="prefill", batch=1, new=new, context=context) for new, context in ((8192, 8192), (2048, 32768))
)
COUNTED: Final = ("cuda", "triton")
BACKENDS: Final = (*COUNTED, "library")
NOT_YET: Final = "–"


class Line(NamedTuple):
    """A cell, a backend, the prediction and the measured row ({}: none yet)."""

    cell: Cell
    backend: str
    predicted: Prediction
    measured: dict[str, Any]


def predicted(cell: Cell, backend: str) -> Prediction | None:
    """Return the prediction of a cell; None if no kernel of its geometry was counted. Of `library`: of prefills."""
    like = replace(BASE, kind=cell.kind, batch=cell.batch, context=cell.context, new=cell.new, kv=cell.kv)
    if cell != replace(like, lengths=cell.lengths) or (cell.kind == "decode" and cell.new > 1):
        return None
    if backend == "library":
        return library(cell) if cell.kind == "prefill" else None
    found = counts.count_of(backend, cell.kind, cell.kv or cell.dtype)
    return found and predict(found, cell)


def measured(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the newest row of an H200 for each (cell, backend)."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in sorted((row for row in rows if row.get("us") and "H200" in row.get("gpu", "")), key=_when):
        found[row["case"], row["who"]] = row
    return found


def _when(row: dict[str, Any]) -> str:
    return str(row.get("when", ""))


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the rows of these files; a file that does not exist has none."""
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]


def kept() -> list[Path]:
    """Return the files of measured rows in a checkout."""
    folder = record.results()
    return [folder / f"gpu-{name}.jsonl" for name in ("attention", "prefill")] if folder else []


def lines(rows: list[dict[str, Any]]) -> list[Line]:
    """Return a line for each cell and backend that was counted."""
    beside = measured(rows)
    return [
        Line(cell, backend, found, beside.get((str(cell), backend), {}))
        for backend in BACKENDS
        for cell in (*DECODE, *PREFILL)
        if (found := predicted(cell, backend))
    ]


def size(cell: Cell) -> str:
    """Return the size of a cell in short."""
    if cell.kind == "prefill":
        return f"prefill {cell.new // 1024}k of {cell.context // 1024}k"
    return f"{cell.batch} × {cell.context // 1024}k"


def row_of(line: Line) -> list[str]:
    """Return the texts of one row: size, keys, predicted, limit, measured."""
    (us, share, tflops, limit), found = line.predicted, line.measured
    words = f"{us:.0f} µs, {share:.2f}" if share is not None else f"{us:.0f} µs, {tflops:.0f} TFLOP/s"
    beside = found.get("of_ceiling") or found.get("TFLOP_per_s")
    seen = f"{found['us']:.0f} µs" + (f", {beside:.3g}" if beside else "") if found else NOT_YET
    return [size(line.cell), line.cell.kv or line.cell.dtype, words, limit, seen]


HEAD: Final = ("cell", "keys", "predicted", "limited by", "measured")


def markdown(every: list[Line], backend: str) -> str:
    """Return the table of one backend."""
    rows = [row_of(line) for line in every if line.backend == backend]
    return "\n".join(f"| {' | '.join(row)} |" for row in (HEAD, ["---"] * len(HEAD), *rows))


def counted(backend: str) -> str:
    """Return the table of a backend's counts."""
    head = ("kernel", "keys", "registers", "instructions", "cycles", "tensor", "alu", "fma", "lsu", "xu", "in flight")
    rows = [
        [
            c.kind,
            c.kv,
            f"{c.registers}",
            f"{c.instructions}",
            f"{c.cycles:.0f}",
            *(f"{c.pipes.get(pipe, 0)}" for pipe in ("tensor", "alu", "fma", "lsu", "xu")),
            f"{c.in_flight >> 10} KB",
        ]
        for c in counts.load()
        if c.backend == backend
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def promises() -> str:
    """Return the benchmark's promises that the model can judge: `cuda` by its own, `triton` by the others."""
    from pagedkv.bench.gpu.attention import MUSTS  # it imports this file

    rows = [["backend", "promise", "predicted", "expected to"], ["---"] * 4]
    for must in MUSTS:
        backend = must.by or "triton"
        found, twin = predicted(must.cell, backend), predicted(must.twin or must.cell, backend)
        if not found or not twin:
            continue
        value = {
            "us": found.us,
            "of_ceiling": found.of_ceiling or 0.0,
            "TFLOP_per_s": found.tflops or 0.0,
            "ratio": found.us / twin.us,
        }[must.what]
        of = {"us": "µs", "of_ceiling": "of the ceiling", "TFLOP_per_s": "TFLOP/s"}
        of["ratio"] = f"of the time of {name(must.twin or must.cell)}"
        promise = f"{name(must.cell)}: {must.limit:.3g} {of[must.what]}"
        rows.append([backend, promise, f"{value:.3g}", "hold" if must.holds(value) else "be missed"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def name(cell: Cell) -> str:
    """Return the size of a cell, its keys, and whether it is ragged."""
    return f"{size(cell)} {cell.kv or cell.dtype}{'' if cell.lengths == 'uniform' else ' ragged'}"


def page(text: str, rows: list[dict[str, Any]]) -> str:
    """Return the text of the manual's page with its tables made again."""
    every = lines(rows)
    made = {f"predicted {backend}": markdown(every, backend) for backend in BACKENDS}
    made |= {f"counted {backend}": counted(backend) for backend in COUNTED} | {"promises": promises()}
    for mark, table in made.items():
        pattern = rf"(<!-- {mark} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text, flags=re.S)
    return text


def main(argv: list[str] | None = None) -> None:
    """Print the table, or count, or write the page."""
    parser = argparse.ArgumentParser(prog="pagedkv.bench.gpu.model", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, action="append", help="files of measured rows, beside bench/results")
    parser.add_argument("--count", action="store_true", help="first count the kernels again (two minutes, no GPU)")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="write the tables of this page again")
    given = parser.parse_args(argv)
    if given.count:
        counts.save(list(counts.every()))
        counts.load.cache_clear()
    rows = read([*kept(), *(given.rows or [])])
    if given.markdown:
        given.markdown.write_text(page(given.markdown.read_text(), rows))
        return
    for line in lines(rows):
        cell, keys, words, limit, seen = row_of(line)
        print(f"{line.backend:12} {cell:18} {keys:10} {words:24} {limit:16} {seen}")
