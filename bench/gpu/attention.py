"""The kernels on a GPU beside the speed of its memory: `python -m pagedkv.bench.gpu.attention`.

Time      One CUDA graph holds `calls` calls, each with its own page tables into a pool much larger than the L2 cache.
          The graph is replayed twice in a row, and events time the second replay, so that its launch hides behind the
          first. The figure is the median of these times, divided by `calls`.
Turns     The variants and cells of one group take turns. Frames are in random order.
Bytes     Keys and values only.
Ceiling   A kernel that reads as many bytes and does nothing else, in the same turns.
Peers     peers.py. A peer that cannot be imported is reported with the reason.
Rows      Appended to FOLDER/gpu-attention.jsonl and, in a checkout, to bench/results, after each group; a plot of the
          run lies beside them.

This file knows the public call; cells.py defines a cell.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from pagedkv import paged_attention
from pagedkv.bench import record
from pagedkv.bench.attention.cells import Cell
from pagedkv.bench.gpu.model import table
from pagedkv.bench.gpu.peers import PEERS
from pagedkv.bench.gpu.pool import GpuPool
from pagedkv.bench.gpu.timing import Step, error_line, in_turn, provenance, require_gpu

BASE: Final = Cell(batch=32, context=4096, device="cuda")
LONG: Final = replace(BASE, batch=8, context=32768)
MIDDLE: Final = replace(BASE, batch=8)
ONE_LONG: Final = replace(BASE, batch=1, context=32768)
ONE: Final = replace(BASE, batch=1, context=1024)
LARGE_PAGES: Final = replace(BASE, block_size=128)
RAGGED: Final = replace(BASE, lengths="zipf")
FP8: Final = replace(BASE, kv="fp8_e4m3")
INT8: Final = replace(BASE, kv="int8")
INT4: Final = replace(BASE, kv="int4")
DRAFTS: Final = replace(BASE, new=8)
ONE_4K: Final = replace(BASE, batch=1)
PROMPT, CHUNK = table.PREFILL
"""Measured by prefill.py: a whole prompt, and a chunk behind a long prefix."""

QUICK: Final = (
    (BASE, LARGE_PAGES, RAGGED, FP8, INT8, INT4, DRAFTS),
    *((cell,) for cell in (MIDDLE, ONE, LONG, ONE_LONG, ONE_4K)),
)
GROUPS: Final = (
    (BASE, LARGE_PAGES, RAGGED, FP8, INT8, INT4, DRAFTS),
    *((cell,) for cell in (LONG, MIDDLE, ONE)),
    *(
        (cell,)
        for cell in (
            replace(BASE, head_dim=64),
            replace(BASE, heads=28, kv_heads=4),
            replace(BASE, kv_heads=32, batch=8),
        )
    ),
    (replace(BASE, batch=128, context=1024),),
    *(tuple(cell for cell in table.DECODE if (cell.batch, cell.context) == size) for size in table.SIZES[:-1]),
)
"""Groups of cells. The cells of a group take turns, so that a ratio compares times of the same moment.

