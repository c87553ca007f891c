"""Cascade attention: a prefix shared by all sequences of a batch is read once; two levels are merged by their LSEs.

    level 1   all new tokens of the batch, as the queries of one sequence, attend to the prefix: its keys are read once
              for each tile of M rows (M / G tokens), not once for each sequence; if tokens are few, keys are split
              (prefill.py)
    level 2   each sequence attends to its keys behind the prefix; sinks, causality and tree mask apply here
    merge     out = sum of e^(lse_i - lse) out_i over the two levels

Bytes     shared * (D + Dv) * sizeof(kv) * ceil(T * G / M), instead of * B; and two outputs of T * H * Dv.
Worth it  if B * shared is much more than the tokens behind it: a system prompt, many samples of one prompt, beams.
Tuned     not on any GPU yet.

Windows and ALiBi depend on the distance between query and key, which differs between the tokens of a tile: a call with
them is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedkv.errors import InvalidRequest
from pagedkv.kernels.triton import backend
from pagedkv.kernels.triton.prefill import paged_prefill

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall


def cascade_attention(call: AttentionCall, shared_tokens: int) -> None:
    """Compute attention for sequences whose first `shared_tokens` tokens lie in the same frames.

    All new tokens must lie behind these tokens.
    shared_tokens: a multiple of block_size; 0 for no prefix. A host int: the engine that forked or matched the prefix
                   knows the number, so no device is read.
    Modifies: call.out, call.lse.
    Raises:   InvalidRequest for windows, ALiBi, `split_tokens`, or a prefix that does not end with a page.
    """
    if not shared_tokens or not call.max_seqlen_q or not call.seq_lens.shape[0] or not call.q.shape[0]:
        return backend.paged_attention(call)
    for name, given in (("window", "window"), ("right", "window"), ("alibi_slopes",) * 2, ("split_tokens",) * 2):
        if getattr(call, name) is not None:
            raise InvalidRequest(f"cascade_attention does not support {given}: call paged_attention")
    S, T = call.k.shape[1], call.q.shape[0]
    if shared_tokens % S or not 0 < shared_tokens <= call.max_seqlen_k:
        raise InvalidRequest(
            f"shared_tokens is {shared_tokens}; it must be a multiple of block_size={S}, up to {call.max_seqlen_k}"
        )
    starts, row = call.cu_seqlens_q, 0 if call.rows is None else call.rows[:1].long()
    prefix = call._replace(
        block_table=call.block_table[row].view(1, -1),
        rows=None,
        seq_lens=torch.full((1,), shared_tokens, dtype=torch.int32, device=call.q.device),
        cu_seqlens_q=torch.stack((starts[0], starts[-1])),
        max_seqlen_q=T,
        max_seqlen_k=shared_tokens,
        causal=False,
        sinks=None,
        tree_mask=None,
        causal_of=None,
        out=torch.empty_like(call.out),
        lse=torch.empty_like(call.lse),
    )
    behind = call._replace(
        block_table=call.block_table[:, shared_tokens // S :],
        seq_lens=call.seq_lens - shared_tokens,
        max_seqlen_k=call.max_seqlen_k - shared_tokens,
        out=torch.empty_like(call.out),
        lse=torch.empty_like(call.lse),
    )
    with backend.on_device_of(call.q):
        paged_prefill(prefix, decoded=0)
    backend.paged_attention(behind)
    out, lse = backend.merge_states(prefix.out, prefix.lse, behind.out, behind.lse)
    # rows past the last sequence are padding and must not be written
    written = torch.arange(T, device=call.q.device) < starts[-1]
    call.out.copy_(torch.where(written[:, None, None], out, call.out))
    call.lse.copy_(torch.where(written[:, None], lse, call.lse))
