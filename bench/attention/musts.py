"""The promises of the kernels, as ratios of one run: each promise, the wanted value, and the worst value found.

This file knows the rows of runner.py. It prints and measures nothing. A promise without a measured cell is not listed.
A ratio counts if both its timings are clean (clock.py), because a disturbed timing depends on what else ran on the
machine. A promise says how many cells were left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from pagedkv.bench.attention.cells import Cell
from pagedkv.bench.attention.runner import CALLS, CEILING, DIRECT, SDPA, VLLM, Row, compared

OURS: Final = "cpu"
SMALL, PERMUTED = "block 16 / block 128", "permuted pages / pages in order"
LAID: Final[dict[str, dict[str, object]]] = {SMALL: {"block_size": 128}, PERMUTED: {"pages": "in order"}}
"""Promises about the placement of pages: the fields in which the cell that they are compared with differs."""


@dataclass(frozen=True)
class Promise:
    """A promise and what one run found about it.

    found:   the worst value of `cells` clean cells, measured at the cell `where`.
    wanted:  microseconds: `found` must not be larger; a ratio: `found` must not be smaller.
    unclean: the number of cells left out. If no cell is clean, `cells` is 0 and `found` is the worst unclean value.
    bare:    for a promise about the placement of pages: the same ratio of plain reads, the best that memory allows.
    """

    text: str
    wanted: float
    found: float
    where: str
    cells: int
    unit: str = "x"
    unclean: int = 0
    bare: float | None = None

    @property
    def kept(self) -> bool:
        """Whether the worst value is good enough."""
        return self.found <= self.wanted if self.unit == "us" else self.found >= self.wanted


Predicate = Callable[[Cell], bool]
Ratio = Callable[[Row], "float | None"]


def promises(rows: Iterable[Row]) -> list[Promise]:
    """Return the promises about which `rows` hold a measurement."""
    every = {row.cell: row for row in rows}
    clean = {promise.text: promise for promise in _all({cell: _undisturbed(row) for cell, row in every.items()})}
    return [_beside_bare(_beside_unclean(clean.get(promise.text), promise), every) for promise in _all(every)]


def _undisturbed(row: Row) -> Row:
    return replace(row, timings={who: timing for who, timing in row.timings.items() if timing.clean})


def _beside_unclean(clean: Promise | None, every: Promise) -> Promise:
    return replace(clean, unclean=every.cells - clean.cells) if clean else replace(every, cells=0, unclean=every.cells)


def _beside_bare(promise: Promise, rows: dict[Cell, Row]) -> Promise:
    if promise.text not in LAID:
        return promise
    row = next(row for cell, row in rows.items() if str(cell) == promise.where)
    return replace(promise, bare=_faster(row, rows[replace(row.cell, **LAID[promise.text])], CEILING))


def _all(rows: dict[Cell, Row]) -> Iterator[Promise]:
    def check(text: str, wanted: float, matches: Predicate, ratio: Ratio, unit: str = "x") -> Iterator[Promise]:
        found = [
            (value, str(cell)) for cell, row in rows.items() if matches(cell) and (value := ratio(row)) is not None
        ]
        if found:
            worst = (max if unit == "us" else min)(found)
            yield Promise(text, wanted, *worst, len(found), unit)

    def beside(ratio_of: Callable[[Row, Row], float | None], **other: object) -> Ratio:
        """Compare with the cell that differs in the fields `other`."""
        return lambda row: ratio_of(row, twin) if (twin := rows.get(replace(row.cell, **other))) else None

    for dtype, one, two, vllm in (("bfloat16", 0.75, 0.85, 2.4), ("float32", 0.80, 0.85, 1.7)):
        for threads, wanted in ((1, one), (2, two)):
            cells = _long(dtype=dtype, threads=threads)
            yield from check(
                f"{dtype} decode / ceiling, {threads} thr", wanted, cells, lambda row: row.over(OURS, CEILING)
            )
        yield from check(f"{dtype} decode / vLLM", vllm, _long(dtype=dtype), lambda row: row.over(OURS, VLLM))
    for kv, wanted in (("fp8_e4m3", 1.5), ("int8", 1.5), ("int4", 2.0)):
        yield from check(f"{kv} decode / ours in bfloat16", wanted, _long(kv=kv), beside(_faster, kv=""))
    yield from check("fp8 decode / vLLM's fp8", 2.5, _long(kv="fp8_e4m3"), lambda row: row.over(OURS, VLLM))
    yield from check(SMALL, 0.95, _long(block_size=16), beside(_faster, **LAID[SMALL]))
    yield from check("ragged (Zipf) / uniform", 0.90, _long(lengths="zipf"), beside(_by_bytes, lengths="uniform"))
    yield from check(PERMUTED, 0.97, _long(), beside(_faster, **LAID[PERMUTED]))
    yield from check(
        "1k x 1 above bytes / ceiling", 10, lambda c: (c.kind, c.batch, c.context) == ("decode", 1, 1024), _above, "us"
    )
    for dtype, vllm in (("bfloat16", 1.5), ("float32", 1.0)):
        cells = _of_kind("prefill", dtype)
        yield from check(f"{dtype} prefill / vLLM", vllm, cells, lambda row: row.over(OURS, VLLM))
    yield from check("prefill / torch SDPA", 1.3, _of_kind("prefill"), lambda row: row.over(OURS, SDPA))
    yield from check(
        "write_kv / memcpy", 0.5, lambda c: c.kind == "write" and not c.kv, lambda row: row.over(OURS, CEILING)
    )
    yield from check(
        "quantising write_kv / memcpy",
        0.3,
        lambda c: c.kind == "write" and bool(c.kv),
        lambda row: row.over(OURS, CEILING),
    )
    yield from check("added by the torch operator", 5, lambda c: c.kind == "call", _added, "us")


def _long(**fixed: object) -> Predicate:
    """Return whether a cell is a decode of 4k and more in the common shape, with the fields `fixed`.

    The common shape: 32/8 heads of 128, unquantised, uniform, permuted, block 16 or 128.
    """
    wanted = {
        "kind": "decode",
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "kv": "",
        "lengths": "uniform",
        "pages": "permuted",
    } | fixed

    def matches(cell: Cell) -> bool:
        return (
            cell.context >= 4096
            and cell.block_size in (16, 128)
            and all(getattr(cell, name) == x for name, x in wanted.items())
        )

    return matches


def _of_kind(kind: str, dtype: str | None = None) -> Predicate:
    return lambda cell: cell.kind == kind and dtype in (None, cell.dtype)


def _faster(row: Row, twin: Row, who: str = OURS) -> float | None:
    return compared(row.timings.get(who), twin.timings.get(who), lambda ours, theirs: theirs / ours)


def _by_bytes(row: Row, twin: Row) -> float | None:
    faster = _faster(row, twin)
    return None if faster is None else faster * row.bytes / twin.bytes


def _above(row: Row) -> float | None:
    return compared(row.timings.get(OURS), row.timings.get(CEILING), lambda ours, ceiling: (ours - ceiling) * 1e6)


def _added(row: Row) -> float | None:
    return compared(
        row.timings.get(OURS), row.timings.get(DIRECT), lambda through, direct: (through - direct) * 1e6 / CALLS
    )
