"""The kernels on a GPU beside the speed of its memory: `python -m pagedkv.bench.gpu.attention`.

Time      One CUDA graph holds `calls` calls, each with its own page tables into a pool much larger than the L2 cache.
          The graph is replayed twice in a row, and events time the second replay, so that its launch hides behind the
          first. The figure is the median of these times, divided by `calls`.
Turns     The variants and cells of one group take turns. Frames are in random order.
Bytes     Keys and values, and their scales.
Ceiling   A kernel that reads as many bytes and does nothing else, in the same turns.
Peers     In peers.py, which measures them by this file.
Rows      Appended to FOLDER/gpu-attention.jsonl, or in a checkout to bench/results, after each group.

This file knows the public call; cells.py defines a cell.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from pagedkv import paged_attention
from pagedkv.bench import record
from pagedkv.bench.attention.cells import Cell
from pagedkv.bench.gpu.pool import GpuPool
from pagedkv.bench.gpu.timing import Rows, Step, error_line, in_turn, provenance, require_gpu

BASE: Final = Cell(batch=32, context=4096, device="cuda")
LONG: Final = replace(BASE, batch=8, context=32768)
MIDDLE: Final = replace(BASE, batch=8)
ONE_LONG: Final = replace(BASE, batch=1, context=32768)
ONE: Final = replace(BASE, batch=1, context=1024)
LARGE_PAGES: Final = replace(BASE, block_size=128)
RAGGED: Final = replace(BASE, lengths="zipf")
FP8: Final = replace(BASE, kv="fp8_e4m3")
INT8: Final = replace(BASE, kv="int8")
K8V4: Final = replace(BASE, kv="k8v4")
K5V4: Final = replace(BASE, kv="k5v4")
DRAFTS: Final = replace(BASE, new=8)
ONE_4K: Final = replace(BASE, batch=1)
PROMPT: Final = replace(BASE, kind="prefill", batch=1, new=8192, context=8192)
CHUNK: Final = replace(PROMPT, new=2048, context=32768)
"""Measured by prefill.py: a whole prompt, and a chunk behind a long prefix."""

Groups = tuple[tuple[Cell, ...], ...]
QUICK: Final[Groups] = (
    (BASE, LARGE_PAGES, RAGGED, FP8, INT8, K8V4, K5V4, DRAFTS),
    *((cell,) for cell in (MIDDLE, ONE, LONG, ONE_LONG, ONE_4K)),
)
GROUPS: Final[Groups] = (
    (BASE, LARGE_PAGES, RAGGED, FP8, INT8, K8V4, K5V4, DRAFTS),
    *((cell,) for cell in (LONG, MIDDLE, ONE, replace(BASE, head_dim=64), replace(BASE, heads=28, kv_heads=4))),
    *((cell,) for cell in (replace(BASE, kv_heads=32, batch=8), replace(BASE, batch=128, context=1024))),
    *(
        tuple(replace(BASE, batch=batch, context=context, kv=kv) for kv in ("", "fp8_e4m3", "int8", "k8v4", "k5v4"))
        for batch, context in ((1, 4096), (1, 32768), (8, 8192))
    ),
)
"""Groups of cells. The cells of a group take turns, so that a ratio compares times of the same moment.

