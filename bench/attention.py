"""Paged decode on the CPU against the speed of memory: `python -m bench.attention`, or `main([...])`.

One run interleaves, repetition by repetition: each kernel, torch SDPA on contiguous KV (grouped), and the **ceiling**: as many frames,
in random order, read by a load-and-xor loop with as many threads. KV is cold: a pool of at least 384 MiB, other frames each time.
Printed are medians over clean repetitions (without involuntary context switches; all of them, and said so, if fewer than `LEAST_CLEAN`)
and ratios to the ceiling of the same run. Each line is appended to bench/results/<date>-<machine>-attention.jsonl with machine and commit.
This file knows the kernels' public call and nothing of how they work; it allocates its own pool.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import mmap
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pagedkv import KVLayer, KVSpec, PagedBatch, paged_attention
from pagedkv.kernels import cpu, quant

POOL_BYTES, LEAST_CLEAN = 384 << 20, 5
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Shape:
    """One cell of the grid; a decode step of `batch` sequences of `context` tokens. kv: a stored dtype, or "" for `dtype`."""

    batch: int = 8
    context: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    kv: str = ""
    threads: int = 1

    def spec(self) -> KVSpec:
        return KVSpec(1, self.kv_heads, self.head_dim, block_size=self.block_size, dtype=self.dtype, kv_dtype=self.kv or None)


class Pool:
    """A pool of one layer on huge pages, laid out as pagedkv.cache does, and how to draw a step of frames from it."""

    def __init__(self, shape: Shape) -> None:
        spec, self.shape = shape.spec(), shape
        self.frame_bytes, self.pages = spec.frame_bytes, -(-shape.context // shape.block_size)
        self.num_frames = max(2 * shape.batch * self.pages, POOL_BYTES // self.frame_bytes)
        region = mmap.mmap(-1, self.num_frames * self.frame_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        region.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(region, dtype=torch.uint8)
        views = {name: self._view(spec, name, offset) for name, (offset, _) in spec.regions().items()}
        self.layer = KVLayer(**views)
        noise = torch.randn(1 << 16)
        for name, view in views.items():
            if name.endswith("_scale"):
                view.fill_(0.01)
            elif shape.kv:
                view.view(torch.uint8).random_(0, 120)
            else:
                view.copy_(noise[: view[0].numel()].view(view.shape[1:]) if view[0].numel() <= len(noise) else torch.randn(view.shape[1:]))

    def _view(self, spec: KVSpec, name: str, offset: int) -> torch.Tensor:
        is_scale = name.endswith("_scale")
        dtype = torch.float32 if is_scale else quant.DTYPES[spec.stored_dtype]
        dim = 1 if is_scale else spec.head_dim // (2 if spec.stored_dtype == "int4" else 1)
        shape = (self.num_frames, spec.block_size, spec.num_kv_heads, dim)
        strides = (self.frame_bytes // dtype.itemsize, dim, spec.block_size * dim, 1)
        view = self.bytes.view(dtype).as_strided(shape, strides, offset // dtype.itemsize)
        return view[..., 0] if is_scale else view

    def draw(self) -> torch.Tensor:
        """int64 [batch * pages]: distinct frames in random order."""
        return torch.randperm(self.num_frames)[: self.shape.batch * self.pages]

    def batch(self, frames: torch.Tensor) -> PagedBatch:
        B, n = self.shape.batch, self.shape.context
        lens = torch.full((B,), n, dtype=torch.int32)
        none = torch.zeros(B, dtype=torch.int64)
        return PagedBatch(
            frames.view(B, self.pages).int(), lens, torch.arange(B + 1, dtype=torch.int32), none, none, max_seqlen_q=1, max_seqlen_k=n
        )


Step = Callable[[], Callable[[], object]]
"""Prepares one repetition, untimed, and returns what is timed."""


def variants(shape: Shape, pool: Pool, backends: list[str]) -> dict[str, Step]:
    q = torch.randn(shape.batch, shape.heads, shape.head_dim).to(quant.DTYPES[shape.dtype])
    out = torch.empty_like(q)

    def kernel(name: str) -> Step:
        def prepare() -> Callable[[], object]:
            batch = pool.batch(pool.draw())
            return lambda: paged_attention(q, pool.layer, batch, out=out, backend=name)

        return prepare

    def ceiling() -> Callable[[], object]:
        offsets, isa = pool.draw() * pool.frame_bytes, cpu.isa()
        args = (pool.bytes.data_ptr(), offsets.data_ptr(), len(offsets), pool.frame_bytes)
        return lambda: (cpu._extension().read(isa, shape.threads, *args), offsets)

    steps: dict[str, Step] = {name: kernel(name) for name in backends} | {"ceiling": ceiling}
    if not shape.kv:
        steps["sdpa"] = contiguous(shape, q)
    return steps


def contiguous(shape: Shape, q: torch.Tensor) -> Step:
    """torch SDPA on contiguous KV, the query heads of a group as rows: its fastest form for one query."""
    size = (shape.batch, shape.kv_heads, shape.context, shape.head_dim)
    bytes_per_copy = 2 * q.element_size() * shape.batch * shape.kv_heads * shape.context * shape.head_dim
    copies = [(torch.randn(size).to(q.dtype), torch.randn(size).to(q.dtype)) for _ in range(max(2, (64 << 20) // bytes_per_copy))]
    grouped = q.view(shape.batch, shape.kv_heads, -1, shape.head_dim)
    turn = itertools.cycle(copies)

    def prepare() -> Callable[[], object]:
        k, v = next(turn)
        return lambda: torch.nn.functional.scaled_dot_product_attention(grouped, k, v)

    return prepare


def measure(steps: dict[str, Step], repetitions: int) -> dict[str, tuple[float, int]]:
    """Median seconds of each variant, and how many clean repetitions it is of (0: none were clean enough, all count)."""
    times: dict[str, list[tuple[float, bool]]] = {name: [] for name in steps}
    for name, prepare in [*steps.items()] * (repetitions + 2):
        run = prepare()
        switches, began = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.perf_counter()
        run()
        seconds = time.perf_counter() - began
        times[name].append((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == switches))
    medians = {}
    for name, all_runs in times.items():
        clean = [seconds for seconds, is_clean in all_runs[2:] if is_clean]
        enough = len(clean) >= LEAST_CLEAN
        medians[name] = (statistics.median(clean if enough else [seconds for seconds, _ in all_runs[2:]]), len(clean) if enough else 0)
    return medians


def bench(shape: Shape, backends: list[str], repetitions: int) -> dict[str, Any]:
    os.environ["PAGEDKV_NUM_THREADS"] = str(shape.threads)
    torch.set_num_threads(shape.threads)
    pool = Pool(shape)
    medians = measure(variants(shape, pool, backends), repetitions)
    tokens, num_bytes = shape.batch * shape.context, shape.batch * pool.pages * pool.frame_bytes
    found = {
        name: {
            "us": round(seconds * 1e6, 1),
            "GB_per_s": round(num_bytes / seconds / 1e9, 2),
            "of_ceiling": round(medians["ceiling"][0] / seconds, 3),
            "Mtokens_per_s": round(tokens / seconds / 1e6, 3),
            "clean": clean,
        }
        for name, (seconds, clean) in medians.items()
    }
    return {"shape": asdict(shape), "isa": cpu.isa(), "repetitions": repetitions, "results": found}


def machine() -> dict[str, str]:
    model = next((line.partition(": ")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.strip()
    return {"machine": f"{model}, {os.cpu_count()} cores", "commit": commit or "unknown", "torch": torch.__version__}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def report(result: dict[str, Any]) -> str:
    differing = {name: value for name, value in result["shape"].items() if value != getattr(Shape(), name)}
    lines = [" ".join(f"{name}={value}" for name, value in differing.items()) or "batch=8 context=4096 heads=32/8 head_dim=128 bfloat16"]
    for name, row in result["results"].items():
        clean = f"{row['clean']} clean" if row["clean"] else "none clean"
        lines.append(
            f"  {name:10} {row['us']:10.0f} us {row['GB_per_s']:7.1f} GB/s {row['of_ceiling']:6.2f} of ceiling"
            f" {row['Mtokens_per_s']:8.2f} Mtokens/s  ({clean})"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.attention", description=(__doc__ or "").splitlines()[0])
    lists: dict[str, list[Any]] = {
        "dtype": ["bfloat16", "float32"], "kv": [""], "block-size": [16, 128], "context": [4096], "batch": [8], "threads": [1, 2],
        "heads": ["32/8"], "head-dim": [128],
    }  # fmt: skip
    for name, default in lists.items():
        parser.add_argument(f"--{name}", nargs="+", type=type(default[0]), default=default)
    parser.add_argument("--backends", nargs="+", default=["cpu"], help="names in the registry")
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--no-record", action="store_true", help="print only")
    given = parser.parse_args(argv)
    where = machine()
    grid = itertools.product(
        given.dtype, given.kv, given.block_size, given.context, given.batch, given.threads, given.heads, given.head_dim
    )
    for dtype, kv, block_size, context, batch, threads, heads, head_dim in grid:
        H, K = map(int, heads.split("/"))
        shape = Shape(batch, context, H, K, head_dim, block_size, dtype, kv, threads)
        result = bench(shape, given.backends, given.repetitions)
        print(report(result), flush=True)
        if not given.no_record:
            RESULTS.mkdir(exist_ok=True)
            today = datetime.date.today().isoformat()
            with (RESULTS / f"{today}-{platform.machine()}-attention.jsonl").open("a") as file:
                file.write(json.dumps({"date": today, **where, **result}) + "\n")


if __name__ == "__main__":
    main()
