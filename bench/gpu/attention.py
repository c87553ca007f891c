"""The kernels on a GPU against the speed of its memory: `python -m pagedkv.bench.gpu.attention`.

Time is a CUDA graph's: one graph of `calls` calls, each with its own page tables into a pool much larger than the second cache. A graph is
replayed twice in a row and the second replay timed with events, so that its launch hides behind the first; the median of such times,
divided by `calls`. Variants and cells of one group take turns. Frames are in random order. Bytes are those of keys and values, nothing
else. The **ceiling** is a kernel that reads as many bytes and does nothing with them, in the same turns. Peers (gpu_peers.py) are measured
where they can be imported, and otherwise reported with the reason. Rows go to FOLDER/gpu-attention.jsonl and, from a checkout, to
bench/results, group by group; a plot of the run lies beside them. This file knows the public call; cells.py knows what a cell is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from pagedkv import paged_attention
from pagedkv.bench import record
from pagedkv.bench.attention.cells import Cell
from pagedkv.bench.gpu.peers import PEERS
from pagedkv.bench.gpu.pool import GpuPool, Step
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import quant

Name = TypeVar("Name", bound=Hashable)

BASE: Final = Cell(batch=32, context=4096, device="cuda")
LONG: Final = replace(BASE, batch=8, context=32768)
MIDDLE: Final = replace(BASE, batch=8)
ONE_LONG: Final = replace(BASE, batch=1, context=32768)
ONE: Final = replace(BASE, batch=1, context=1024)
LARGE_PAGES: Final = replace(BASE, block_size=128)
RAGGED: Final = replace(BASE, lengths="zipf")
FP8: Final = replace(BASE, kv="fp8_e4m3")
DRAFTS: Final = replace(BASE, new=8)
ONE_4K: Final = replace(BASE, batch=1)

QUICK: Final = ((BASE, LARGE_PAGES, RAGGED, FP8, DRAFTS), *((cell,) for cell in (MIDDLE, ONE, LONG, ONE_LONG, ONE_4K)))
GROUPS: Final = (
    (BASE, LARGE_PAGES, RAGGED, FP8, DRAFTS, replace(BASE, kv="int8"), replace(BASE, kv="int4")),
    *((cell,) for cell in (LONG, MIDDLE, ONE_LONG, ONE, ONE_4K)),
    *(
        (cell,)
        for cell in (
            replace(BASE, head_dim=64),
            replace(BASE, heads=28, kv_heads=4),
            replace(BASE, kv_heads=32, batch=8),
        )
    ),
    (replace(BASE, batch=128, context=1024),),
)
"""Cells of a group are measured in turn: their ratios are of one moment. QUICK: those that a promise is about."""


@dataclass(frozen=True)
class Must:
    """A promise: `what` of `cell` ("us", "of_ceiling", or "ratio", its time over that of `twin`) is at least, or at most, `limit`.

    everywhere: it is no promise of an H200 alone.
    by:         the backends that make it, as their names begin; all where it is empty.
    """

    cell: Cell
    what: str
    limit: float
    twin: Cell | None = None
    everywhere: bool = False
    by: str = ""

    def told(self, found: float) -> str:
        """Whether it holds, in a line."""
        holds = found >= self.limit if self.what == "of_ceiling" else found <= self.limit
        beside = f" to {self.twin}" if self.twin else ""
        return (
            f"{self.what}{beside} {found:.3g}, must be {'>=' if self.what == 'of_ceiling' else '<='} {self.limit:.3g}: "
            + ("holds" if holds else "MISSED")
        )


MUSTS: Final = (
    Must(BASE, "of_ceiling", 0.85),
    Must(LONG, "of_ceiling", 0.85),
    Must(MIDDLE, "us", 44),
    Must(ONE_LONG, "us", 44),
    Must(ONE, "us", 10),
    Must(BASE, "ratio", 1.08, LARGE_PAGES, everywhere=True),
    Must(RAGGED, "ratio", 1.10, BASE, everywhere=True),
    Must(FP8, "ratio", 1 / 1.5, BASE, everywhere=True),
    Must(BASE, "of_ceiling", 0.90, by="cuda"),
    Must(LONG, "of_ceiling", 0.90, by="cuda"),
    Must(MIDDLE, "us", 41, by="cuda"),
    Must(ONE_LONG, "us", 41, by="cuda"),
    Must(ONE, "us", 8, by="cuda"),
    Must(ONE_4K, "us", 11, by="cuda"),
    Must(BASE, "ratio", 1.05, LARGE_PAGES, everywhere=True, by="cuda"),
    Must(RAGGED, "ratio", 1.05, BASE, everywhere=True, by="cuda"),
    Must(FP8, "ratio", 1 / 1.6, BASE, everywhere=True, by="cuda"),
    Must(DRAFTS, "ratio", 1.15, BASE, everywhere=True, by="cuda"),
)
FIXED_SPLIT, OF_FREE = 512, 1.05
"""Keys of a chunk of the batch-invariant variant, ` split` after the backend's name; its time over the free split's is at most so much."""


def ours(backend: str, pool: GpuPool, **options: Any) -> list[Step]:
    cell = pool.cell
    q = torch.randn(cell.batch * cell.new, cell.heads, cell.head_dim, device=pool.device).to(quant.DTYPES[cell.dtype])
    return [
        lambda batch=batch: paged_attention(q, pool.layer, batch, backend=backend, **options)
        for batch in pool.batches()
    ]


def ceiling(pool: GpuPool) -> list[Step]:
    from pagedkv.bench.gpu.ceiling import read

    whole = pool.bytes[: len(pool.bytes) // 16 * 16].view(torch.int64)
    words, room = pool.kv_bytes // 8, len(whole)
    starts = [i * words % max(1, room - words) // 16 * 16 for i in range(pool.calls)]
    return [lambda at=at: read(whole[at : at + words]) for at in starts]


def graph_of(steps: list[Step]) -> torch.cuda.CUDAGraph:
    """All steps in one graph, after one warm run of each."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in steps:
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    return graph


