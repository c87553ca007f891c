"""Functions of flash_attn with its names, arguments and results, by our kernels: on CPUs, and on GPUs it lacks.

    from pagedkv.integrations import flash_attn
    flash_attn.install()                       # from now on `import flash_attn` finds this module
    from flash_attn import flash_attn_with_kvcache

They follow the release `__version__` and differ in this:

- pages may have any number of tokens, heads any size, and K and V any dtype that `KVLayer` has without scales
- inference only: no dropout, and tensors that require gradients are refused
- a query that sees nothing has the LSE -inf
- num_splits and deterministic change nothing
- refused: rotary angles (turn q and k before the call), cache_leftpad, and ALiBi slopes for each sequence
- on a CPU, wrong tables are refused before anything is stored; on a GPU, a new token without a page is not stored
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagedkv import KVLayer, PagedBatch, paged_attention, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.integrations import stand_in

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "install"]
__version__ = "2.8.3"

_RAGGED_PAGE = 64
"""Tokens of a page to which K and V without pages are copied."""


def install(replace: bool = False) -> None:
    """Let `import flash_attn` find this module.

    replace: also if flash_attn itself is installed
    Raises:  InvalidRequest if it is installed and `replace` is False
    """
    stand_in.install("flash_attn", __name__, ["flash_attn_interface"], replace)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attend to cached tokens, after storing new keys and values if there are any.

    cache_seqlens:   tokens in the cache before this call; None: all that it can hold, without k and v
    cache_batch_idx: the row of the cache of each sequence, without a block table
    window_size:     positions before and after a query that it sees; -1: all
    Shapes:   q [B, L, H, D]; k [B, N, K, D], v [B, N, K, Dv]; cache_seqlens, cache_batch_idx int32 [B]
              k_cache [F, S, K, D] and block_table int32 [B, P], or without it [rows, tokens, K, D]; v_cache with Dv
              alibi_slopes [H]
              returns out [B, L, H, Dv]; with return_softmax_lse also float32 [B, H, L], natural logarithm
    Modifies: k_cache and v_cache, where k and v are stored
    Raises:   InvalidRequest; KernelUnavailable
    """
    if (k is None) is not (v is None) or (k is not None and cache_seqlens is None):
        raise InvalidRequest("k and v must be given together, and with cache_seqlens, which says where to store them")
    stand_in.refuse("flash_attn", rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad)
    B, L = _batch_and_length(q)
    k_cache, v_cache, table, lengths = _tables(B, k_cache, v_cache, (cache_seqlens, cache_batch_idx, block_table))
    layer = stand_in.layer_of(k_cache, v_cache)
    batch = _batch(table, lengths if k is None else lengths + k.shape[1], L, k_cache.shape[1])
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, batch)
    batch = stand_in.served(layer, batch, **options)
    if k is not None and v is not None:
        stand_in.check_call(q.flatten(0, 1), layer, **options)
        stand_in.check_shapes(k=(k, (B, k.shape[1], *k_cache.shape[2:])), v=(v, (*k.shape[:3], v_cache.shape[3])))
        _append(k, v, layer, table, lengths)
    out, lse = paged_attention(_whole_heads(q.flatten(0, 1)), layer, batch, return_lse=True, **options)
    out = out.view(B, L, *out.shape[1:])
    return (out, lse.view(B, L, *lse.shape[1:]).transpose(1, 2)) if return_softmax_lse else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attend from sequences of different lengths, one after the other in q.

    Without a block table, K and V lie one after the other too, and are copied into pages unless there is one sequence.
    Shapes:  q [T, H, D]; cu_seqlens_q, cu_seqlens_k int32 [B + 1], from 0
             k [F, S, K, D], v [F, S, K, Dv] and block_table int32 [B, P], or without it k [N, K, D], v [N, K, Dv]
             alibi_slopes [H]
             returns out [T, H, Dv]; with return_attn_probs also the LSE float32 [H, T], natural logarithm, and an
             empty tensor: the probabilities belong to dropout
    Raises:  InvalidRequest; KernelUnavailable
    """
    stand_in.refuse("flash_attn", dropout_p=dropout_p)
    stand_in.check_integers(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_table=block_table)
    lengths = cu_seqlens_k.int().diff()
    B = len(lengths)
    if block_table is None:
        layer, block_table = _paged(k, v, cu_seqlens_k, max_seqlen_k)
    else:
        layer = stand_in.layer_of(k, v)
    pages = block_table.shape[-1:]
    stand_in.check_shapes(cu_seqlens_q=(cu_seqlens_q, (B + 1,)), block_table=(block_table, (B, *pages)))
    batch = PagedBatch(block_table.int(), lengths, cu_seqlens_q.int(), int(max_seqlen_q), int(max_seqlen_k))
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, batch)
    batch = stand_in.served(layer, batch, **options)
    out, lse = paged_attention(_whole_heads(q), layer, batch, return_lse=True, **options)
    return (out, lse.T, out.new_empty(0)) if return_attn_probs else out


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend from sequences of one length.

    Shapes:  q [B, L, H, D]; k [B, N, K, D], v [B, N, K, Dv]; alibi_slopes [H]
             returns out [B, L, H, Dv]; with return_attn_probs also the LSE [B, H, L] and an empty tensor
    Raises:  InvalidRequest; KernelUnavailable
    """
    stand_in.refuse("flash_attn", dropout_p=dropout_p)
    B, _ = _batch_and_length(q)
    stand_in.check_shapes(k=(k, (B, *k.shape[1:])), v=(v, (*k.shape[:3], *v.shape[3:])))
    out, lse = flash_attn_with_kvcache(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, return_softmax_lse=True,
    )  # fmt: skip
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


