"""Prefill in TFLOP/s on a GPU: `python -m pagedkv.bench.gpu.prefill`.

Chunks of new tokens at the end of one sequence, causal, bfloat16, 32/8 heads of 128, pages of 16 in random order.

    ours      each backend of the registry, over pages
    sdpa      torch's flash attention and cuDNN's, over contiguous keys: what a library reaches without pages
    gather    the pages made contiguous: the cost of calling such a library
    matmul    8192 x 8192 x 8192 in bfloat16: the ceiling

FLOP: 4 * heads * head_dim * visible pairs; nothing counts what a mask throws away. The variants of a shape take turns.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pagedkv import PagedBatch, gather_kv, paged_attention
from pagedkv.bench.attention.cells import Cell
from pagedkv.bench.gpu.attention import BASE, promises
from pagedkv.bench.gpu.model.predict import flop
from pagedkv.bench.gpu.pool import GpuPool
from pagedkv.bench.gpu.timing import Rows, Step, in_turn, keep, options_of, provenance, require_gpu, served

SHAPES: Final = ((2048, 2048), (8192, 8192), (2048, 32768), (32768, 32768))
"""(new tokens, keys)."""

SQUARE: Final = 8192
CALLS: Final = 4
LIBRARIES: Final = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}


def cell_of(new: int, keys: int) -> Cell:
    """Return the cell of a chunk."""
    return replace(BASE, kind="prefill", batch=1, new=new, context=keys)


def batch_of(pool: GpuPool) -> PagedBatch:
    """Return one step of the pool, with the batch's longest query as its bound."""
    return pool.batches()[0]


def sdpa(pool: GpuPool, which: SDPBackend) -> Step:
    """Return torch's attention over contiguous keys, causal at the end, by one of its libraries."""
    from torch.nn.attention.bias import causal_lower_right

    cell = pool.cell
    k, v = gather_kv(pool.layer, batch_of(pool), dtype=torch.bfloat16, backend="reference")
    q = pool.query().transpose(0, 1)[None]
    k, v = (x.transpose(0, 1)[None].repeat_interleave(cell.heads // cell.kv_heads, 1) for x in (k, v))
    square = cell.new == cell.context
    options: dict[str, Any] = (
        {"is_causal": True} if square else {"attn_mask": causal_lower_right(cell.new, cell.context)}
    )

    def step() -> object:
        with sdpa_kernel(which):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return step


def variants(pool: GpuPool, backends: list[str]) -> tuple[dict[str, list[Step]], dict[str, str]]:
    """Return CALLS steps of each variant, and why others are left out."""
    q, batch = pool.query(), batch_of(pool)
    found: dict[str, list[Step]] = {
        name: [lambda name=name: paged_attention(q, pool.layer, batch, backend=name)] * CALLS for name in backends
    }
    into = [torch.empty(pool.cell.context, pool.cell.kv_heads, 128, dtype=q.dtype, device=q.device) for _ in range(2)]
    found["gather"] = [lambda: gather_kv(pool.layer, batch, out=(into[0], into[1]))] * CALLS
    refused = {}
    for name, which in LIBRARIES.items():
        try:
            found[name] = [sdpa(pool, which)] * CALLS
        except Exception as why:
            refused[name] = str(why).splitlines()[0]
    return found, refused


def measured(cell: Cell, backends: list[str], repetitions: int) -> Rows:
    """Return a row for each variant of one shape."""
    pool = GpuPool(cell)
    steps, refused = variants(pool, backends)
    times, broken = in_turn(steps, repetitions)
    about = {"case": str(cell), "cell": asdict(cell)}
    rows: Rows = [about | {"who": name, "us": None, "why_not": why} for name, why in (refused | broken).items()]
    for name, us in times.items():
        rows.append(about | {"who": name, "us": round(us, 1)})
        if name != "gather":
            rows[-1]["TFLOP_per_s"] = round(flop(cell) / us / 1e6, 1)
    return rows


def ceiling(repetitions: int) -> float:
    """Return the TFLOP/s of a large matrix product of random numbers."""
    a, b = (torch.randn(SQUARE, SQUARE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times, _ = in_turn({"matmul": [lambda: a @ b] * CALLS}, repetitions)
    return 2 * SQUARE**3 / times["matmul"] / 1e6


def line_of(rows: Rows) -> str:
    """Return one line for a shape."""
    words = [
        f"{row['who']} {row['TFLOP_per_s']:.0f}" if "TFLOP_per_s" in row else f"{row['who']} {row['us']} us"
        for row in rows
        if row["us"]
    ]
    return f"{rows[0]['case']}: {', '.join(words)}"


def main(argv: list[str] | None = None) -> int:
    """Print and keep the figures; return 1 if none of our backends was measured."""
    parser = options_of(__doc__, "prefill")
    parser.add_argument("--backends", nargs="+", help="names in the registry; by default all that run on a GPU")
    parser.add_argument("--repetitions", type=int, default=8)
    given = parser.parse_args(argv)
    require_gpu()
    about, ours, every = provenance(), given.backends or served(), []
    print(f"= TFLOP/s; matmul {ceiling(given.repetitions):.0f}", flush=True)
    for new, keys in SHAPES:
        rows = [row | about for row in measured(cell_of(new, keys), ours, given.repetitions)]
        keep(rows, given.out, "prefill")
        print(f"= {line_of(rows)}", flush=True)
        for row in rows:
            if row["us"] is None:
                print(f"{row['case']}, {row['who']}: {row['why_not']}", flush=True)
        every += rows
        torch.cuda.empty_cache()
    print(*(f"= {line}" for line in promises(every, ours, about["gpu"])), sep="\n", flush=True)
    return int(not any(row["us"] for row in every if row["who"] in ours))


if __name__ == "__main__":
    sys.exit(main())
