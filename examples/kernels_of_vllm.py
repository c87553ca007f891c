"""vLLM's CPU attention, for the kit that judges kernels: docs/how-to/test-your-kernels.md. It runs where vLLM does.

Run: python -m pagedkv.conformance examples.kernels_of_vllm
"""

import torch
import vllm._custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

START = {"block_size": 32}


def paged_attention(q, layer, batch, causal=True, window=None, softcap=0.0, sinks=None, alibi_slopes=None):
    """Move each frame into a pool of vLLM with its own store, and attend from there."""
    (F, S, K, D), H = layer.k.shape, q.shape[1]
    isa = _get_attn_isa(q.dtype, S, D)
    k, v = torch.zeros(F, K, 2 * S, D, dtype=q.dtype).chunk(2, dim=2)  # its own layout, which depends on the processor
    tokens = [x.reshape(F * S, K, D) for x in (layer.k, layer.v)]
    ops.cpu_attn_reshape_and_cache(*tokens, k, v, torch.arange(F * S), isa)
    lens, starts, out = batch.seq_lens, batch.cu_seqlens_q, torch.zeros_like(q)
    width = -1 if window is None else window
    shape = (len(lens), H, K, D, lens, q.dtype, starts, causal, width, isa, True)
    metadata = ops.cpu_attn_get_scheduler_metadata(*shape)
    ops.cpu_attention_with_kv_cache(
        q, k, v, out, starts, lens, D**-0.5, causal, alibi_slopes, width, batch.block_table, softcap, metadata,
        None if sinks is None else sinks.to(q.dtype),
    )  # fmt: skip
    return out


def write_kv(k, v, layer, slots):
    """Refuse: the layout is known to vLLM alone, and each case of attention begins with a store."""
    raise NotImplementedError("paged_attention moves the frames with vLLM's store")


def refuses(case):
    """Return the reason why vLLM cannot serve a case."""
    if case.kv:
        return "the example moves no quantised K and V"
    if isinstance(case.window, tuple):
        return "its window has one side"
    if case.dims[0] != case.dims[1]:
        return "its K and V have one head dim"
    return "its pages have a multiple of 16 tokens" if case.block_size % 16 else ""