QUICK: only the cells that a promise names. GROUPS has those with a prediction, too.
"""


@dataclass(frozen=True)
class Must:
    """A promise about the figure `what` of a cell.

    what:       "us", microseconds; "of_ceiling", the share of the ceiling; "TFLOP_per_s", of a prefill; "ratio", the
                cell's time over `twin`'s time.
    limit:      a share of the ceiling and a rate must not be smaller; microseconds and a ratio must not be larger.
    everywhere: the promise holds on every GPU, not on an H200 alone.
    by:         the backends whose names begin with this text make the promise; "" for all.
    """

    cell: Cell
    what: str
    limit: float
    twin: Cell | None = None
    everywhere: bool = False
    by: str = ""

    def holds(self, found: float) -> bool:
        """Return whether the figure found keeps the promise."""
        return found >= self.limit if self._is_least else found <= self.limit

    @property
    def _is_least(self) -> bool:
        """Whether the limit is a least one."""
        return self.what in ("of_ceiling", "TFLOP_per_s")

    def verdict(self, found: float) -> str:
        """Return one line: the figure found, the limit, and whether the promise holds."""
        beside = f" to {self.twin}" if self.twin else ""
        return f"{self.what}{beside} {found:.3g}, must be {'>=' if self._is_least else '<='} {self.limit:.3g}: " + (
            "holds" if self.holds(found) else "MISSED"
        )


MUSTS: Final = (
    Must(BASE, "of_ceiling", 0.85),
    Must(LONG, "of_ceiling", 0.85),
    Must(MIDDLE, "us", 44),
    Must(ONE_LONG, "us", 44),
    Must(ONE, "us", 10),
    Must(BASE, "ratio", 1.08, LARGE_PAGES, everywhere=True),
    Must(RAGGED, "ratio", 1.10, BASE, everywhere=True),
    *(Must(cell, "ratio", 1 / 1.5, BASE, everywhere=True) for cell in (FP8, INT8, INT4)),
    *(Must(cell, "TFLOP_per_s", 400, by="triton") for cell in (PROMPT, CHUNK)),
    Must(PROMPT, "TFLOP_per_s", 550, by="library"),
    Must(BASE, "of_ceiling", 0.90, by="cuda"),
    Must(LONG, "of_ceiling", 0.90, by="cuda"),
    Must(MIDDLE, "us", 41, by="cuda"),
    Must(ONE_LONG, "us", 41, by="cuda"),
    Must(ONE, "us", 8, by="cuda"),
    Must(ONE_4K, "us", 11, by="cuda"),
    Must(BASE, "ratio", 1.05, LARGE_PAGES, everywhere=True, by="cuda"),
    Must(RAGGED, "ratio", 1.05, BASE, everywhere=True, by="cuda"),
    *(Must(cell, "ratio", 1 / 1.6, BASE, everywhere=True, by="cuda") for cell in (FP8, INT8, INT4)),
    Must(DRAFTS, "ratio", 1.15, BASE, everywhere=True, by="cuda"),
)
FIXED_SPLIT, OF_FREE = 512, 1.05
"""Keys of a chunk in the batch-invariant variant (` split` after the backend's name); the limit of its time ratio.

The ratio is its time over the time of the same backend without `split_tokens`.
"""


def ours(backend: str, pool: GpuPool, **options: Any) -> list[Step]:
    """Return the steps of `backend` over `pool`, one for each call of a graph."""
    q = pool.query()
    return [
        lambda batch=batch: paged_attention(q, pool.layer, batch, backend=backend, **options)
        for batch in pool.batches()
    ]


def ceiling(pool: GpuPool) -> list[Step]:
    """Return steps that read as many bytes as a decode step of `pool`, each from another place of the pool."""
    from pagedkv.bench.gpu.ceiling import read

    whole = pool.bytes[: len(pool.bytes) // 16 * 16].view(torch.int64)
    words, num_words = pool.kv_bytes // 8, len(whole)
    starts = [i * words % max(1, num_words - words) // 16 * 16 for i in range(pool.calls)]
    return [lambda at=at: read(whole[at : at + words]) for at in starts]


def variants_of(
    cell: Cell, backends: list[str], *, peers: bool
) -> tuple[GpuPool | None, dict[str, list[Step]], dict[str, str]]:
    """Return the pool of a cell, the steps of each variant, and for each refused variant the reason."""
    found: dict[str, list[Step]] = {}
    refused: dict[str, str] = {}
    try:
        pool = GpuPool(cell)
    except torch.OutOfMemoryError as why:
        return None, {}, {"pool": error_line(why)}
    makers: dict[str, Callable[[GpuPool], list[Step]]] = {"ceiling": ceiling}
    makers |= {name: lambda pool, name=name: ours(name, pool) for name in backends}  # type: ignore[misc]
    if cell == BASE:
        makers |= {
            f"{name} split": lambda pool, name=name: ours(name, pool, split_tokens=FIXED_SPLIT) for name in backends
        }  # type: ignore[misc]
    for name, make in (makers | (PEERS if peers and cell.new == 1 else {})).items():
        try:
            found[name] = make(pool)
        except Exception as why:  # a peer's own error, or too little memory for a variant
            refused[name] = error_line(why)
    return pool, found, refused


def measure(
    cells: tuple[Cell, ...], backends: list[str], repetitions: int, *, peers: bool = True
) -> list[dict[str, Any]]:
    """Return a row for each variant of each cell; all of them take turns."""
    pools, variants, refused = {}, {}, {}
    for cell in cells:
        pools[cell], found, why_not = variants_of(cell, backends, peers=peers)
        variants |= {(cell, who): steps for who, steps in found.items()}
        refused |= {(cell, who): why for who, why in why_not.items()}
    medians, broken = in_turn(variants, repetitions)
    rows = []
    for cell, pool in pools.items():
        about = {
            "case": str(cell),
            "cell": asdict(cell),
            "kv_bytes": pool and pool.kv_bytes,
            "calls": pool and pool.calls,
        }
        top = medians.get((cell, "ceiling"))
        for (of, who), us in medians.items():
            if of == cell and pool:
                figures = {
                    "us": round(us, 2),
                    "GB_per_s": round(pool.kv_bytes / us / 1e3, 1),
                    "of_ceiling": top and round(top / us, 3),
                }
                rows.append(about | {"who": who} | figures)
        rows += [
            about | {"who": who, "us": None, "why_not": why}
            for (of, who), why in (refused | broken).items()
            if of == cell
        ]
    return rows


def promises(rows: list[dict[str, Any]], backends: list[str], gpu: str) -> list[str]:
    """Return one line for each promise about these rows and each backend that makes the promise."""
    times = {(row["case"], row["who"]): row for row in rows if row["us"]}
    lines = []
    for must in (must for must in MUSTS if must.everywhere or "H200" in gpu):
        for who in (name for name in backends if name.startswith(must.by)):
            row, twin = times.get((str(must.cell), who)), times.get((str(must.twin), who))
            if row and (must.twin is None or twin):
                found = row["us"] / twin["us"] if must.twin and twin else row[must.what]
                if found is not None:
                    lines.append(f"{who}, {must.cell}: {must.verdict(found)}")
    return lines + split_costs(times, backends) + means(times, backends)


def split_costs(times: dict[tuple[str, str], dict[str, Any]], backends: list[str]) -> list[str]:
    """Return one line for each backend measured with a fixed split: its time over that of the free split."""
    case = str(BASE)
    pairs = [(who, times.get((case, who)), times.get((case, f"{who} split"))) for who in backends]
    must = Must(BASE, "ratio", OF_FREE)
    return [
        f"{who}, {case}, split at {FIXED_SPLIT}: {must.verdict(split['us'] / free['us'])}"
        for who, free, split in pairs
        if free and split
    ]


def means(times: dict[tuple[str, str], dict[str, Any]], backends: list[str]) -> list[str]:
    """Return one line for each backend and peer: the geometric mean of peer's time over backend's time.

    The mean is over the cells on which both were measured.
    """
    lines = []
    for who in backends:
        for peer in PEERS:
            ratios = [
                times[case, peer]["us"] / row["us"]
                for (case, name), row in times.items()
                if name == who and (case, peer) in times
            ]
            if ratios:
                lines.append(
                    f"{who}: {statistics.geometric_mean(ratios):.3g} times as fast as {peer} over {len(ratios)} cells"
                )
    return lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the share of the ceiling, a bar for each variant of each cell; without matplotlib, only print a note."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is missing; pip install 'pagedkv[plot]'")
        return
    shown = [row for row in rows if row["us"] and row["who"] != "ceiling" and row["of_ceiling"]]
    figure = Figure(figsize=(9, 0.28 * len(shown) + 1.5), layout="constrained")
    axes = figure.subplots()
    axes.barh([f"{row['case']}: {row['who']}" for row in shown][::-1], [row["of_ceiling"] for row in shown][::-1])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("share of what a read-only kernel reaches in the same run")
    figure.savefig(path)


@dataclass(frozen=True)
class Asked:
    """The options of a run.

    backends: names in the registry.
    quick:    measure only the cells that a promise names.
    peers:    measure the peers, too.
    out:      the files to append rows to; () for the one in bench/results.
    plot:     the file of the picture; None for a picture beside each file of rows.
    as_json:  print all rows as one list at the end, and nothing else on stdout.
    """

    backends: list[str]
    repetitions: int = 20
    quick: bool = False
    peers: bool = True
    out: tuple[Path, ...] = ()
    plot: Path | None = None
    as_json: bool = False


def run(asked: Asked) -> None:
    """Measure group by group; after each group, print, append its rows and draw all rows so far. Print JSON at the end.

    Raises: InvalidRequest if torch finds no GPU.
    """
    require_gpu()
    with contextlib.redirect_stdout(sys.stderr) if asked.as_json else contextlib.nullcontext():
        rows = _measured(asked)
    if asked.as_json:
        print(json.dumps(rows))


def _measured(asked: Asked) -> list[dict[str, Any]]:
    about, every, kept = provenance(), [], asked.out or of_checkout()
    for group in QUICK if asked.quick else GROUPS:
        began = time.monotonic()
        rows = [row | about for row in measure(group, asked.backends, asked.repetitions, peers=asked.peers)]
        every += rows
        for path in kept or (None,):
            record.append(rows, path, "gpu-attention")
        for case in dict.fromkeys(row["case"] for row in rows):
            print(case, *(row_line(row) for row in rows if row["case"] == case), sep="\n")
        print(
            *promises(rows, asked.backends, about["gpu"]), f"({time.monotonic() - began:.0f} s)", sep="\n", flush=True
        )
        for picture in [asked.plot] if asked.plot else [path.with_suffix(".svg") for path in kept]:
            draw(every, picture)
    print("", *promises(every, asked.backends, about["gpu"]), sep="\n", flush=True)
    print(*screen_lines(every, asked.backends), sep="\n", flush=True)
    return every


def of_checkout() -> tuple[Path, ...]:
    """Return the file of rows in bench/results; () in an installed package."""
    folder = record.results()
    return (folder / "gpu-attention.jsonl",) if folder else ()


def row_line(row: dict[str, Any]) -> str:
    """Return the line to print for a row."""
    if not row["us"]:
        return f"  {row['who']:12} –: {row.get('why_not')}"
    share, found = row["of_ceiling"] or 0, table.predicted(Cell(**row["cell"]), row["who"])
    beside = f", predicted {found.us:.1f} us, {found.of_ceiling:.3f}, {found.limit}" if found else ""
    return f"  {row['who']:12} {row['us']:9.1f} us {row['GB_per_s']:8.0f} GB/s {share:6.3f} of the ceiling{beside}"


def screen_lines(rows: list[dict[str, Any]], backends: list[str]) -> list[str]:
    """Return a line for each cell: the share of the ceiling of each backend, and beside it the predicted one."""
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        words = []
        for row in (row for row in rows if row["case"] == case and row["who"] in backends):
            found = table.predicted(Cell(**row["cell"]), row["who"]) if row["us"] else None
            beside = f" ({found.us:.0f} us, {found.of_ceiling:.2f}: {found.limit})" if found else ""
            words.append(f"{row['who']} {row['us']:.1f} us, {row['of_ceiling'] or 0:.2f}{beside}" if row["us"] else "")
        short = case.removeprefix("decode ").removesuffix(" 1 thr").replace("bfloat16", "").replace(" 32/8/128", "")
        lines.append(f"= {short.rstrip()}: {'; '.join(filter(None, words)) or 'nothing ran'}")
    return lines


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="pagedkv.bench.gpu.attention", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few cells")
    parser.add_argument("--no-peers", action="store_true", help="our kernels and the ceiling alone")
    parser.add_argument("--backends", nargs="+", default=["triton", "cuda"], help="names in the registry")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--out", type=Path, help="a folder for rows and plot, beside bench/results")
    given = parser.parse_args(argv)
    out = (given.out / "gpu-attention.jsonl", *of_checkout()) if given.out else ()
    run(Asked(given.backends, given.repetitions, given.quick, not given.no_peers, out))


if __name__ == "__main__":
    main()
