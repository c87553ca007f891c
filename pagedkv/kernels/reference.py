"""The definition: paged attention in plain torch, on any device. Every faster kernel is compared with this one.

Query i of a sequence with n tokens, the last m of them new, is at position p = n - m + i. For a key at t < n
in a page that is not a hole:

    s[t]    = scale * q . k[t];   c * tanh(s / c) if softcap c;   + slope_h * (t - p) if ALiBi
    visible = t <= p (causal),  or  tree_mask[i, t - (n - m)] for new tokens (tree),  or  always
              and t > p - window and t <= p + right
    lse     = ln(sum over visible t of exp(s[t]) + exp(sink_h));   out = sum of exp(s[t] - lse) * v[t]

Sequences with equally many queries and similar lengths are computed together, their keys gathered token by token
through the page table into a zero-padded [b, n, K, D]: no slot beyond a sequence, no hole and no padded table
entry is read. With `split_tokens` each sequence stands alone and its keys are cut at fixed positions: then no result
depends, in a single bit, on what else is in the batch. Keys and values that are stored rotated stay so: queries are
rotated, and the results are rotated back (quant.py). This file trusts its arguments (checks.py has seen them).
Memory: a group's keys and values in float32 (float64 if q is), and the scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from pagedkv.kernels import checks, quant
from pagedkv.kernels.layout import bounds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedkv.kernels.args import AttentionCall, GatherCall, GatherSource, WriteCall
    from pagedkv.kernels.case import Case

SCORES_AT_ONCE: Final = 1 << 24
"""Queries are taken in chunks so that at most about this many scores exist at a time (64 MiB in float32)."""

KEYS_AT_ONCE: Final = 1 << 18
"""The most elements of keys in a group of sequences: a larger group no longer fits a cache."""


class _Group(NamedTuple):
    """Sequences with equally many queries: `queries` int64 [b, m] rows of q, `lens`, `table_rows` int64 [b].

    causal: bool [b] or []
    """

    queries: Tensor
    lens: Tensor
    table_rows: Tensor
    causal: Tensor


class _KV(NamedTuple):
    """Keys and values of a group by position: k [b, K, n, D], v [b, K, n, Dv], 0 where `present` [b, n] is False."""

    k: Tensor
    v: Tensor
    present: Tensor


def objections(case: Case) -> list[str]:
    """Return an empty list: the reference serves every case on every device."""
    return []


def paged_attention(call: AttentionCall, dtype: torch.dtype | None = None) -> None:
    """Attend, as the head of this file defines it, with sums in `dtype`. Modifies: call.out, call.lse.

    Raises: InvalidRequest, on the CPU, for tables that name what is not there
    """
    if call.q.device.type == "cpu":
        checks.table_values(call)
    dtype = dtype or (torch.float64 if call.q.dtype == torch.float64 else torch.float32)
    for group in _groups(call):
        kv = _gather(call, group, dtype)
        b, m = group.queries.shape
        at_once = max(1, SCORES_AT_ONCE // max(1, b * call.q.shape[1] * kv.present.shape[1]))
        for first in range(0, m, at_once):
            out, lse = _attend(call, group, kv, slice(first, first + at_once))
            call.out[group.queries[:, first : first + at_once]] = out.to(call.out.dtype)
            call.lse[group.queries[:, first : first + at_once]] = lse.to(call.lse.dtype)


def _groups(call: AttentionCall) -> Iterator[_Group]:
    """Return the sequences that have queries in groups: the longest is at most about twice the shortest of a group."""
    counts, lens = call.cu_seqlens_q.diff().tolist(), call.seq_lens.tolist()
    tokens_at_once = KEYS_AT_ONCE // (call.k.shape[2] * call.q.shape[2])
    members: list[int] = []
    for b in sorted((b for b, m in enumerate(counts) if m), key=lambda b: (counts[b], lens[b])):
        if members:
            alike = counts[b] == counts[members[0]] and lens[b] <= 2 * lens[members[0]] + 64
            if call.split_tokens or not alike or (len(members) + 1) * lens[b] > tokens_at_once:
                yield _group(call, members, counts[members[0]])
                members = []
        members.append(b)
    if members:
        yield _group(call, members, counts[members[0]])


def _group(call: AttentionCall, members: list[int], m: int) -> _Group:
    index = torch.tensor(members, device=call.q.device)
    queries = call.cu_seqlens_q[index].long()[:, None] + torch.arange(m, device=call.q.device)
    rows = index if call.rows is None else call.rows[index].long()
    causal = torch.tensor(call.causal, device=index.device) if call.causal_of is None else call.causal_of[index]
    return _Group(queries, call.seq_lens[index].long(), rows, causal)


def _gather(call: AttentionCall, group: _Group, dtype: torch.dtype) -> _KV:
    """The keys and values of `group`, reading exactly the slots that hold its tokens."""
    S = call.k.shape[1]
    t = torch.arange(int(group.lens.max()), device=call.q.device)
    present = t < group.lens[:, None]
    b, position = present.nonzero(as_tuple=True)
    frame = call.block_table[group.table_rows[b], position // S].long()
    if (frame < 0).any():
        kept = frame >= 0
        present[b, position] = kept
        b, position, frame = b[kept], position[kept], frame[kept]
    at = (frame, position % S)

    def padded(values: Tensor) -> Tensor:  # [tokens, K, D]
        if len(b) == present.numel():  # nothing to pad: the tokens are in order already
            return values.view(*present.shape, *values.shape[1:]).transpose(1, 2)
        filled = values.new_zeros(len(present), values.shape[1], len(t), values.shape[2])
        filled.transpose(1, 2)[b, position] = values
        return filled

    k, v = _stored(call, at, dtype)
    return _KV(padded(k), padded(v), present)


def _stored(call: AttentionCall | GatherSource, at: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The keys [tokens, K, D] and values [tokens, K, Dv] at `at`, in `dtype`, rotated if they are stored so."""
    k = quant.load(call.k, call.k_scale, at, dtype, is_value=False)
    return k, quant.load(call.v, call.v_scale, at, dtype, is_value=True)


