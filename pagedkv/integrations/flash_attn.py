"""Functions of flash_attn with its names, arguments and results, by our kernels: on CPUs, and on GPUs it lacks.

    from pagedkv.integrations import flash_attn
    flash_attn.install()                       # from now on `import flash_attn` finds this module
    from flash_attn import flash_attn_with_kvcache

They follow the release `__version__` and differ in this:

- pages may have any number of tokens, heads any size, and K and V any dtype that `KVLayer` has without scales
- inference only: no dropout, and tensors that require gradients are refused
- a query that sees nothing has the LSE -inf
- num_splits and deterministic change nothing
- on a CPU, wrong tables are refused before anything is stored; on a GPU, a new token without a page is not stored, and
  a position behind the rotary table is turned as the last one
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pagedkv import KVLayer, PagedBatch, write_kv
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
    cache_leftpad:   the first token of each sequence in its row of the cache, without a block table
    rotary_cos, rotary_sin: turn k at positions from cache_seqlens on. They turn q at the same positions if it is causal
                     or has a window, and else at cache_seqlens. With cache_leftpad, position 0 is that of the row.
    window_size:     positions before and after a query that it sees; -1: all
    Shapes:   q [B, L, H, D]; k [B, N, K, D], v [B, N, K, Dv]; cache_seqlens, cache_batch_idx, cache_leftpad int32 [B]
              k_cache [F, S, K, D] and block_table int32 [B, P], or without it [rows, tokens, K, D]; v_cache with Dv
              rotary_cos, rotary_sin [positions, R / 2]; alibi_slopes [H] or [B, H]
              returns out [B, L, H, Dv]; with return_softmax_lse also float32 [B, H, L], natural logarithm
    Modifies: k_cache and v_cache, where k and v are stored
    Raises:   InvalidRequest; KernelUnavailable
    """
    if (k is None) is not (v is None) or (k is not None and cache_seqlens is None):
        raise InvalidRequest("k and v must be given together, and with cache_seqlens, which says where to store them")
    if (rotary_cos is None) is not (rotary_sin is None) or (rotary_cos is not None and k is None):
        raise InvalidRequest("rotary_cos and rotary_sin must be given together, and with k and v")
    B, L = _batch_and_length(q)
    tables = (cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    k_cache, v_cache, table, lengths = _tables(B, k_cache, v_cache, *tables)
    layer = stand_in.layer_of(k_cache, v_cache)
    batch = _batch(table, lengths if k is None else lengths + k.shape[1], L, k_cache.shape[1])
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, batch)
    calls = _calls(layer, batch, options)
    if k is not None and v is not None:
        stand_in.check_call(q.flatten(0, 1), layer, **calls[0][2])
        stand_in.check_shapes(k=(k, (B, k.shape[1], *k_cache.shape[2:])), v=(v, (*k.shape[:3], v_cache.shape[3])))
        if rotary_cos is not None and rotary_sin is not None:
            is_local = causal or tuple(window_size) != (-1, -1)
            ends = lengths if cache_leftpad is None else lengths + cache_leftpad.int()  # places in a row of the cache
            q_at = _after(ends, L) if is_local else ends[:, None].expand(B, L)
            q = _turned(q, rotary_cos, rotary_sin, q_at, rotary_interleaved)
            k = _turned(k, rotary_cos, rotary_sin, _after(ends, k.shape[1]), rotary_interleaved)
        _append(k, v, layer, table, lengths)
    out, lse = _attend(q.flatten(0, 1), layer, calls)
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
             alibi_slopes [H] or [B, H]
             returns out [T, H, Dv]; with return_attn_probs also the LSE float32 [H, T], natural logarithm, and an
             empty tensor: the probabilities belong to dropout
    Raises:  InvalidRequest; KernelUnavailable
    """
    stand_in.refuse("flash_attn", dropout_p=dropout_p)
    stand_in.check_integers(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_table=block_table)
    lengths = cu_seqlens_k.int().diff()
    B = len(lengths)
    if block_table is None:
        layer, block_table = _paged(k, v, cu_seqlens_k, lengths, max_seqlen_k)
    else:
        layer = stand_in.layer_of(k, v)
    stand_in.check_shapes(cu_seqlens_q=(cu_seqlens_q, (B + 1,)), block_table=(block_table, (B, *block_table.shape[1:])))
    batch = PagedBatch(block_table.int(), lengths, cu_seqlens_q.int(), int(max_seqlen_q), int(max_seqlen_k))
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, batch)
    out, lse = _attend(q, layer, _calls(layer, batch, options))
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

    Shapes:  q [B, L, H, D]; k [B, N, K, D], v [B, N, K, Dv]; alibi_slopes [H] or [B, H]
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
    if slopes is not None and slopes.dim() == 2:
        stand_in.check_shapes(alibi_slopes=(slopes, (len(batch.seq_lens), slopes.shape[1])))
    return {
        "scale": scale, "causal": bool(causal), "window": window, "softcap": stand_in.softcap_of(softcap),
        "alibi_slopes": slopes,
    }  # fmt: skip


_Call = tuple[slice, PagedBatch, dict[str, Any]]
"""Rows of q, their batch, and the options of `paged_attention`."""


def _calls(layer: KVLayer, batch: PagedBatch, options: dict[str, Any]) -> list[_Call]:
    """Return the calls that make the result, checked: one, or one for each sequence if each has slopes of its own."""
    slopes = options["alibi_slopes"]
    if slopes is None or slopes.dim() == 1 or not len(slopes):
        return [(slice(None), stand_in.served(layer, batch, **options), options)]
    calls = []
    for b, (first, end) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
        starts = torch.tensor([0, end - first], dtype=torch.int32, device=slopes.device)
        one = dataclasses.replace(
            batch, block_table=batch.block_table[b : b + 1], seq_lens=batch.seq_lens[b : b + 1], cu_seqlens_q=starts
        )
        mine = {**options, "alibi_slopes": slopes[b]}
        calls.append((slice(first, end), stand_in.served(layer, one, **mine), mine))
    return calls


def _attend(q: Tensor, layer: KVLayer, calls: list[_Call]) -> tuple[Tensor, Tensor]:
    q = q if q.stride(-1) == 1 else q.contiguous()
    if len(calls) == 1:
        return stand_in.attend(q, layer, calls[0][1], **calls[0][2])
    out = q.new_zeros(*q.shape[:2], layer.v.shape[-1])
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    for rows, batch, options in calls:
        out[rows], lse[rows] = stand_in.attend(q[rows], layer, batch, **options)
    return out, lse


def _tables(
    B: int,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: int | Tensor | None,
    rows: Tensor | None,
    leftpad: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the cache as pages, the pages of each sequence, int32 [B, P], and its tokens, int32 [B]."""
    if block_table is not None and (rows is not None or leftpad is not None):
        name = "cache_leftpad" if rows is None else "cache_batch_idx"
        raise InvalidRequest(f"{name} is given beside block_table; flash_attn serves one of them in a call")
    device = k_cache.device
    stand_in.check_shapes(
        cache_batch_idx=(rows, (B,)), cache_leftpad=(leftpad, (B,)),
        block_table=(block_table, (B, *(() if block_table is None else block_table.shape[1:]))),
        cache_seqlens=(cache_seqlens if isinstance(cache_seqlens, Tensor) else None, (B,)),
    )  # fmt: skip
    stand_in.check_integers(
        cache_batch_idx=rows, cache_leftpad=leftpad, block_table=block_table,
        cache_seqlens=cache_seqlens if isinstance(cache_seqlens, Tensor) else None,
    )  # fmt: skip
    if leftpad is not None and stand_in.is_readable(leftpad) and B and int(leftpad.min()) < 0:
        raise InvalidRequest(f"cache_leftpad goes down to {int(leftpad.min())}; it must be at least 0")
    if block_table is None and not k_cache.shape[1] and k_cache.dim() == 4:  # no keys at all: a page cannot be empty
        k_cache, v_cache, cache_seqlens = *(x.new_zeros(len(x), 1, *x.shape[2:]) for x in (k_cache, v_cache)), 0
    if block_table is None:
        rows = torch.arange(B, device=device) if rows is None else rows
        if leftpad is not None:
            k_cache, v_cache, block_table = _pages_of_one_token(k_cache, v_cache, rows, leftpad)
        else:
            block_table = rows[:, None]
    if cache_seqlens is None:
        cache_seqlens = block_table.shape[1] * k_cache.shape[1]
    if isinstance(cache_seqlens, Tensor):
        lengths = cache_seqlens.int()
    else:
        lengths = torch.full((B,), cache_seqlens, dtype=torch.int32, device=device)
    lengths = lengths if leftpad is None else lengths - leftpad.int()
    if B and stand_in.is_readable(lengths) and int(lengths.min()) < 0:
        raise InvalidRequest(
            f"sequence {int(lengths.argmin())} has {int(lengths.min())} tokens in the cache, by cache_seqlens"
            f"{'' if leftpad is None else ' and cache_leftpad'}; it must have at least 0"
        )
    return k_cache, v_cache, block_table.int(), lengths


