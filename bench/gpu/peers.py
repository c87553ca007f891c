"""The peers of the kernels on a GPU, each in its fastest layout; a peer is imported only when it is measured.

    sdpa           torch, keys contiguous: no page table at all
    flash-attn-3   FlashAttention 3 (`flash_attn_interface`), our pages
    flash-attn     FlashAttention 2, whose pages have 256 tokens
    flashinfer     FlashInfer's paged decode, our pages; its host-side plan is made before and is not measured
    vllm           vLLM's Triton kernel (`unified_attention`), our pages; keys are split as vLLM's own backend does
    flex           torch's PagedAttention, compiled, in pages of 128

A peer that does not support a cell raises ValueError with the reason; attention.py reports the reason. Each call of a
peer reads other memory, as our calls do: with its keys in the cache a peer could not be compared.
Each public function returns the steps of its peer over a pool, one for each call of a graph.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch

from pagedkv import PagedBatch
from pagedkv.bench.gpu.pool import GpuPool
from pagedkv.bench.gpu.timing import Step
from pagedkv.kernels import quant


def _query(pool: GpuPool, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=pool.device, dtype=quant.DTYPES[pool.cell.dtype])


def _no_quantised_keys(pool: GpuPool) -> None:
    if pool.cell.kv:
        raise ValueError("it has no keys with scales per token and head")


def sdpa(pool: GpuPool) -> list[Step]:
    """Return steps of torch SDPA. Raises: ValueError for ragged batches and quantised keys."""
    cell = pool.cell
    _no_quantised_keys(pool)
    if cell.lengths != "uniform":
        raise ValueError("it has no ragged batches")
    q = _query(pool, cell.batch, cell.heads, 1, cell.head_dim)
    kv = _query(pool, pool.calls, 2, cell.batch, cell.kv_heads, cell.context, cell.head_dim)
    attend = torch.nn.functional.scaled_dot_product_attention
    return [lambda keys=keys: attend(q, keys[0], keys[1], enable_gqa=True) for keys in kv]


def flash_attention_3(pool: GpuPool) -> list[Step]:
    """Return steps of FlashAttention 3. Raises: ImportError; ValueError for quantised keys."""
    from flash_attn_interface import flash_attn_with_kvcache

    _no_quantised_keys(pool)
    q, k, v, tables = _paged(pool)
    return [
        lambda n=n, t=t: flash_attn_with_kvcache(q, k, v, cache_seqlens=n, page_table=t, causal=True) for n, t in tables
    ]


def flash_attention_2(pool: GpuPool) -> list[Step]:
    """Return steps of FlashAttention 2, over a pool with pages of 256. Raises: ImportError; ValueError, see above."""
    from flash_attn import flash_attn_with_kvcache

    _no_quantised_keys(pool)
    if pool.cell.block_size % 256:
        pool = GpuPool(replace(pool.cell, block_size=256), pool.device)
    q, k, v, tables = _paged(pool)
    return [
        lambda n=n, t=t: flash_attn_with_kvcache(q, k, v, cache_seqlens=n, block_table=t, causal=True)
        for n, t in tables
    ]


def _paged(pool: GpuPool) -> tuple[Any, ...]:
    """Return a query [B, 1, H, D], contiguous keys and values [F, S, K, D], and (lengths, page table) of each call.

    The page tables have no negative entry.
    """
    cell = pool.cell
    tables = [(batch.seq_lens, batch.block_table.clamp(0)) for batch in pool.batches()]
    return (
        _query(pool, cell.batch, 1, cell.heads, cell.head_dim),
        pool.layer.k.contiguous(),
        pool.layer.v.contiguous(),
        tables,
    )


def flashinfer(pool: GpuPool) -> list[Step]:
    """Return steps of FlashInfer's paged decode. Raises: ImportError; ValueError for quantised keys."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    _no_quantised_keys(pool)
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


SEGMENTS: Final = 16
"""Parts into which vLLM's Triton backend cuts the keys of few sequences in a decode step (NUM_PAR_SOFTMAX_SEGMENTS)."""


