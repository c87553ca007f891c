"""The functions of flash_attn, for the kit that judges kernels: docs/how-to/test-your-kernels.md.

They are those of flash_attn on its GPU if it is installed, and else those that pagedkv has under the same names.

Run: python -m pagedkv.conformance examples.kernels_of_flash_attn
"""

import torch

try:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    DEVICE, START = "cuda", {"dtype": "bfloat16", "block_size": 256}  # it has no float32, and no smaller pages
except ImportError:
    from pagedkv.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    DEVICE, START = "cpu", {}


def paged_attention(q, layer, batch, causal=True, window=None, softcap=0.0, alibi_slopes=None):
    """Call flash_attn_with_kvcache if every sequence has one query, and else flash_attn_varlen_func."""
    q, k, v, table, lens, starts = (
        x.to(DEVICE) for x in (q, layer.k, layer.v, batch.block_table, batch.seq_lens, batch.cu_seqlens_q)
    )
    left, right = window if isinstance(window, tuple) else (None if window is None else window - 1, None)
    window_size = (-1 if left is None else left, -1 if right is None else right)
    options = {"causal": causal, "window_size": window_size, "softcap": softcap}
    options["alibi_slopes"] = None if alibi_slopes is None else alibi_slopes.to(DEVICE)
    if len(q) == len(lens) and batch.max_seqlen_q == 1:
        out, lse = flash_attn_with_kvcache(
            q[:, None], k, v, cache_seqlens=lens, block_table=table, return_softmax_lse=True, **options
        )
        return out[:, 0], lse[:, :, 0]
    ends = torch.cat([lens.new_zeros(1), lens.cumsum(0, dtype=torch.int32)])
    longest = batch.max_seqlen_q, batch.max_seqlen_k
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, starts, ends, *longest, block_table=table, return_attn_probs=True, **options
    )
    return out, lse.T


def write_kv(k, v, layer, slots):
    """Append each token to a sequence of one page, the page of its slot."""
    kept, S = slots >= 0, layer.k.shape[1]
    k, v, pages, lens = (x.to(DEVICE) for x in (k[kept], v[kept], slots[kept] // S, slots[kept] % S))
    pools = [x.to(DEVICE) for x in (layer.k, layer.v)]
    k, v = k[:, None], v[:, None]  # keys stand in for queries, which must be there
    flash_attn_with_kvcache(k, *pools, k, v, cache_seqlens=lens.int(), block_table=pages[:, None].int())
    for pool, stored in zip((layer.k, layer.v), pools, strict=True):
        pool.copy_(stored)


def refuses(case):
    """Return the reason why flash_attn cannot serve a case."""
    return "it has no scales of K and V" if case.kv else "its tables have no holes" if case.punched else ""
