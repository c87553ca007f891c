"""The rows of `pagedkv bench fragmentation`: every variant of a cell serves the same requests with the same memory.

A row has per cent of the KV memory, means over the steps in which requests wait (see the package head):

    useful    with reserved, internal, rounded and free, which add up to 100; sequences that run at once; preemptions
    waste     slots of mapped frames without a token: Stats.waste of the manager
    saved     frames that sharing saves, of all pages; copies: frames that were copied on write, eager: those that a
              copy at each fork would have copied
    copies    runs of neighbouring frames of a finished sequence: the copies that move it
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from pagedkv.bench.clock import track
from pagedkv.bench.fragmentation.account import Allocator
from pagedkv.bench.fragmentation.cells import (
    BLOCK,
    CELLS,
    FULL,
    MAKERS,
    MUSTS,
    OURS,
    PUBLISHED,
    SEQUENCES,
    TRACED,
    UNAWARE,
    Cell,
)
from pagedkv.bench.fragmentation.live import Live
from pagedkv.bench.fragmentation.simulation import Simulation, Tally
from pagedkv.bench.fragmentation.workloads import WORKLOADS, Workload, traced
from pagedkv.errors import InvalidRequest

Row = dict[str, Any]
Report = Callable[[Row], None]
EVERY: Final = 4
"""Steps from one account to the next."""
PARTS: Final = ("useful", "reserved", "internal", "rounded", "free")


def measure(
    report: Report, *, is_quick: bool, trace: Path | None = None, only: Sequence[str] = (), variants: Sequence[str] = ()
) -> None:
    """Run the cells, and hand each row to `report`.

    only:     workloads; all if empty.
    variants: texts, one of which the name of a variant contains; all if empty.
    Raises: InvalidRequest for an unknown workload, a text that names no variant, or a trace that cannot be read
    """
    cells = [*CELLS, *([TRACED] if trace else [])]
    if unknown := [name for name in only if name not in {cell.workload for cell in cells}]:
        hint = "; --trace FILE gives it" if unknown[0] == TRACED.workload else ""
        raise InvalidRequest(
            f"--workload {unknown[0]}: there is no such workload{hint}; there are "
            f"{', '.join(cell.workload for cell in cells)}"
        )
    chosen = [
        (cell, variant)
        for cell in cells
        if not only or cell.workload in only
        for variant in cell.variants
        if not variants or any(text in variant for text in variants)
    ]
    if variants and not chosen:
        names = dict.fromkeys(variant for cell in cells for variant in cell.variants)
        raise InvalidRequest(
            f"no allocator of these workloads is named by --allocator {', '.join(variants)}; there are "
            f"{', '.join(names)}"
        )
    size, loads = 1 if is_quick else FULL, dict[str, tuple[Workload, list[Any]]]()
    known = WORKLOADS | ({TRACED.workload: traced(trace, TRACED.quick * size)} if trace else {})
    for cell, variant in track(chosen, "serving requests"):
        if cell.workload not in loads:
            load = known[cell.workload]
            loads = {cell.workload: (load, load.requests(cell.quick * size))}
        load, requests = loads[cell.workload]
        allocator = MAKERS[variant](variant, load)
        tally = Simulation(requests, allocator, EVERY).run()
        for row in rows_of(cell, variant, allocator, tally):
            report(row)


def rows_of(cell: Cell, variant: str, allocator: Allocator, tally: Tally) -> list[Row]:
    """Return the rows of one run."""
    accounts = [moment.account for moment in tally.loaded()]
    rows = [_useful(cell.workload, variant, allocator, tally)]
    figures = allocator.figures()
    if isinstance(allocator, Live) and variant != UNAWARE:
        held = [account.reserved + account.internal for account in accounts]
        share = statistics.fmean(waste / account.held for waste, account in zip(held, accounts, strict=True))
        rows.append(_row("waste", cell.workload, variant, "% of mapped frames", 100 * share))
    if cell.figure == "saved" and variant == OURS:
        share = statistics.fmean(account.saved / (account.saved + account.held) for account in accounts)
        copied = {"forks": tally.forks, "copies": figures["copies"], "eager": tally.eager / BLOCK}
        rows.append(_row("saved", cell.workload, variant, "%", 100 * share) | copied)
    if variant == OURS and "runs" in figures:
        rest = {name: figures[name] for name in ("pages", "mean_run")}
        rows.append(_row("copies", cell.workload, variant, "copies of a sequence", figures["runs"]) | rest)
    return rows


def _row(figure: str, workload: str, variant: str, unit: str, median: float) -> Row:
    key = (figure, workload, variant)
    row = {"case": figure, "workload": workload, "variant": variant, "unit": unit, "median": median}
    row |= {"published": PUBLISHED[key]} if key in PUBLISHED else {}
    return row | {"must": MUSTS.get(key)}


def _useful(workload: str, variant: str, allocator: Allocator, tally: Tally) -> Row:
    loaded, memory = tally.loaded(), allocator.memory
    shares = {
        part: 100 * statistics.fmean(getattr(moment.account, part) / memory.capacity for moment in loaded)
        for part in PARTS
    }
    row = _row("useful", workload, variant, "%", shares.pop("useful")) | shares
    row["sequences"] = statistics.fmean(moment.sequences for moment in loaded)
    if workload == "sharegpt" and variant in SEQUENCES:
        row["published_sequences"] = SEQUENCES[variant]
    for name in ("steps", "finished", "preemptions", "recomputed", "dropped", "stored"):
        row[name] = getattr(tally, name)
    return row | {"moved": allocator.moved, "slots": memory.slots}
