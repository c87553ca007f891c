"""pagedkv's kernels on an engine's own pool and block table: no memory manager of pagedkv, only tensors.

Run: python examples/foreign_tensors.py
"""

import torch
import torch.nn.functional as F

from pagedkv import KVLayer, PagedBatch, bind_attention, bind_write

NUM_FRAMES, S, K, H, D = 16, 4, 2, 4, 32  # frames, block size, key heads, query heads, head dim
torch.manual_seed(0)

# The engine's memory of one layer, in the layout that vLLM calls NHD. Any strides do if the last dim is contiguous.
pool = torch.zeros(2, NUM_FRAMES, S, K, D)
layer = KVLayer(k=pool[0], v=pool[1])
attend, write = bind_attention(layer), bind_write(layer)  # the layer is checked here, once

# The engine's tables: row b is sequence b, and its pages are anywhere. Entries beyond the last page are never read.
block_table = torch.tensor([[7, 2, 9], [0, 5, 2**30]], dtype=torch.int32)


def batch_of(before: list[int], new: list[int]) -> PagedBatch:
    """Describe a step that adds `new[b]` tokens to sequence b, which has `before[b]` tokens."""
    positions = [torch.arange(start, start + count) for start, count in zip(before, new, strict=True)]
    slots = [block_table[b, p // S].long() * S + p % S for b, p in enumerate(positions)]  # where each token is stored
    lengths = [start + count for start, count in zip(before, new, strict=True)]
    return PagedBatch(
        block_table=block_table,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),  # KV length, the new tokens included
        cu_seqlens_q=torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32),
        slots=torch.cat(slots),
        positions=torch.cat(positions),
        max_seqlen_q=max(new),  # upper bounds, as Python ints: no call waits for the device
        max_seqlen_k=max(lengths),
    )


# Prefill 9 tokens of sequence 0 and 5 of sequence 1, then decode one token of each.
history: list[list[torch.Tensor]] = [[], []]  # the same keys and values without pages, to check against
for before, new in (([0, 0], [9, 5]), ([9, 5], [1, 1])):
    batch = batch_of(before, new)
    q, k, v = torch.randn(sum(new), H, D), torch.randn(sum(new), K, D), torch.randn(sum(new), K, D)
    write(k, v, batch)
    out = attend(q, batch)
    for b, (start, end) in enumerate(batch.cu_seqlens_q.unfold(0, 2, 1).tolist()):
        history[b].append(torch.stack([k[start:end], v[start:end]]))
        keys, values = torch.cat(history[b], dim=1).transpose(1, 2)  # [K, length, D] each
        mask = torch.arange(keys.shape[1]) <= torch.arange(before[b], before[b] + new[b])[:, None]
        queries = q[start:end].transpose(0, 1)
        dense = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        error = (out[start:end] - dense.transpose(0, 1)).abs().max().item()
        assert error < 1e-5
        print(f"sequence {b}: {new[b]} queries over {keys.shape[1]} tokens, largest error {error:.1e}")
