"""The tables of a step, from the arguments of flashinfer's `plan`: pages in one list, and masks in one list."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv import PagedBatch
from pagedkv.errors import InvalidRequest
from pagedkv.integrations import stand_in


def batch_of(
    queries: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, lengths: Tensor | None, S: int, device: torch.device
) -> PagedBatch:
    """Return the tables of a step: pages on `device`, seq_lens and cu_seqlens_q on the host.

    queries: int32 [B + 1]. lengths: [B], or None if `last` says them. The tensors are not kept.
    Raises:  InvalidRequest
    """
    stand_in.check_integers(qo_indptr=queries, indptr=indptr, indices=indices, last_page_len=last, seq_lens=lengths)
    ends, last_on_host, B = indptr.cpu().long(), last.cpu().long(), len(last)
    queries = queries.to("cpu", torch.int32, copy=True)
    counts = ends.diff()
    if len(ends) != B + 1 or len(queries) != B + 1 or int(ends[0]) != 0 or (counts < 0).any():
        raise InvalidRequest(
            f"indptr is {ends.tolist()} for {len(queries) - 1} requests and {B} lengths of last pages; it must have "
            "one entry more than there are requests, begin with 0 and never fall"
        )
    if len(indices) < int(ends[-1]):
        raise InvalidRequest(f"indptr ends with {int(ends[-1])} pages, and indices has {len(indices)}")
    if lengths is None:
        is_wrong = (counts > 0) & ((last_on_host < 1) | (last_on_host > S))
        if is_wrong.any():
            at = int(is_wrong.int().argmax())
            raise InvalidRequest(f"last_page_len of request {at} is {int(last_on_host[at])}; it must be 1 to {S}")
        lengths = torch.where(counts > 0, (counts - 1) * S + last_on_host, 0)
    tokens = lengths.to("cpu", torch.int32, copy=True)
    if tokens.shape != counts.shape or (tokens < 0).any() or (tokens > counts * S).any():
        raise InvalidRequest(
            f"seq_lens is {tokens.tolist()}; the requests have {counts.tolist()} pages of {S} tokens by indptr"
        )
    used = indices[: int(ends[-1])]
    if stand_in.is_readable(used) and (used < 0).any():
        raise InvalidRequest(f"indices go down to {int(used.min())}; pages are numbered from 0")
    P = max(1, int(counts.max()) if B else 0)
    places = (ends[:-1, None] + torch.arange(P)).clamp(max=max(0, len(indices) - 1))
    pages = indices.to(device) if len(indices) else torch.zeros(1, dtype=torch.int32, device=device)
    table = pages[places.to(device)].int()
    most = (int(queries.diff().max()), int(tokens.max())) if B else (0, 0)
    return PagedBatch(table, tokens, queries, max_seqlen_q=most[0], max_seqlen_k=most[1])


def tree_mask(mask: Tensor, queries: Tensor, lengths: Tensor) -> Tensor:
    """Return the mask among new tokens, bool [T, most queries of a request]. Raises InvalidRequest for other masks."""
    counts = queries.diff()
    sizes = (counts.long() * lengths.long()).tolist()
    if mask.numel() != sum(sizes):
        raise InvalidRequest(f"custom_mask has {mask.numel()} elements; the requests have {sum(sizes)}")
    parts = torch.split(mask.cpu().bool().flatten(), sizes)
    result = torch.zeros(int(queries[-1]), int(counts.max()) if len(counts) else 0, dtype=torch.bool)
    for b, (first, count, length) in enumerate(zip(queries.tolist(), counts.tolist(), lengths.tolist(), strict=False)):
        shown = parts[b][: count * length].view(count, length)
        before = length - count
        if before < 0:
            raise InvalidRequest(f"custom_mask of request {b}: it has {count} queries and {length} tokens, fewer")
        if not shown[:, :before].all():
            raise InvalidRequest(
                f"custom_mask of request {b} hides some of its {before} tokens before its {count} queries; "
                "kernels here take masks among the new tokens"
            )
        result[first : first + count, :count] = shown[:, before:]
    return result
