"""torch SDPA over gathered pages, for the kit that judges kernels: docs/how-to/test-your-kernels.md.

Run: python -m pagedkv.conformance examples.kernels_of_torch
"""

import torch
import torch.nn.functional as F


def paged_attention(q, layer, batch, causal=True, window=None, alibi_slopes=None):
    """Gather the keys and values of each sequence, token by token, and call SDPA."""
    S, left, right = layer.k.shape[1], None, None
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window - 1, None)
    out, starts = q.new_zeros(*q.shape[:2], layer.v.shape[3]), batch.cu_seqlens_q.tolist()
    for row, start, end, n in zip(batch.block_table, starts, starts[1:], batch.seq_lens.tolist(), strict=False):
        if start == end:  # its row of the table names no frame
            continue
        t = torch.arange(n)
        frames = row[t // S].long()
        t, frames = t[frames >= 0], frames[frames >= 0]  # -1 is a page that was given back
        k, v = (x[frames, t % S].transpose(0, 1) for x in (layer.k, layer.v))
        ahead = t - torch.arange(n - (end - start), n)[:, None]  # how far a key lies after a query
        hidden = (ahead > 0) & causal
        hidden |= False if left is None else ahead < -left
        hidden |= False if right is None else ahead > right
        bias = torch.zeros(1) if alibi_slopes is None else alibi_slopes[:, None, None] * ahead
        mask = bias.masked_fill(hidden, -torch.inf).to(q.dtype).expand(q.shape[1], *ahead.shape)
        queries = q[start:end].transpose(0, 1)
        out[start:end] = F.scaled_dot_product_attention(queries, k, v, mask, enable_gqa=True).transpose(0, 1)
    return out


def write_kv(k, v, layer, slots):
    """Store each token at its slot; a negative slot is skipped."""
    kept, S = slots >= 0, layer.k.shape[1]
    layer.k[slots[kept] // S, slots[kept] % S] = k[kept].to(layer.k.dtype)
    layer.v[slots[kept] // S, slots[kept] % S] = v[kept].to(layer.v.dtype)


def refuses(case):
    """Return the reason why SDPA cannot serve a case."""
    return "SDPA takes K and V of q's dtype" if case.kv else ""
