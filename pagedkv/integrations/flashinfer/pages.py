"""The paged cache of flashinfer: K and V of a layer, and where new tokens are stored."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv import KVLayer, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.integrations import stand_in


def layer_of(cache: Tensor | tuple[Tensor, Tensor], kv_layout: str) -> KVLayer:
    """Return K and V of a layer. Nothing is copied.

    cache: [F, 2, S, K, D], or a tuple of two [F, S, K, D]. With HND, K comes before S.
    """
    if isinstance(cache, Tensor):
        if cache.dim() != 5 or cache.shape[1] != 2:
            raise InvalidRequest(
                f"paged_kv_cache is {list(cache.shape)}; it must be [pages, 2, ...] of 5 dims, or a tuple"
            )
        return stand_in.layer_of(cache[:, 0], cache[:, 1], kv_layout, owner=cache)
    if not isinstance(cache, tuple | list) or len(cache) != 2 or not all(isinstance(x, Tensor) for x in cache):
        raise InvalidRequest("paged_kv_cache must be a tensor [pages, 2, ...], or a tuple of K and V")
    k, v = cache
    return stand_in.layer_of(k, v, kv_layout)


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Store new keys and values, each at a position of a request. A request < 0 is skipped.

    Shapes:   append_key [T, K, D], append_value [T, K, Dv]; batch_indices, positions int32 [T]
    Modifies: paged_kv_cache
    Raises:   InvalidRequest for other shapes, and for a position behind the pages of its request; on a GPU, the token
              is skipped
    """
    layer, shape = layer_of(paged_kv_cache, kv_layout), (len(append_key),)
    stand_in.check_shapes(batch_indices=(batch_indices, shape), positions=(positions, shape))
    stand_in.check_integers(
        batch_indices=batch_indices, positions=positions, kv_indices=kv_indices, kv_indptr=kv_indptr
    )
    S, B, request, position = layer.k.shape[1], len(kv_indptr) - 1, batch_indices.long(), positions.long()
    is_one = request >= 0
    if B < 1 or not len(kv_indices):
        is_known = torch.zeros_like(is_one)
        slots = torch.full_like(position, -1)
    else:
        bounds, row = kv_indptr.long(), request.clamp(0, B - 1)
        at = bounds[row] + torch.div(position, S, rounding_mode="floor")
        pages = kv_indices.long()[at.clamp(0, len(kv_indices) - 1)]
        is_known = (request < B) & (position >= 0) & (at < bounds[row + 1]) & (pages >= 0)
        slots = torch.where(is_one & is_known, pages * S + position % S, -1)
    is_wrong = is_one & ~is_known
    if stand_in.is_readable(is_wrong) and is_wrong.any():
        t = int(is_wrong.int().argmax())
        raise InvalidRequest(
            f"token {t} has position {int(position[t])} of request {int(request[t])}, for which kv_indptr and "
            "kv_indices have no page; count the new tokens in them"
        )
    write_kv(append_key, append_value, layer, slots)


def get_batch_indices_positions(append_indptr: Tensor, seq_lens: Tensor, nnz: int) -> tuple[Tensor, Tensor]:
    """Return the request and the position of each of `nnz` new tokens, int32 [nnz]; -1 and 0 past the last one.

    append_indptr: int32 [B + 1], of the new tokens. seq_lens: [B], which count them.
    """
    token = torch.arange(nnz, device=append_indptr.device)
    ends = append_indptr[1:].long().contiguous()
    request = torch.searchsorted(ends, token, right=True)
    is_one = request < len(ends)
    request = torch.where(is_one, request, -1)
    position = torch.where(is_one, seq_lens.long()[request] - ends[request] + token, 0) if len(ends) else token * 0
    return request.int(), position.int()


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Return the tokens of each request, [B]."""
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len