def _batch_and_length(q: Tensor) -> tuple[int, int]:
    if q.dim() != 4:
        raise InvalidRequest(f"q is {list(q.shape)}; it must be [sequences, tokens, heads, dims]")
    return q.shape[0], q.shape[1]


def _batch(table: Tensor, lengths: Tensor, L: int, page_size: int) -> PagedBatch:
    """Return the tables of sequences with L queries each."""
    B = len(lengths)
    starts = torch.arange(B + 1, dtype=torch.int32, device=lengths.device) * L
    longest = int(lengths.max()) if B and stand_in.is_readable(lengths) else table.shape[1] * page_size
    return PagedBatch(table, lengths, starts, max_seqlen_q=L, max_seqlen_k=longest)


def _options(
    scale: float | None, causal: bool, window_size: Sequence[int], softcap: float, slopes: Tensor | None,
    batch: PagedBatch,
) -> dict[str, Any]:  # fmt: skip
    """Return the options of `paged_attention`."""
    if len(window_size) != 2:
        raise InvalidRequest(f"window_size is {window_size!r}; it must be (left, right), -1 for all positions")
    left, right = window_size
    window: Any = None
    if left >= 0 or (right >= 0 and not causal):
        window = left + 1 if causal else (max(left, -1), max(right, -1))
    if slopes is not None and not causal and batch.max_seqlen_q > 1 and right != 0:
        raise InvalidRequest(
            "alibi_slopes with queries that see later keys: flash_attn lowers the scores of these too, and the kernels "
            "here raise them; use causal=True"
        )
    return {
        "scale": scale, "causal": bool(causal), "window": window, "softcap": stand_in.softcap_of(softcap),
        "alibi_slopes": slopes,
    }  # fmt: skip


def _whole_heads(q: Tensor) -> Tensor:
    """Return q with the dims of a head side by side, as the kernels read it."""
    return q if q.stride(-1) == 1 else q.contiguous()


