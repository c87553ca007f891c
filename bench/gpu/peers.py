"""The decode kernels next to those of other projects, in turns: `python -m pagedkv.bench.gpu.peers`.

    sdpa          torch over contiguous keys, without a page table
    fa3           FlashAttention 3 as vLLM builds it, over pages [F, S, K, D]
    flashinfer    the paged decode of FlashInfer on tensor cores, over pages [F, K, S, D]
    flashmla      the dense decode of FlashMLA, over latents

Plans of peers are made before the time is taken. Each call reads other memory, as ours do. A peer that does not serve a
cell raises ValueError; the row has the reason. Of 8-bit floats the peers have one scale, ours have a scale for each
token and head. The libraries come from Python's path (`make gpu-kit`). At the end torch's profiler names the kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from pagedkv import PagedBatch
from pagedkv.bench.gpu.attention import BASE, FP8, LARGE_PAGES, LONG, MIDDLE, ONE, ONE_4K, PROMPT, Makers, ours, run
from pagedkv.bench.gpu.pool import GpuPool
from pagedkv.bench.gpu.timing import Step, error_line, keep, options_of, provenance, require_gpu
from pagedkv.kernels import quant

SHORT: Final = [replace(BASE, batch=batch, context=context) for batch, context in ((512, 256), (1024, 128))]
GROUPS: Final = ((BASE, LARGE_PAGES), *((cell,) for cell in (MIDDLE, ONE, ONE_4K, FP8, LONG, *SHORT)))
LATENTS: Final = tuple(
    (replace(BASE, batch=batch, context=context, heads=heads, kv_heads=1, head_dim=576, block_size=64),)
    for batch, context, heads in ((32, 4096, 16), (64, 4096, 128), (1, 8192, 16))
)
REPETITIONS: Final = 9


def library(name: str) -> Any:
    """Return the operators of one of vLLM's libraries. Raises: ValueError if it is not on Python's path."""
    files = [file for folder in sys.path if (file := Path(folder, f"{name}.abi3.so")).is_file()]
    if not files:
        raise ValueError(f"{name}.abi3.so is not on Python's path; `make gpu-kit` brings it")
    torch.ops.load_library(files[0])
    return getattr(torch.ops, name)


def stored(pool: GpuPool, kinds: tuple[str, ...]) -> torch.dtype:
    """Return the dtype of stored keys. Raises: ValueError for keys of another kind than `kinds`."""
    if pool.cell.kv not in kinds:
        raise ValueError(f"it has no keys in {pool.cell.kv} with scales per token and head")
    return pool.layer.k.dtype


def sdpa(pool: GpuPool) -> list[Step]:
    """Return a step for each call of a graph. Raises: ValueError for narrow keys."""
    cell, dtype = pool.cell, stored(pool, ("",))
    options: dict[str, Any] = {"device": pool.device, "dtype": dtype}
    q = torch.randn(cell.batch, cell.heads, 1, cell.head_dim, **options)
    kv = torch.randn(pool.calls, 2, cell.batch, cell.kv_heads, cell.context, cell.head_dim, **options)
    attend = torch.nn.functional.scaled_dot_product_attention
    return [lambda keys=keys: attend(q, keys[0], keys[1], enable_gqa=True) for keys in kv]


def fa3(pool: GpuPool) -> list[Step]:
    """Return a step for each call of a graph, of decode or prefill. Raises: ValueError"""
    cell, dtype, ops = pool.cell, stored(pool, ("", "fp8_e4m3")), library("_vllm_fa3_C")
    B, H, K, D, S, longest = cell.batch, cell.heads, cell.kv_heads, cell.head_dim, cell.block_size, max(cell.lens())
    q, k, v = (x.contiguous() for x in (pool.query().to(dtype), pool.layer.k, pool.layer.v))
    out = torch.empty_like(q, dtype=quant.DTYPES[cell.dtype])
    scale = torch.ones(B, K, device=pool.device) if cell.kv else None

    def step_of(batch: PagedBatch) -> Step:
        table, lens, starts = batch.block_table.clamp(0), batch.seq_lens, batch.cu_seqlens_q
        sizes = (B, cell.new, longest, H, K, D, D, dtype, lens, starts)
        plan = ops.get_scheduler_metadata(*sizes, *[None] * 4, S, 0, True, -1, -1, False, 0, None, 0)
        paged = (q, k, v, None, None, None, out, starts, None, None, None, lens, cell.new, longest, table)
        rest = (*[None] * 5, scale, scale, scale, D**-0.5, True, -1, -1, 0.0, True, plan, 0, None, 0, None, 1, 0, None)
        return lambda: ops.fwd(*paged, *rest)

    return [step_of(batch) for batch in pool.batches()]


def flashinfer(pool: GpuPool) -> list[Step]:
    """Return a step for each call of a graph. Raises: ValueError, ImportError"""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    cell, dtype, options = pool.cell, stored(pool, ("", "fp8_e4m3")), {"dtype": torch.int32, "device": pool.device}
    q, kv = pool.query(), tuple(x.transpose(1, 2).contiguous() for x in (pool.layer.k, pool.layer.v))
    starts = torch.tensor([0, *pool.pages]).cumsum(0).to(**options)
    last = torch.tensor([(n - 1) % cell.block_size + 1 for n in cell.lens()], **options)
    sizes = (cell.heads, cell.kv_heads, cell.head_dim, cell.block_size)
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device=pool.device)

    def step_of(batch: PagedBatch) -> Step:
        frames = torch.cat([row[:count] for row, count in zip(batch.block_table, pool.pages, strict=True)])
        wrapper = BatchDecodeWithPagedKVCacheWrapper(scratch, "HND", use_tensor_cores=True, backend="fa2")
        wrapper.plan(starts, frames, last, *sizes, q_data_type=q.dtype, kv_data_type=dtype)
        return lambda: wrapper.run(q, kv)

    return [step_of(batch) for batch in pool.batches()]


def flashmla(pool: GpuPool) -> list[Step]:
    """Return a step for each call of a graph. Raises: ValueError"""
    stored(pool, ("",))
    attend, q, batches = library("_flashmla_C").dense_decode_fwd, pool.query()[:, None], pool.batches()

    def call(batch: PagedBatch, *plan: Any) -> Any:
        sizes = (pool.layer.v.shape[-1], batch.seq_lens, batch.block_table, pool.cell.head_dim**-0.5, True)
        return attend(q, pool.layer.k, *sizes, *plan, None)

    *_, plan, splits = call(batches[0], None, None)
    return [partial(call, batch, plan, splits) for batch in batches]


PEERS: Final[Makers] = {"sdpa": sdpa, "fa3": fa3, "flashinfer": flashinfer}
NAMED: Final = (*((BASE, who, make) for who, make in PEERS.items()), (PROMPT, "library", partial(ours, "library")))
"""Torch chooses the kernels of `sdpa` and `library`, so rows say which ones ran."""


def kernels_of(make: Callable[[GpuPool], list[Step]], pool: GpuPool) -> list[str] | str:
    """Return the names of the kernels of a call, with their microseconds; or why there are none."""
    try:
        step = make(pool)[0]
        step()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        return [f"{each.key[:120]} {each.device_time_total:.1f} us" for each in seen.key_averages()]
    except Exception as why:
        return error_line(why)


def main(argv: list[str] | None = None) -> int:
    """Print and keep the figures; return 1 if a peer served no cell."""
    given = options_of(__doc__, "peers").parse_args(argv)
    require_gpu()
    options: dict[str, Any] = {"out": given.out and given.out / "gpu-attention.jsonl"}
    every = run(GROUPS, ["cuda", "triton"], REPETITIONS, others=PEERS, **options)
    every += run(LATENTS, ["cuda", "triton"], REPETITIONS, others={"flashmla": flashmla}, **options)
    for cell, who, make in NAMED:
        row = {"case": str(cell), "who": who, "kernels": kernels_of(make, GpuPool(cell))}
        keep([row | provenance()], given.out, "kernels")
        print(f"= {who}, {cell}: {row['kernels']}", flush=True)
    missing = {*PEERS, "flashmla"} - {row["who"] for row in every if row["us"]}
    print(*(f"{who} served no cell" for who in sorted(missing)), sep="\n")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