def vllm(pool: GpuPool) -> list[Step]:
    """Return steps of vLLM's Triton kernel. Raises: ImportError; ValueError for quantised keys."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    _no_quantised_keys(pool)
    cell = pool.cell
    q = _query(pool, cell.batch, cell.heads, cell.head_dim)
    k, v, out = pool.layer.k.contiguous(), pool.layer.v.contiguous(), torch.empty_like(q)
    wide = (128 // cell.kv_heads, cell.heads, SEGMENTS)  # vLLM cuts keys only for this many sequences or fewer
    partial = torch.empty(*wide, 1 << (cell.head_dim - 1).bit_length(), dtype=torch.float32, device=pool.device)
    most, sums = (torch.empty(wide, dtype=torch.float32, device=pool.device) for _ in range(2))
    split = {"seq_threshold_3D": wide[0], "num_par_softmax_segments": SEGMENTS}
    split |= {"softmax_segm_output": partial, "softmax_segm_max": most, "softmax_segm_expsum": sums}
    options = {"softmax_scale": cell.head_dim**-0.5, "causal": True, "window_size": (-1, -1), "softcap": 0.0} | split
    options |= {"q_descale": None, "k_descale": None, "v_descale": None}

    def call(batch: PagedBatch) -> Step:
        table = batch.block_table.clamp(0)
        lens = {
            "cu_seqlens_q": batch.cu_seqlens_q,
            "max_seqlen_q": 1,
            "seqused_k": batch.seq_lens,
            "max_seqlen_k": batch.max_seqlen_k,
        }
        return lambda: unified_attention(q, k, v, out, **lens, block_table=table, **options)

    return [call(batch) for batch in pool.batches()]


PAGE: Final = 128
"""Tokens of a page in torch's flex attention: the size of its block masks."""


def flex(pool: GpuPool, compile: Callable[[Any], Any] = torch.compile) -> list[Step]:
    """Return steps of torch's PagedAttention. Raises: ValueError for pages that are not full and for quantised keys."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import BlockMask, flex_attention, noop_mask

    _no_quantised_keys(pool)
    cell, device = pool.cell, pool.device
    if any(n % PAGE for n in cell.lens()):
        raise ValueError(
            f"a page of {PAGE} that is not full needs a mask of each call's own tables, each of them compiled"
        )
    pages = torch.tensor([n // PAGE for n in cell.lens()], dtype=torch.int32, device=device)
    num_pages, most = int(pages.sum()) * pool.calls, int(pages.max())
    q = _query(pool, cell.batch, cell.heads, 1, cell.head_dim)
    k, v = (_query(pool, 1, cell.kv_heads, num_pages * PAGE, cell.head_dim) for _ in range(2))
    full, none = pages.view(-1, 1, 1), torch.zeros_like(pages).view(-1, 1, 1)
    order = torch.arange(most, dtype=torch.int32, device=device).expand(cell.batch, 1, 1, most).contiguous()
    logical = BlockMask.from_kv_blocks(none, order, full, order, (PAGE, PAGE), noop_mask, seq_lengths=(1, most * PAGE))
    attend, steps = compile(flex_attention), []
    for _ in range(pool.calls):
        tables = PagedAttention(num_pages, PAGE, cell.batch, device=device)
        random.shuffle(tables.empty_pages)
        for b, n in enumerate(cell.lens()):
            tables.reserve(torch.tensor([b], device=device), torch.tensor([n], device=device))
        mask = tables.convert_logical_block_mask(logical)
        # all pages are full, so the mask function is never called; one over the tables would be compiled for each call
        mask.mask_mod = noop_mask
        steps.append(lambda mask=mask: attend(q, k, v, block_mask=mask, enable_gqa=True))
    return steps


PEERS: Final[dict[str, Callable[[GpuPool], list[Step]]]] = {
    "sdpa": sdpa,
    "flash-attn-3": flash_attention_3,
    "flash-attn": flash_attention_2,
    "flashinfer": flashinfer,
    "vllm": vllm,
    "flex": flex,
}