def _after(lengths: Tensor, count: int) -> Tensor:
    """Return the positions of `count` tokens behind each sequence, int64 [B, count]."""
    return lengths[:, None].long() + torch.arange(count, device=lengths.device)


def _append(k: Tensor, v: Tensor, layer: KVLayer, block_table: Tensor, lengths: Tensor) -> None:
    """Store k and v, [B, N, K, D], behind the tokens of each sequence."""
    page_size, num_pages = layer.k.shape[1], block_table.shape[1]
    positions = _after(lengths, k.shape[1])
    frames = block_table.long().gather(1, (positions // page_size).clamp(max=num_pages - 1))
    fits = positions < num_pages * page_size
    slots = torch.where(fits, frames * page_size + positions % page_size, -1).flatten()
    write_kv(k.flatten(0, 1), v.flatten(0, 1), layer, slots)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Return x [B, L, H, D], each pair of dims (a, b) turned to (ac - bs, bc + as), by the positions [B, L]."""
    if 2 * cos.shape[-1] > x.shape[-1] or cos.shape != sin.shape:
        raise InvalidRequest(
            f"rotary_cos is {list(cos.shape)} and rotary_sin {list(sin.shape)}; both must be [positions, R / 2], with "
            f"R up to {x.shape[-1]}"
        )
    if stand_in.is_readable(positions) and positions.numel() and int(positions.max()) >= len(cos):
        raise InvalidRequest(f"position {int(positions.max())} has no row in rotary_cos, which has {len(cos)}")
    at = positions.long().clamp(max=len(cos) - 1)  # on a GPU they are not read, because the host would wait
    c, s = (table[at].float().unsqueeze(2) for table in (cos, sin))
    width = 2 * cos.shape[-1]
    turned = x.clone()
    head = x[..., :width].float()
    a, b = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    pair = (a * c - b * s, b * c + a * s)
    turned[..., :width] = (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)
    return turned


def _pages_of_one_token(
    k_cache: Tensor, v_cache: Tensor, rows: Tensor, leftpad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cache as pages of one token, and the pages from `leftpad` on of each sequence; -1 past its row."""
    tokens = k_cache.shape[1]
    try:
        pages = [x.view(-1, 1, *x.shape[2:]) for x in (k_cache, v_cache)]
    except RuntimeError:
        raise InvalidRequest("cache_leftpad needs a cache whose rows follow each other in memory") from None
    columns = torch.arange(tokens, device=leftpad.device) + leftpad.long()[:, None]
    return pages[0], pages[1], torch.where(columns < tokens, rows.long()[:, None] * tokens + columns, -1)


def _paged(k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, max_seqlen_k: int) -> tuple[KVLayer, Tensor]:
    """Return a layer that holds k and v, [N, K, D], and its block table."""
    B, device = len(lengths), k.device
    if stand_in.is_readable(starts):
        first, end = (int(starts[0]), int(starts[-1])) if B else (0, 0)
        if first < 0 or end > len(k) or (lengths < 0).any():
            raise InvalidRequest(
                f"cu_seqlens_k is {starts.tolist()}; it must rise from 0 to at most {len(k)}, the keys"
            )
        if B == 1 and end > first:
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