def _attend(call: AttentionCall, group: _Group, kv: _KV, chunk: slice) -> tuple[Tensor, Tensor]:
    """Out [b, m, H, Dv] and lse [b, m, H] of the queries in `chunk`, in the dtype of `kv`."""
    rows = group.queries[:, chunk]
    b, m = rows.shape
    H, K, n = call.q.shape[1], call.k.shape[2], kv.present.shape[1]
    q = call.q[rows].to(kv.k.dtype) * call.scale  # [b, m, H, D]
    q = q.view(b, m, K, H // K, -1).permute(0, 2, 3, 1, 4).reshape(b, K, H // K * m, -1)
    is_rotated, of_centre = quant.is_rotated(call.v), None
    if call.calibration is not None:
        centre, divisor = call.calibration.to(q.dtype).unbind(1)  # [K, D]
        of_centre = (q * centre[:, None]).sum(-1).view(b, K, H // K, m, 1)
        q = q * divisor[:, None]
    if is_rotated:
        q = quant.rotate(q)
    step = call.split_tokens or max(n, 1)
    state: tuple[Tensor, Tensor] | None = None
    for first in range(0, max(n, 1), step):
        span = slice(first, first + step)
        part = _KV(kv.k[:, :, span], kv.v[:, :, span], kv.present[:, span])
        scores = (q @ part.k.transpose(-1, -2)).view(b, K, H // K, m, -1)
        scores = scores if of_centre is None else scores + of_centre
        visible, distance = _visible(call, group, part.present, (chunk, first))
        visible = visible[:, None, None]
        scores = _shape(call, distance, scores).masked_fill(~visible, -torch.inf)
        lse = scores.logsumexp(-1)
        p = scores.softmax(-1).masked_fill((lse == -torch.inf)[..., None], 0.0)  # a row that sees nothing
        out = _weigh(p, part.v, visible)
        state = (out, lse) if state is None else _merge(*state, out, lse)
    assert state is not None
    if call.sinks is not None:  # a sink is a state with a logit and no value
        sinks = call.sinks.to(q.dtype).view(K, H // K, 1).expand(state[1].shape)
        state = _merge(*state, torch.zeros_like(state[0]), sinks)
    out = quant.rotate(state[0], back=True) if is_rotated else state[0]
    return out.permute(0, 3, 1, 2, 4).reshape(b, m, H, -1), state[1].permute(0, 3, 1, 2).reshape(b, m, H)


def _weigh(p: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Return the sums [b, K, G, m, Dv] of p [b, K, G, m, n] times v [b, K, n, Dv] over the visible keys.

    visible: bool [b, 1, 1, m, n]

    0 * NaN is NaN: a value that is not finite is added to the queries that see it, apart from the product of matrices.
    """
    b, K, G, m, n = p.shape
    finite = v.isfinite()
    out = (p.reshape(b, K, G * m, n) @ v.masked_fill(~finite, 0.0)).view(b, K, G, m, -1)
    for t in (~finite.all(-1)).any(1).any(0).nonzero().flatten():
        lost = v[:, :, None, None, t].masked_fill(finite[:, :, None, None, t], 0.0)
        out = out + torch.where(visible[..., t, None], p[..., t, None] * lost, 0.0)
    return out


def _shape(call: AttentionCall, distance: Tensor, scores: Tensor) -> Tensor:
    """Return `scores` [b, K, G, m, n] after soft cap and ALiBi; `distance` [b, m, n] is t - p."""
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes.to(scores.dtype).view(1, *scores.shape[1:3], 1, 1)
        scores = scores + slopes * distance[:, None, None].to(scores.dtype)
    return scores


def _visible(call: AttentionCall, group: _Group, present: Tensor, where: tuple[slice, int]) -> tuple[Tensor, Tensor]:
    """Return bool [b, m, n], which keys from `where[1]` on the queries `where[0]` see, and t - p, also [b, m, n]."""
    chunk, first = where
    all_queries = group.queries.shape[1]
    t = first + torch.arange(present.shape[1], device=present.device)  # [n]
    new = (group.lens - all_queries)[:, None]  # [b, 1]: the position of the first new token
    p = (new + torch.arange(all_queries, device=present.device)[chunk])[:, :, None]  # [b, m, 1]
    visible = present[:, None]  # [b, 1, n]
    if call.tree_mask is not None:
        j = (t - new)[:, None].expand(-1, p.shape[1], -1)  # [b, m, n]: key t is the j-th new token
        among_new = call.tree_mask[group.queries[:, chunk]].gather(2, j.clamp(0, all_queries - 1))
        visible = visible & ((j < 0) | among_new)
    else:
        visible = visible & ((t <= p) | ~group.causal.view(-1, 1, 1))
    if call.window is not None:
        visible = visible & (t > p - call.window)
    if call.right is not None:
        visible = visible & (t <= p + bounds(call.window, call.right)[1])
    return visible.expand(-1, p.shape[1], -1), t - p


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two states over disjoint keys.

    A state of weight 0 (lse -inf, or the other's inf) may hold anything; NaN stays NaN.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    weigh_a, weigh_b = (torch.where(lse.isinf(), 0.0, x.sigmoid())[..., None] for x in (lse_a - lse_b, lse_b - lse_a))
    return torch.where(weigh_a == 0, 0.0, out_a * weigh_a) + torch.where(weigh_b == 0, 0.0, out_b * weigh_b), lse


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The state over the keys of both: out [T, H, Dv] of `out_a`'s dtype, lse float32 [T, H]."""
    out, lse = _merge(out_a.float(), lse_a, out_b.float(), lse_b)
    return out.to(out_a.dtype).contiguous(), lse.contiguous()


def write_kv(call: WriteCall) -> None:
    """Store each new token's K, turned if there are angles, and V at its slot.

    Modifies: call.k, call.v, and per-(token, head) scales.
    Raises:   InvalidRequest, on the CPU, for slots and positions that are not there
    """
    if call.slots.device.type == "cpu":
        checks.slot_values(call)
    kept = call.slots >= 0
    slots, S = call.slots[kept], call.k.shape[1]
    at = (slots // S, slots % S)
    k_new, v_new = _turned(call, kept), call.v_new[kept]
    if call.calibration is not None:
        k_new = (k_new.float() - call.calibration[:, 0]) / call.calibration[:, 1]
    if quant.is_rotated(call.v):
        k_new, v_new = quant.rotate(k_new.float()), quant.rotate(v_new.float())
    quant.store(call.k, call.k_scale, at, k_new, is_value=False)
    quant.store(call.v, call.v_scale, at, v_new, is_value=True)


def _turned(call: WriteCall, kept: Tensor) -> Tensor:
    """The kept keys [t, K, D], each turned by the angles of its position, in float32; as they are if there are none."""
    k = call.k_new[kept]
    if call.cos is None or call.sin is None or call.positions is None:
        return k
    cos, sin = (table[call.positions[kept]][:, None] for table in (call.cos, call.sin))  # [t, 1, R/2]
    half = cos.shape[-1]
    turned = k.float()
    a, b = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if call.interleaved else (slice(0, half), slice(half, 2 * half))
    )
    first, second = turned[..., a], turned[..., b]
    pair = first * cos - second * sin, second * cos + first * sin
    turned = turned.clone()
    turned[..., a], turned[..., b] = pair
    return turned


def gather_kv(call: GatherCall) -> None:
    """Copy the tokens of each sequence out of their pages. Modifies: call.k_out, call.v_out."""
    x, S = call.source, call.source.k.shape[1]
    counts = x.first.new_full(x.first.shape, call.k_out.shape[1]) if call.starts is None else call.starts.diff()
    b = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    j = torch.arange(len(b), device=b.device) - (counts.cumsum(0) - counts)[b]
    to = (b, j) if call.starts is None else (call.starts[b] + j,)
    position = x.first.long()[b] + j
    held = (position >= 0) & (position < x.seq_lens[b])
    table_rows, page = b if x.rows is None else x.rows.long()[b], position // S
    frame = torch.full_like(position, -1)
    frame[held] = x.block_table[table_rows[held], page[held]].long()
    held = frame >= 0
    at = (frame[held], position[held] % S)
    k, v = _stored(x, at, torch.float32)
    if quant.is_rotated(x.v):
        k, v = quant.rotate(k, back=True), quant.rotate(v, back=True)
    if x.calibration is not None:
        k = k * x.calibration[:, 1] + x.calibration[:, 0]
    for values, out in ((k, call.k_out), (v, call.v_out)):
        gathered = out.new_zeros(len(b), *out.shape[-2:])
        gathered[held] = values.to(out.dtype)
        out[to] = gathered


def copy_frames(storage: Tensor, copies: Tensor) -> None:
    """Run `storage[dst] = storage[src]` for each row (src, dst) of `copies`; indexing reads every source first."""
    if storage.element_size() == 1:
        storage = storage.view(torch.uint8)
    storage[copies[:, 1].long()] = storage[copies[:, 0].long()]
