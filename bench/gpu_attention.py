"""The kernels on a GPU against the speed of its memory: `python -m pagedkv.bench.gpu_attention`.

Time is a CUDA graph's: one graph of `calls` calls, each with its own page tables into a pool much larger than the second cache, replayed
and timed with events; the median of replays, divided by `calls`. Variants take turns, replay by replay. Frames are in random order. Bytes
are those of keys and values, nothing else. The **ceiling** is a kernel that reads as many bytes and does nothing with them, in the same
turns. Peers are measured where they can be imported, and otherwise reported with the reason: torch SDPA on contiguous keys, FlashAttention,
FlashInfer. Rows go to FOLDER/gpu-attention.jsonl and, from a checkout, to bench/results; a plot beside them where matplotlib is. This file
knows the public call; cells.py knows what a cell is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from pagedkv import KVLayer, PagedBatch, paged_attention
from pagedkv.bench import record
from pagedkv.bench.cells import Cell
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import quant

BASE: Final = Cell(batch=32, context=4096, device="cuda")
ROTATED_BYTES: Final = 512 << 20
"""What the calls of one graph read together, at least: several times the second cache of any GPU."""

CELLS: Final = (
    BASE,
    replace(BASE, batch=8, context=32768),
    replace(BASE, batch=8),
    replace(BASE, batch=1, context=32768),
    replace(BASE, batch=1, context=1024),
    replace(BASE, batch=1, context=4096),
    replace(BASE, block_size=128),
    replace(BASE, lengths="zipf"),
    replace(BASE, kv="fp8_e4m3"),
    replace(BASE, kv="int8"),
    replace(BASE, kv="int4"),
    replace(BASE, head_dim=64),
    replace(BASE, heads=28, kv_heads=4),
    replace(BASE, heads=32, kv_heads=32, batch=8),
    replace(BASE, batch=128, context=1024),
)
QUICK: Final = (CELLS[0], CELLS[2], CELLS[4])


@dataclass(frozen=True)
class Must:
    """A promise of an H200: `what` of `cell` is at least, or at most, `limit`."""

    cell: Cell
    what: str
    limit: float

    def holds(self, row: dict[str, Any]) -> bool:
        value: float = row[self.what]
        return value >= self.limit if self.what == "of_ceiling" else value <= self.limit


MUSTS: Final = (
    Must(CELLS[0], "of_ceiling", 0.85),
    Must(CELLS[1], "of_ceiling", 0.85),
    Must(CELLS[2], "us", 44),
    Must(CELLS[3], "us", 44),
    Must(CELLS[4], "us", 10),
)


class GpuPool:
    """One layer of a pool as pagedkv.cache lays it out, and steps that read it: other frames each time, in random order."""

    def __init__(self, cell: Cell, device: str = "cuda") -> None:
        spec, self.cell, self.device = cell.spec(), cell, device
        self.pages = [-(-n // cell.block_size) for n in cell.lens()]
        self.frame_bytes = spec.frame_bytes
        self.kv_bytes = sum(self.pages) * spec.frame_bytes
        self.calls = max(4, min(128, -(-ROTATED_BYTES // self.kv_bytes)))
        self.num_frames = max(sum(self.pages) * min(self.calls, 4), -(-2 * ROTATED_BYTES // spec.frame_bytes))
        self.bytes = torch.randint(0, 56, (self.num_frames * spec.frame_bytes,), dtype=torch.uint8, device=device)  # finite in any dtype
        self.layer = KVLayer(**{name: self._view(name, offset) for name, (offset, _) in spec.regions().items()})

    def _view(self, name: str, offset: int) -> torch.Tensor:
        spec, is_scale = self.cell.spec(), name.endswith("_scale")
        dtype = torch.float32 if is_scale else quant.DTYPES[spec.stored_dtype]
        dim = 1 if is_scale else spec.head_dim // (2 if spec.stored_dtype == "int4" else 1)
        shape = (self.num_frames, spec.block_size, spec.num_kv_heads, dim)
        strides = (self.frame_bytes // dtype.itemsize, dim, spec.block_size * dim, 1)
        view = self.bytes.view(dtype).as_strided(shape, strides, offset // dtype.itemsize)
        if is_scale:
            view.fill_(0.01)
        return view[..., 0] if is_scale else view

    def batch(self) -> PagedBatch:
        """A decode step over frames drawn at random."""
        B, table = self.cell.batch, torch.full((self.cell.batch, max(self.pages)), -1, dtype=torch.int32)
        frames = iter(torch.randperm(self.num_frames)[: sum(self.pages)].int().split(self.pages))
        for row, (count, drawn) in enumerate(zip(self.pages, frames, strict=True)):
            table[row, :count] = drawn
        none = torch.zeros(B, dtype=torch.int64, device=self.device)
        lens = torch.tensor(self.cell.lens(), dtype=torch.int32, device=self.device)
        starts = torch.arange(B + 1, dtype=torch.int32, device=self.device)
        return PagedBatch(table.to(self.device), lens, starts, none, none, max_seqlen_q=1, max_seqlen_k=max(self.cell.lens()))


Step = Callable[[], object]
"""Launches one call; a graph holds several, each made for its own tables."""


def ours(backend: str, pool: GpuPool, **options: Any) -> list[Step]:
    cell = pool.cell
    q = torch.randn(cell.batch, cell.heads, cell.head_dim, device=pool.device).to(quant.DTYPES[cell.dtype])
    batches = [pool.batch() for _ in range(pool.calls)]
    return [lambda batch=batch: paged_attention(q, pool.layer, batch, backend=backend, **options) for batch in batches]


def ceiling(pool: GpuPool) -> list[Step]:
    from pagedkv.bench.gpu_ceiling import read

    whole = pool.bytes[: len(pool.bytes) // 16 * 16].view(torch.int64)
    words, room = pool.kv_bytes // 8, len(whole)
    starts = [i * words % max(1, room - words) // 16 * 16 for i in range(pool.calls)]
    return [lambda at=at: read(whole[at : at + words]) for at in starts]


def sdpa(pool: GpuPool) -> list[Step]:
    cell = pool.cell
    if cell.kv or cell.lengths != "uniform":
        raise ValueError("it has neither quantised keys nor ragged batches")
    dtype = quant.DTYPES[cell.dtype]
    q = torch.randn(cell.batch, cell.heads, 1, cell.head_dim, device="cuda", dtype=dtype)
    size = (min(pool.calls, 8), 2, cell.batch, cell.kv_heads, cell.context, cell.head_dim)
    kv = torch.randn(size, device="cuda", dtype=dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    return [lambda i=i: attend(q, kv[i % len(kv), 0], kv[i % len(kv), 1], enable_gqa=True) for i in range(pool.calls)]


def flash_attention(pool: GpuPool) -> list[Step]:
    from flash_attn import flash_attn_with_kvcache

    cell = pool.cell
    if cell.kv or cell.block_size % 256:
        raise ValueError("FlashAttention 2 takes pages of 256 tokens and keys of q's dtype")
    q = torch.randn(cell.batch, 1, cell.heads, cell.head_dim, device="cuda", dtype=quant.DTYPES[cell.dtype])
    k, v = (x.contiguous() for x in (pool.layer.k, pool.layer.v))
    batches = [pool.batch() for _ in range(pool.calls)]
    return [
        lambda b=b: flash_attn_with_kvcache(q, k, v, cache_seqlens=b.seq_lens, block_table=b.block_table.clamp(0), causal=True)
        for b in batches
    ]


def flashinfer(pool: GpuPool) -> list[Step]:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    cell, dtype = pool.cell, quant.DTYPES[pool.cell.dtype]
    if cell.kv:
        raise ValueError("not with scales per token and head")
    q = torch.randn(cell.batch, cell.heads, cell.head_dim, device="cuda", dtype=dtype)
    kv = torch.stack([pool.layer.k.transpose(1, 2), pool.layer.v.transpose(1, 2)], 1)  # HND
    counts = torch.tensor([0, *pool.pages], dtype=torch.int32).cumsum(0).int()
    last = torch.tensor([(n - 1) % cell.block_size + 1 for n in cell.lens()], dtype=torch.int32)
    steps: list[Step] = []
    for _ in range(min(pool.calls, 8)):  # each has a workspace and a plan of its own
        table = pool.batch().block_table
        indices = torch.cat([table[b, :count] for b, count in enumerate(pool.pages)])
        wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "HND")
        wrapper.plan(counts, indices, last, cell.heads, cell.kv_heads, cell.head_dim, cell.block_size, q_data_type=dtype)
        steps.append(lambda wrapper=wrapper: wrapper.run(q, kv))
    return steps


PEERS: Final = {"sdpa": sdpa, "flash-attn": flash_attention, "flashinfer": flashinfer}


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


def in_turn(variants: dict[str, list[Step]], repetitions: int) -> tuple[dict[str, float], dict[str, str]]:
    """Median microseconds of a call of each variant, replays taking turns; and why a variant has none."""
    graphs, refused = {}, {}
    for name, steps in variants.items():
        try:
            graphs[name] = graph_of(steps)
        except Exception as why:
            refused[name] = f"{type(why).__name__}: {why}".splitlines()[0]
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(repetitions + 2):
        for name, graph in graphs.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times[name].append(began.elapsed_time(ended) * 1e3 / len(variants[name]))
    return {name: statistics.median(some) for name, some in times.items()}, refused


def measure(cell: Cell, backends: list[str], repetitions: int, peers: bool = True) -> list[dict[str, Any]]:
    """A row for each variant of `cell`."""
    pool, refused = GpuPool(cell), {}
    variants: dict[str, list[Step]] = {"ceiling": ceiling(pool)} | {name: ours(name, pool) for name in backends}
    for name, make in PEERS.items() if peers else ():
        try:
            variants[name] = make(pool)
        except Exception as why:
            refused[name] = f"{type(why).__name__}: {why}".splitlines()[0]
    medians, broken = in_turn(variants, repetitions)
    top = medians.get("ceiling")
    rows = [
        {"who": who, "us": round(us, 2), "GB_per_s": round(pool.kv_bytes / us / 1e3, 1), "of_ceiling": round(top / us, 3) if top else None}
        for who, us in medians.items()
    ]
    rows += [{"who": who, "us": None, "why_not": why} for who, why in (refused | broken).items()]
    return [{"case": str(cell), "cell": asdict(cell), "kv_bytes": pool.kv_bytes, "calls": pool.calls} | row for row in rows]


def provenance() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    about = {"gpu": properties.name, "processors": properties.multi_processor_count, "cuda": torch.version.cuda or torch.version.hip}
    return record.provenance() | about


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Share of the ceiling, a bar for each variant of each cell; nothing where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    shown = [row for row in rows if row["us"] and row["who"] != "ceiling" and row["of_ceiling"]]
    figure = Figure(figsize=(9, 0.28 * len(shown) + 1.5), layout="constrained")
    axes = figure.subplots()
    axes.barh([f"{row['case']}: {row['who']}" for row in shown][::-1], [row["of_ceiling"] for row in shown][::-1])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("share of what a read-only kernel reaches in the same run")
    figure.savefig(path)


def run(backends: list[str], repetitions: int, *, quick: bool, out: Path | None) -> None:
    """Measure, print, and append rows to the file `out` (and bench/results of a checkout); a plot beside it. Raises: InvalidRequest."""
    if not torch.cuda.is_available():
        raise InvalidRequest("torch finds no GPU on this machine: leave out --device cuda, or run where there is one")
    about, every = provenance(), []
    for cell in QUICK if quick else CELLS:
        began = time.monotonic()
        rows = [row | about for row in measure(cell, backends, repetitions, peers=not quick)]
        every += rows
        print(f"{cell}  ({time.monotonic() - began:.0f} s)", flush=True)
        for row in rows:
            musts = [must for must in MUSTS if must.cell == cell and row["who"] in backends and row["us"]]
            print(told(row, musts), flush=True)
        home = record.results()
        for path in filter(None, (out, home and home / "gpu-attention.jsonl")):
            record.append(rows, path)
    if out:
        draw(every, out.with_suffix(".svg"))


def told(row: dict[str, Any], musts: list[Must]) -> str:
    """A line of print."""
    if not row["us"]:
        return f"  {row['who']:12} –: {row.get('why_not')}"
    figures = f"{row['us']:9.1f} us {row['GB_per_s']:8.0f} GB/s {row['of_ceiling'] or 0:6.3f} of the ceiling"
    return f"  {row['who']:12} {figures}" + "".join(f"   {m.what} {m.limit}: {'holds' if m.holds(row) else 'MISSED'}" for m in musts)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="pagedkv.bench.gpu_attention", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three cells, no peers")
    parser.add_argument("--backends", nargs="+", default=["triton", "cuda"], help="names in the registry")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--out", type=Path, help="a folder for rows and plot")
    given = parser.parse_args(argv)
    run(given.backends, given.repetitions, quick=given.quick, out=given.out and given.out / "gpu-attention.jsonl")


if __name__ == "__main__":
    main()