def _tables(
    B: int, k_cache: Tensor, v_cache: Tensor, tables: tuple[int | Tensor | None, Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the cache as pages, the pages of each sequence, int32 [B, P], and its tokens, int32 [B].

    tables: cache_seqlens, cache_batch_idx and block_table
    """
    cache_seqlens, rows, block_table = tables
    if block_table is not None and rows is not None:
        raise InvalidRequest("cache_batch_idx is given with block_table; flash_attn serves one of them in a call")
    given = cache_seqlens if isinstance(cache_seqlens, Tensor) else None
    stand_in.check_shapes(
        cache_batch_idx=(rows, (B,)), cache_seqlens=(given, (B,)),
        block_table=(block_table, (B, *(() if block_table is None else block_table.shape[-1:]))),
    )  # fmt: skip
    stand_in.check_integers(cache_batch_idx=rows, block_table=block_table, cache_seqlens=given)
    if block_table is None and not k_cache.shape[1] and k_cache.dim() == 4:  # no keys at all: a page cannot be empty
        k_cache, v_cache, cache_seqlens = *(x.new_zeros(len(x), 1, *x.shape[2:]) for x in (k_cache, v_cache)), 0
    if block_table is None:
        block_table = (torch.arange(B, device=k_cache.device) if rows is None else rows)[:, None]
    if cache_seqlens is None:
        cache_seqlens = block_table.shape[1] * k_cache.shape[1]
    if isinstance(cache_seqlens, Tensor):
        lengths = cache_seqlens.int()
    else:
        lengths = torch.full((B,), cache_seqlens, dtype=torch.int32, device=k_cache.device)
    if B and stand_in.is_readable(lengths) and int(lengths.min()) < 0:
        raise InvalidRequest(
            f"sequence {int(lengths.argmin())} has {int(lengths.min())} tokens in the cache, by cache_seqlens; it must "
            "have at least 0"
        )
    return k_cache, v_cache, block_table.int(), lengths


def _append(k: Tensor, v: Tensor, layer: KVLayer, block_table: Tensor, lengths: Tensor) -> None:
    """Store k and v, [B, N, K, D], behind the tokens of each sequence."""
    page_size, num_pages = layer.k.shape[1], block_table.shape[1]
    positions = lengths[:, None].long() + torch.arange(k.shape[1], device=lengths.device)
    frames = block_table.long().gather(1, (positions // page_size).clamp(max=num_pages - 1))
    fits = positions < num_pages * page_size
    slots = torch.where(fits, frames * page_size + positions % page_size, -1).flatten()
    write_kv(k.flatten(0, 1), v.flatten(0, 1), layer, slots)


def _paged(
    k: Tensor, v: Tensor, starts: Tensor, max_seqlen_k: int, *, may_be_one: bool = True
) -> tuple[KVLayer, Tensor]:
    """Return a layer that holds k and v, [N, K, D], and its block table.

    may_be_one: one sequence alone may be one page, which copies nothing; its bits may differ from those in a batch
    """
    lengths = starts.int().diff()
    B, device = len(lengths), k.device
    if stand_in.is_readable(starts):
        first, end = (int(starts[0]), int(starts[-1])) if B else (0, 0)
        if first < 0 or end > len(k) or (lengths < 0).any():
            raise InvalidRequest(
                f"sequences begin at keys {starts.tolist()}; they must rise from 0 to at most {len(k)}, the keys"
            )
        if may_be_one and B == 1 and end > first:
            return KVLayer(k[None, first:], v[None, first:]), torch.zeros(1, 1, dtype=torch.int32)
    S = _RAGGED_PAGE
    pages = torch.div(lengths + S - 1, S, rounding_mode="floor")
    first_page = pages.cumsum(0) - pages
    token = torch.arange(len(k), device=device)
    sequence = torch.searchsorted(starts[1:].long().contiguous(), token, right=True).clamp(max=max(0, B - 1))
    layer = KVLayer(*(x.new_empty(len(k) // S + max(1, B), S, *x.shape[1:]) for x in (k, v)))
    if B:
        slots = first_page[sequence] * S + token - starts[sequence]
        is_used = (token >= starts[0]) & (token < starts[-1])
        write_kv(k, v, layer, torch.where(is_used, slots, -1).long())
    columns = torch.arange(max(1, -(-max_seqlen_k // S)), device=device)
    return layer, (first_page[:, None] + columns).int()