def in_turn(variants: dict[Name, list[Step]], repetitions: int) -> tuple[dict[Name, float], dict[Name, str]]:
    """Median microseconds of a call of each variant, replays taking turns; and why a variant has none."""
    graphs: dict[Name, torch.cuda.CUDAGraph] = {}
    refused: dict[Name, str] = {}
    for name, steps in variants.items():
        try:
            graphs[name] = graph_of(steps)
        except Exception as why:
            refused[name] = _said(why)
    times: dict[Name, list[float]] = {name: [] for name in graphs}
    for turn in range(repetitions + 2):
        for name, graph in graphs.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()  # the device is busy while the host launches the one that counts
            began.record()
            graph.replay()
            ended.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times[name].append(began.elapsed_time(ended) * 1e3 / len(variants[name]))
    return {name: statistics.median(some) for name, some in times.items()}, refused


def _said(why: Exception) -> str:
    """The first line of an error, and the first of what a compiler said of it."""
    told = [f"{type(why).__name__}: {why}", *getattr(why, "__notes__", ())]
    return "; ".join(text.strip().splitlines()[0][:300] for text in told if text.strip())


def variants_of(
    cell: Cell, backends: list[str], *, peers: bool
) -> tuple[GpuPool | None, dict[str, list[Step]], dict[str, str]]:
    """The pool of a cell, who is measured on it, and why others are not."""
    found: dict[str, list[Step]] = {}
    refused: dict[str, str] = {}
    try:
        pool = GpuPool(cell)
    except torch.OutOfMemoryError as why:
        return None, {}, {"pool": _said(why)}
    makers: dict[str, Callable[[GpuPool], list[Step]]] = {"ceiling": ceiling}
    makers |= {name: lambda pool, name=name: ours(name, pool) for name in backends}  # type: ignore[misc]
    if cell == BASE:
        makers |= {
            f"{name} split": lambda pool, name=name: ours(name, pool, split_tokens=FIXED_SPLIT) for name in backends
        }  # type: ignore[misc]
    for name, make in (makers | (PEERS if peers and cell.new == 1 else {})).items():
        try:
            found[name] = make(pool)
        except Exception as why:  # of code that is not ours, and of memory that is too small for it
            refused[name] = _said(why)
    return pool, found, refused


