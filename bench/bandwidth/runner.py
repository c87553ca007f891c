"""The run of `pagedkv bench bandwidth`: for each number of threads the ceilings, then each operation beside its own.

Subjects of a case take turns, and each repetition has a ceiling before it and after it. A row is reported as soon as
its case is complete; the rows of case "state" have the speed of memory over the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from pagedkv.bench.attention.cells import BASE, Cell
from pagedkv.bench.attention.pool import POOL_BYTES, Pool, region_of
from pagedkv.bench.attention.runner import PLAIN, on_threads
from pagedkv.bench.bandwidth import subjects
from pagedkv.bench.bandwidth.ceilings import KIB, Region
from pagedkv.bench.bandwidth.delta import deltas
from pagedkv.bench.bandwidth.subjects import KERNELS, Subject
from pagedkv.bench.bandwidth.turns import Speeds, rows
from pagedkv.bench.memory import available
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import cpu

Row = dict[str, Any]
Report = Callable[[Row], None]
KV: Final = ("bfloat16", "fp8_e4m3", "int8", "k8v4", "k5v4")
CASES: Final = ("ceiling", "decode", "write_kv", "gather_kv", "copy_frames", "linear", "delta")


@dataclass(frozen=True)
class Asked:
    """The choice of a run.

    cases:   names of CASES; all if empty.
    cells:   cells of decode; empty for the grid.
    threads: () for 1, and 2 where there are.
    """

    is_quick: bool = False
    cases: tuple[str, ...] = ()
    cells: tuple[Cell, ...] = ()
    threads: tuple[int, ...] = ()
    kernels: tuple[str, ...] = KERNELS
    turns: int | None = None

    def __post_init__(self) -> None:
        """Raise InvalidRequest for what cannot be measured, before anything is."""
        if unknown := [case for case in self.cases if case not in CASES]:
            raise InvalidRequest(f"--case {unknown[0]}: there is no such case; there are {', '.join(CASES)}")
        if why := cpu.missing():
            raise InvalidRequest(f"bench bandwidth reads memory by the C++ extension: {why[0]}")

    @property
    def repetitions(self) -> int:
        """Turns that count."""
        return self.turns or (7 if self.is_quick else 15)

    def has(self, case: str) -> bool:
        """Whether a case was asked for."""
        return not self.cases or case in self.cases


def grid(*, is_quick: bool) -> list[Cell]:
    """Return the cells of decode: a star around 32/8 heads of 128."""
    cells = [BASE, *(replace(BASE, kv=kv) for kv in KV[1:]), replace(BASE, dtype="float32")]
    cells += [
        replace(BASE, block_size=128),
        replace(BASE, batch=1, context=1024),
        replace(BASE, batch=1, context=16384),
    ]
    if not is_quick:
        sizes = [(batch, context) for batch in (1, 8) for context in (1024, 4096, 16384)]
        cells += [replace(BASE, batch=batch, context=context) for batch, context in sizes]
        cells += [replace(BASE, block_size=size) for size in (1, 8, 32, 64, 256)]
        cells += [replace(BASE, heads=heads, kv_heads=kv) for heads, kv in ((16, 16), (28, 4), (64, 8), (32, 1))]
        cells += [replace(BASE, head_dim=dim) for dim in (64, 80, 256)]
        cells += [replace(BASE, dtype="float16"), replace(BASE, kv="fp8_e5m2")]
    return list(dict.fromkeys(cells))


def measure(report: Report, asked: Asked) -> None:
    """Measure, and hand each row to `report`."""
    cells = asked.cells or tuple(grid(is_quick=asked.is_quick))
    most = available() // 4
    if most < 32 << 20:
        raise InvalidRequest(f"{4 * most >> 20} MiB of memory are free; bench bandwidth needs 128 MiB at least")
    wanted = [POOL_BYTES, *map(Pool.bytes_of, cells)]
    region = Region(region_of(max([size for size in wanted if size <= most], default=most)))
    for threads in asked.threads or range(1, min(2, torch.get_num_threads()) + 1):
        with on_threads(threads):
            _on_cpu(report, asked, region, [replace(cell, threads=threads) for cell in cells])


def _on_cpu(report: Report, asked: Asked, region: Region, cells: Sequence[Cell]) -> None:
    axes = {"threads": cells[0].threads}
    bounds = {name: Speeds(bound) for name, bound in region.bounds().items()}
    kinds = KV[:2] if asked.is_quick else KV
    makers: dict[str, Callable[[], Iterable[Subject]]] = {
        "ceiling": lambda: subjects.ceilings(region),
        "decode": lambda: subjects.decodes(cells, region, asked.kernels),
        "write_kv": lambda: subjects.writes([("bfloat16", kv) for kv in ("", *kinds[1:])], region, asked.kernels),
        "gather_kv": lambda: subjects.gathers(kinds, region),
        "copy_frames": lambda: subjects.copies((4 * KIB, 32 * KIB, 2048 * KIB), region),
        "linear": lambda: subjects.linears((1, 8), ("int8", "int4"), region),
        "delta": lambda: deltas((1, 512)),
    }
    for case, make in makers.items():
        if asked.has(case):
            _reported(report, make(), bounds, asked.repetitions, axes)
    for speeds in bounds.values():
        if speeds.readings:
            report(speeds.row(axes))


def _reported(
    report: Report, found: Iterable[Subject], bounds: dict[str, Speeds], repetitions: int, axes: dict[str, Any]
) -> None:
    every = list(found)
    for row in rows(every, bounds, repetitions, axes):
        report(row)
    for subject in every:
        for name, why in subject.variants.items():
            if isinstance(why, str) and why != PLAIN:
                _note(f"{subject.case}, {name}: {why}")


_noted: set[str] = set()


def _note(words: str) -> None:
    """Say once on stderr what is not measured."""
    if words not in _noted:
        print(f"not measured: {words}", file=sys.stderr)
        _noted.add(words)
