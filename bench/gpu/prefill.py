"""Prefill in TFLOP/s on a GPU: `python -m pagedkv.bench.gpu.prefill`.

Chunks of new tokens at the end of one sequence, causal, bfloat16, 32/8 heads of 128, pages of 16 in random order.

    ours      each backend of the registry, over pages
    fa3       FlashAttention 3 over the same pages (peers.py). Where its library is there, `library` calls it, too
    library by cuDNN   the backend "library" as in a process without FlashAttention 3
    sdpa      torch's flash attention and cuDNN's, over contiguous keys: what a library reaches without pages
    gather    the pages made contiguous: the cost of calling such a library
    matmul    8192 x 8192 x 8192 in bfloat16: the ceiling

FLOP: 4 * heads * head_dim * visible pairs; nothing counts what a mask throws away. The variants of a shape take turns.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pagedkv import gather_kv
from pagedkv.bench.attention.cells import Cell
from pagedkv.bench.gpu.attention import BASE, Makers, measure, ours, promises
from pagedkv.bench.gpu.peers import fa3
from pagedkv.bench.gpu.pool import GpuPool
from pagedkv.bench.gpu.timing import Rows, Step, keep, options_of, provenance, require_gpu, served
from pagedkv.kernels.library import backend as library

SHAPES: Final = ((2048, 2048), (8192, 8192), (2048, 32768), (32768, 32768))
"""(new tokens, keys)."""

SQUARE: Final = 8192


def cell_of(new: int, keys: int) -> Cell:
    """Return the cell of a chunk."""
    return replace(BASE, kind="prefill", batch=1, new=new, context=keys)


def flop(cell: Cell) -> int:
    """Return the operations that a causal chunk needs: two for each product and sum, over the pairs that are seen."""
    pairs = cell.new * (cell.context - cell.new) + cell.new * (cell.new + 1) // 2
    return 4 * cell.heads * cell.head_dim * pairs


def sdpa(pool: GpuPool, which: SDPBackend) -> list[Step]:
    """Return a step of torch's attention over contiguous keys, causal at the end, by one of its libraries."""
    from torch.nn.attention.bias import causal_lower_right

    cell = pool.cell
    k, v = gather_kv(pool.layer, pool.batches()[0], dtype=torch.bfloat16, backend="reference")
    q = pool.query().transpose(0, 1)[None]
    k, v = (x.transpose(0, 1)[None].repeat_interleave(cell.heads // cell.kv_heads, 1) for x in (k, v))
    square = cell.new == cell.context
    options: dict[str, Any] = (
        {"is_causal": True} if square else {"attn_mask": causal_lower_right(cell.new, cell.context)}
    )

    def step() -> object:
        with sdpa_kernel(which):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return [step] * 4


def gather(pool: GpuPool) -> list[Step]:
    """Return a step that makes the pages contiguous."""
    cell, batch = pool.cell, pool.batches()[0]
    shape, like = (cell.context, cell.kv_heads, cell.head_dim), {"dtype": torch.bfloat16, "device": pool.device}
    into = torch.empty(shape, **like), torch.empty(shape, **like)  # type: ignore[call-overload]
    return [lambda: gather_kv(pool.layer, batch, out=into)] * 4


def matmul(pool: GpuPool) -> list[Step]:
    """Return a step of a large product of random numbers, whatever the cell."""
    a, b = (torch.randn(SQUARE, SQUARE, device=pool.device, dtype=torch.bfloat16) for _ in range(2))
    return [lambda: a @ b] * 4


def by_cudnn(pool: GpuPool) -> list[Step]:
    """Return the steps of "library" in a process that has no FlashAttention 3. A graph keeps what they launch."""

    def hidden(step: Step) -> None:
        with patch.object(library, "_flash_attention_3", lambda: None):
            step()

    return [partial(hidden, step) for step in ours("library", pool)]


OTHERS: Final[Makers] = {
    "fa3": fa3,
    "library by cuDNN": by_cudnn,
    "sdpa flash": lambda pool: sdpa(pool, SDPBackend.FLASH_ATTENTION),
    "sdpa cudnn": lambda pool: sdpa(pool, SDPBackend.CUDNN_ATTENTION),
    "gather": gather,
    "matmul": matmul,
}


def measured(cell: Cell, backends: list[str], repetitions: int) -> Rows:
    """Return a row for each variant of one shape."""
    rows = measure((cell,), backends, repetitions, OTHERS)
    for row in rows:
        if row["us"] and row["who"] != "gather":
            work = 2 * SQUARE**3 if row["who"] == "matmul" else flop(cell)
            row["TFLOP_per_s"] = round(work / row["us"] / 1e6, 1)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Print and keep the figures; return 1 if none of our backends was measured."""
    parser = options_of(__doc__, "prefill")
    parser.add_argument("--backends", nargs="+", help="names in the registry; by default all that run on a GPU")
    parser.add_argument("--repetitions", type=int, default=8)
    given = parser.parse_args(argv)
    require_gpu()
    about, ours, every = provenance(), given.backends or served(), []
    for new, keys in SHAPES:
        rows = [row | about for row in measured(cell_of(new, keys), ours, given.repetitions)]
        keep(rows, given.out, "prefill")
        rates = {row["who"]: row.get("TFLOP_per_s") or f"{row['us']} us" for row in rows if row["us"]}
        print(f"= TFLOP/s, {rows[0]['case']}: " + ", ".join(f"{who} {rate}" for who, rate in rates.items()), flush=True)
        print(*(f"{row['who']}: {row['why_not']}" for row in rows if not row["us"]), sep="\n", flush=True)
        every += rows
        torch.cuda.empty_cache()
    print(*(f"= {line}" for line in promises(every, ours, about["gpu"])), sep="\n", flush=True)
    return int(not any(row["us"] for row in every if row["who"] in ours))


if __name__ == "__main__":
    sys.exit(main())