def measure(
    cells: tuple[Cell, ...], backends: list[str], repetitions: int, *, peers: bool = True
) -> list[dict[str, Any]]:
    """A row for each variant of each of the cells, all in turn."""
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
    """What became of the promises about these rows: a line for each and each backend."""
    times = {(row["case"], row["who"]): row for row in rows if row["us"]}
    lines = []
    for must in (must for must in MUSTS if must.everywhere or "H200" in gpu):
        for who in (name for name in backends if name.startswith(must.by)):
            row, twin = times.get((str(must.cell), who)), times.get((str(must.twin), who))
            if row and (must.twin is None or twin):
                found = row["us"] / twin["us"] if must.twin and twin else row[must.what]
                if found is not None:
                    lines.append(f"{who}, {must.cell}: {must.told(found)}")
    return lines + invariants(times, backends) + means(times, backends)


def invariants(times: dict[tuple[str, str], dict[str, Any]], backends: list[str]) -> list[str]:
    """What a fixed split costs, a line for each backend that was measured with one."""
    case = str(BASE)
    pairs = [(who, times.get((case, who)), times.get((case, f"{who} split"))) for who in backends]
    must = Must(BASE, "ratio", OF_FREE)
    return [
        f"{who}, {case}, split at {FIXED_SPLIT}: {must.told(split['us'] / free['us'])}"
        for who, free, split in pairs
        if free and split
    ]


def means(times: dict[tuple[str, str], dict[str, Any]], backends: list[str]) -> list[str]:
    """How often as fast as each peer a backend is: the geometric mean over the cells where both were measured."""
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


def provenance() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    about = {
        "gpu": properties.name,
        "processors": properties.multi_processor_count,
        "cuda": torch.version.cuda or torch.version.hip,
    }
    return record.provenance() | about


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Share of the ceiling, a bar for each variant of each cell; nothing but a word where matplotlib is missing."""
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
    """backends: names in the registry.   quick: the cells of promises.   peers: measure them, too.
    out: files that rows are appended to; none: that of bench/results.   plot: where to draw; None: beside the rows."""

    backends: list[str]
    repetitions: int = 20
    quick: bool = False
    peers: bool = True
    out: tuple[Path, ...] = ()
    plot: Path | None = None


def require_gpu() -> None:
    """Raises: InvalidRequest if torch finds none."""
    if not torch.cuda.is_available():
        raise InvalidRequest("torch finds no GPU on this machine: leave out --device cuda, or run where there is one")


def run(asked: Asked) -> None:
    """Measure, print, append rows and draw what there is so far, group by group. Raises: InvalidRequest."""
    require_gpu()
    about, every, kept = provenance(), [], asked.out or of_checkout()
    for group in QUICK if asked.quick else GROUPS:
        began = time.monotonic()
        rows = [row | about for row in measure(group, asked.backends, asked.repetitions, peers=asked.peers)]
        every += rows
        for path in kept or (None,):
            record.append(rows, path)
        for case in dict.fromkeys(row["case"] for row in rows):
            print(case, *(told(row) for row in rows if row["case"] == case), sep="\n")
        print(
            *promises(rows, asked.backends, about["gpu"]), f"({time.monotonic() - began:.0f} s)", sep="\n", flush=True
        )
        for picture in [asked.plot] if asked.plot else [path.with_suffix(".svg") for path in kept]:
            draw(every, picture)
    print("", *promises(every, asked.backends, about["gpu"]), sep="\n", flush=True)


def of_checkout() -> tuple[Path, ...]:
    """The file of rows in bench/results; none where this is no checkout."""
    folder = record.results()
    return (folder / "gpu-attention.jsonl",) if folder else ()


def told(row: dict[str, Any]) -> str:
    """A line of print."""
    if not row["us"]:
        return f"  {row['who']:12} –: {row.get('why_not')}"
    return f"  {row['who']:12} {row['us']:9.1f} us {row['GB_per_s']:8.0f} GB/s {row['of_ceiling'] or 0:6.3f} of the ceiling"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="pagedkv.bench.gpu.attention", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few cells")
    parser.add_argument("--no-peers", action="store_true", help="our kernels and the ceiling alone")
    parser.add_argument(
        "--backends", nargs="+", default=["triton", "cuda", "cuda-bulk", "cuda-pieces"], help="names in the registry"
    )
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--out", type=Path, help="a folder for rows and plot, beside bench/results")
    given = parser.parse_args(argv)
    out = (given.out / "gpu-attention.jsonl", *of_checkout()) if given.out else ()
    run(Asked(given.backends, given.repetitions, given.quick, not given.no_peers, out))


if __name__ == "__main__":
    main()