QUICK: only the cells that a promise names.
"""


@dataclass(frozen=True)
class Must:
    """A promise about the figure `what` of a cell.

    what:       "us", microseconds; "of_ceiling", the share of the ceiling; "TFLOP_per_s", of a prefill; "ratio", the
                cell's time over `twin`'s time.
    limit:      a share of the ceiling and a rate must not be smaller; microseconds and a ratio must not be larger.
    on:         the GPU that the promise is about, as a word of its name; "" for every GPU.
    by:         the backends whose names begin with this text make the promise; "" for all.
    variant:    the text after the backend's name in the cell's row; the twin has none.
    """

    cell: Cell
    what: str
    limit: float
    twin: Cell | None = None
    on: str = "H200"
    by: str = ""
    variant: str = ""

    def verdict(self, found: float) -> str:
        """Return one line: the figure found, the limit, and whether the promise holds."""
        is_least = self.what in ("of_ceiling", "TFLOP_per_s")
        holds = found >= self.limit if is_least else found <= self.limit
        beside = f" to {self.twin}" if self.twin else ""
        figure = f"{self.what}{beside} {found:.3g}, must be {'>=' if is_least else '<='} {self.limit:.3g}"
        return f"{figure}: {'holds' if holds else 'MISSED'}"


SPLIT, FIXED_SPLIT = " split", 512
"""The variant that no other sequence changes by a bit, and the tokens at whose multiples it cuts keys."""

MUSTS: Final = (
    Must(BASE, "of_ceiling", 0.85),
    Must(LONG, "of_ceiling", 0.85),
    Must(MIDDLE, "us", 44),
    Must(ONE_LONG, "us", 44),
    Must(ONE, "us", 10),
    Must(BASE, "ratio", 1.08, LARGE_PAGES, on=""),
    Must(RAGGED, "ratio", 1.10, BASE, on=""),
    *(Must(cell, "ratio", 1 / 1.5, BASE, on="") for cell in (FP8, INT8)),
    *(Must(cell, "TFLOP_per_s", 400, by="triton") for cell in (PROMPT, CHUNK)),
    Must(PROMPT, "TFLOP_per_s", 550, by="library"),
    Must(BASE, "of_ceiling", 0.90, by="cuda"),
    Must(LONG, "of_ceiling", 0.90, by="cuda"),
    *(Must(cell, "of_ceiling", share, by="cuda") for cell, share in ((FP8, 0.83), (INT8, 0.78))),
    *(Must(cell, "of_ceiling", 0.95, on="H100", by="cuda") for cell in (BASE, LONG)),
    Must(MIDDLE, "us", 41, by="cuda"),
    Must(ONE_LONG, "us", 41, by="cuda"),
    Must(ONE, "us", 7.6, by="cuda"),
    Must(ONE_4K, "us", 11, by="cuda"),
    Must(BASE, "ratio", 1.05, LARGE_PAGES, on="", by="cuda"),
    Must(RAGGED, "ratio", 1.05, BASE, on="", by="cuda"),
    *(Must(cell, "ratio", 1 / 1.6, BASE, on="", by="cuda") for cell in (FP8, INT8, K8V4, K5V4)),
    Must(DRAFTS, "ratio", 1.15, BASE, on="", by="cuda"),
    Must(BASE, "ratio", 1.05, BASE, on="", variant=SPLIT),
)


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


Makers = Mapping[str, Callable[[GpuPool], list[Step]]]
"""For each variant a function that returns its steps over a pool."""


def makers_of(cell: Cell, backends: list[str], others: Makers) -> Makers:
    """Return the makers of our variants of a cell and of others."""
    found = dict(others)
    for name in backends:
        found[name] = partial(ours, name)
        if cell == BASE:
            found[name + SPLIT] = partial(ours, name, split_tokens=FIXED_SPLIT)
    return found


def measure(cells: tuple[Cell, ...], backends: list[str], repetitions: int, others: Makers) -> Rows:
    """Return a row for each variant of each cell; all of them take turns. others: makers of variants beside ours."""
    pools: dict[Cell, GpuPool] = {}
    variants: dict[tuple[Cell, str], list[Step]] = {}
    refused: dict[tuple[Cell, str], str] = {}
    for cell in cells:
        pools[cell] = GpuPool(cell)
        for who, make in makers_of(cell, backends, others).items():
            try:
                variants[cell, who] = make(pools[cell])
            except Exception as why:  # a peer's own error, or too little memory for a variant
                refused[cell, who] = error_line(why)
    medians, broken = in_turn(variants, repetitions)
    rows: Rows = []
    for cell, pool in pools.items():
        about = {"case": str(cell), "cell": asdict(cell)}
        about |= {"kv_bytes": pool.kv_bytes, "calls": pool.calls}
        top = medians.get((cell, "ceiling"))
        for (of, who), us in medians.items():
            if of == cell:
                figures = {"us": round(us, 2), "GB_per_s": round(pool.kv_bytes / us / 1e3, 1)}
                rows.append(about | {"who": who} | figures | {"of_ceiling": top and round(top / us, 3)})
        whys = {who: why for (of, who), why in (refused | broken).items() if of == cell}
        rows += [about | {"who": who, "us": None, "why_not": why} for who, why in whys.items()]
    return rows


def promises(rows: Rows, backends: list[str], gpu: str) -> list[str]:
    """Return one line for each promise about these rows and this GPU, and each backend that makes the promise."""
    times = {(row["case"], row["who"]): row for row in rows if row["us"]}
    lines = []
    for must in (must for must in MUSTS if must.on in ("", *gpu.split())):
        for who in (name for name in backends if name.startswith(must.by)):
            row, twin = times.get((str(must.cell), who + must.variant)), times.get((str(must.twin), who))
            if row and (must.twin is None or twin):
                found = row["us"] / twin["us"] if must.twin and twin else row[must.what]
                if found is not None:
                    lines.append(f"{who}{must.variant}, {must.cell}: {must.verdict(found)}")
    return lines


def run(groups: Groups, backends: list[str], repetitions: int, *, others: Makers, out: Path | None = None) -> Rows:
    """Measure group by group; print and append the rows of each group, and return all.

    others: makers of variants next to ours and the ceiling.
    out:    the file to append rows to; None for the one in bench/results of a checkout.
    Raises: InvalidRequest if torch finds no GPU.
    """
    require_gpu()
    about, every = provenance(), []
    for group in groups:
        rows = [row | about for row in measure(group, backends, repetitions, {"ceiling": ceiling} | others)]
        every += rows
        record.append(rows, out, "gpu-attention")
        for case in dict.fromkeys(row["case"] for row in rows):
            print(*lines_of([row for row in rows if row["case"] == case]), sep="\n", flush=True)
    print(*(f"= {line}" for line in promises(every, backends, about["gpu"])), sep="\n", flush=True)
    return every


def lines_of(rows: Rows) -> list[str]:
    """Return the lines to print for a cell: microseconds and the share of the ceiling of each variant, then reasons."""
    short = rows[0]["case"].removesuffix(" 1 thr").replace("bfloat16", "").replace(" 32/8/128", "")
    words = [f"{row['who']} {row['us']:.1f} us, {row['of_ceiling'] or 0:.2f}" for row in rows if row["us"]]
    whys = [f"  {row['who']}: {row['why_not']}" for row in rows if not row["us"]]
    return [f"= {short.rstrip()}: {'; '.join(words) or 'nothing ran'}", *whys]


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="pagedkv.bench.gpu.attention", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the cells that a promise names")
    parser.add_argument("--backends", nargs="+", default=["triton", "cuda"], help="names in the registry")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--out", type=Path, help="a folder for rows, in place of bench/results")
    given = parser.parse_args(argv)
    out = given.out / "gpu-attention.jsonl" if given.out else None
    run(QUICK if given.quick else GROUPS, given.backends, given.repetitions, others={}, out=out)


if __name__ == "__main__":
    main()
