"""The peers of the kernels on a GPU, each in its fastest layout; a peer is imported only when it is measured.

    sdpa           torch, keys contiguous: no page table at all
    flash-attn-3   FlashAttention 3 (`flash_attn_interface`), our pages
    flashinfer     FlashInfer's paged decode, our pages; its host-side plan is made before and is not measured

A peer that does not support a cell raises ValueError with the reason; attention.py reports the reason. Each call of a
peer reads other memory, as our calls do: with its keys in the cache a peer could not be compared.
Each public function returns the steps of its peer over a pool, one for each call of a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from pagedkv.bench.gpu.pool import GpuPool
from pagedkv.bench.gpu.timing import Step
from pagedkv.kernels import quant


def _query(pool: GpuPool, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=pool.device, dtype=quant.DTYPES[pool.cell.dtype])


def _decodes(pool: GpuPool) -> None:
    if pool.cell.kv:
        raise ValueError("it has no keys with scales per token and head")
    if pool.cell.new > 1:
        raise ValueError("it is asked to decode one token only")


def sdpa(pool: GpuPool) -> list[Step]:
    """Return steps of torch SDPA. Raises: ValueError for ragged batches, and as the others do."""
    cell = pool.cell
    _decodes(pool)
    if cell.lengths != "uniform":
        raise ValueError("it has no ragged batches")
    q = _query(pool, cell.batch, cell.heads, 1, cell.head_dim)
    kv = _query(pool, pool.calls, 2, cell.batch, cell.kv_heads, cell.context, cell.head_dim)
    attend = torch.nn.functional.scaled_dot_product_attention
    return [lambda keys=keys: attend(q, keys[0], keys[1], enable_gqa=True) for keys in kv]


def flash_attention_3(pool: GpuPool) -> list[Step]:
    """Return steps of FlashAttention 3. Raises: ImportError; ValueError for quantised keys and drafts."""
    from flash_attn_interface import flash_attn_with_kvcache

    _decodes(pool)
    cell = pool.cell
    q = _query(pool, cell.batch, 1, cell.heads, cell.head_dim)
    k, v = pool.layer.k.contiguous(), pool.layer.v.contiguous()
    tables = [(batch.seq_lens, batch.block_table.clamp(0)) for batch in pool.batches()]  # it takes no negative entry
    return [
        lambda n=n, t=t: flash_attn_with_kvcache(q, k, v, cache_seqlens=n, page_table=t, causal=True) for n, t in tables
    ]


def flashinfer(pool: GpuPool) -> list[Step]:
    """Return steps of FlashInfer's paged decode. Raises: ImportError; ValueError for quantised keys and drafts."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    _decodes(pool)
    cell = pool.cell
    q = _query(pool, cell.batch, cell.heads, cell.head_dim)
    kv = torch.stack([pool.layer.k.transpose(1, 2), pool.layer.v.transpose(1, 2)], 1)  # HND
    counts = torch.tensor([0, *pool.pages], dtype=torch.int32).cumsum(0).int()
    last = torch.tensor([(n - 1) % cell.block_size + 1 for n in cell.lens()], dtype=torch.int32)
    # partial results; the calls follow one another, so they share it
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device=pool.device)
    tensor_cores = cell.heads >= 4 * cell.kv_heads
    steps: list[Step] = []
    for batch in pool.batches():  # each batch has its own plan
        table = batch.block_table
        indices = torch.cat([table[b, :count] for b, count in enumerate(pool.pages)])
        wrapper = BatchDecodeWithPagedKVCacheWrapper(scratch, "HND", use_tensor_cores=tensor_cores)
        sizes = (cell.heads, cell.kv_heads, cell.head_dim, cell.block_size)
        wrapper.plan(
            counts.to(pool.device), indices, last.to(pool.device), *sizes, q_data_type=q.dtype, kv_data_type=q.dtype
        )
        steps.append(lambda wrapper=wrapper: wrapper.run(q, kv))
    return steps


PEERS: Final[dict[str, Callable[[GpuPool], list[Step]]]] = {
    "sdpa": sdpa,
    "flash-attn-3": flash_attention_3,
    "flashinfer": flashinfer,
}
