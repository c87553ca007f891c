"""Paged decode: a few new tokens per sequence (one, or drafts to verify) attend to all of its cached tokens.

    out[t,h,:] = sum over keys j of softmax_j(scale * q[t,h,:] . K(j, h/G)) * V(j, h/G)        lse[t,h] = ln of the sum

Grid      (programs, kv heads * head tiles). A program owns an equal share of all keys of its kv head (plan.py), all query heads of
          the group and all drafts in one tile of M rows: every byte of KV crosses the memory bus once.
A program for each piece of its share: walk (tile.py), then either the finished output, if the piece is a whole sequence, or a partial
          (out float32, LSE) in a slot. A second small launch merges partials, one program per (query, head).
Memory    num_stages tiles of N keys in flight (K and V, N * (D + Dv) * bytes each) while one is consumed; frames one tile ahead.
Bytes     (D + Dv) * sizeof(kv) per token and kv head, 4 per page of table; partials: (programs + B) * H * Dv * 4, which no context grows.
Tuned     not on any GPU yet: the table in tuning.json is reasoned from shared memory and bytes in flight, not measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pagedkv.kernels.triton.form import form_of, pools_of
from pagedkv.kernels.triton.merge import fold
from pagedkv.kernels.triton.plan import bounds, first_unit, line
from pagedkv.kernels.triton.tile import LN2, load_query, of_head, query_rows, settled, store_parts, walk, with_sink
from pagedkv.kernels.triton.tuning import Tuning, target, tuning

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall
    from pagedkv.kernels.registry import Case


@triton.jit
def decode_kernel(
    q, out, lse, part_out, part_lse,
    k, v, k_scale, v_scale, k_frame, k_slot, k_head, v_frame, v_slot, v_head, ks_frame, ks_slot, ks_head, vs_frame, vs_slot, vs_head,
    table, table_stride, table_rows, seq_lens, cu_seqlens_q, num_sequences, max_queries, unit, units_per_sequence,
    scale, softcap, window, sinks, slopes, tree, tree_stride, q_token, q_head, out_token, out_head, lse_token,
    FORM: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """One program: its share of the line of units, for one kv head and one tile of its query heads."""
    p, programs, h = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    ends, share = line(seq_lens, cu_seqlens_q, num_sequences, max_queries, window, unit, programs, BATCH, FORM)
    at, stop = p * share, tl.minimum((p + 1) * share, tl.max(ends, 0))
    pool = (
        k,
        v,
        k_scale,
        v_scale,
        k_frame,
        k_slot,
        k_head,
        v_frame,
        v_slot,
        v_head,
        ks_frame,
        ks_slot,
        ks_head,
        vs_frame,
        vs_slot,
        vs_head,
    )
    tables = (table, table_stride, table_rows, seq_lens, cu_seqlens_q)
    options = (scale, softcap, window, slopes, tree, tree_stride)
    while at < stop:
        b, begin, end = bounds(ends, at)
        until = at + 1 if FORM.split else tl.minimum(stop, end)
        rows, state = piece(q, q_token, q_head, h, b, at - begin, until - begin, unit, pool, tables, options, FORM)
        token, head, ok = rows
        acc0, acc1, lse2 = state
        if (at == begin) & (until == end):
            if FORM.sinks:
                acc0, acc1, lse2 = with_sink(acc0, acc1, lse2, sinks, head, ok)
            store_parts(out, token * out_token + head.to(tl.int64) * out_head, ok, acc0, acc1, FORM)
            tl.store(lse + token * lse_token + head, lse2 * LN2, mask=ok)
        else:
            slot = b.to(tl.int64) * units_per_sequence + at - begin if FORM.split else (p + b).to(tl.int64)
            row = (slot * tl.num_programs(1) + h) * FORM.M + tl.arange(0, FORM.M)
            store_parts(part_out, row * FORM.Dv, ok, acc0, acc1, FORM)
            tl.store(part_lse + row, lse2, mask=ok)
        at = until


@triton.jit
def piece(q, q_token, q_head, h, b, begin, end, unit, pool, tables, options, FORM: tl.constexpr):
    """The state over the units begin..end of sequence b, counted from the first that any query sees, and the rows it is of."""
    table, table_stride, table_rows, seq_lens, cu_seqlens_q = tables
    scale, softcap, window, slopes, tree, tree_stride = options
    kv_head, head_tile = h // FORM.head_tiles, h % FORM.head_tiles
    n, first_query = tl.load(seq_lens + b), tl.load(cu_seqlens_q + b)
    num_new = tl.load(cu_seqlens_q + b + 1) - first_query
    query, head, ok = query_rows(head_tile, 0, num_new, FORM)
    head += kv_head * FORM.G
    token = (first_query + query).to(tl.int64)
    rows = (n - num_new + query, ok, token * tree_stride, n - num_new, num_new)
    if FORM.alibi:
        slopes = tl.load(slopes + head, mask=ok, other=0.0)

    skipped = first_unit(n, num_new, window, unit, FORM)
    first, last = (skipped + begin) * unit, tl.minimum(n, (skipped + end) * unit)
    if FORM.window and FORM.split:  # keys before every window: whole tiles of them are left out
        first += tl.maximum(n - num_new - window + 1 - first, 0) // FORM.N * FORM.N
    row_of_table = table + (tl.load(table_rows + b) if table_rows is not None else b).to(tl.int64) * table_stride
    q_parts = load_query(q, token * q_token + head.to(tl.int64) * q_head, ok, FORM)
    state = walk(q_parts, first, last, row_of_table, of_head(pool, kv_head, FORM), rows, (scale, softcap, window, slopes, tree), FORM)
    return (token, head, ok), settled(state[0], state[1], state[2], state[3])


@triton.jit
def merge_kernel(
    out, lse, part_out, part_lse, seq_lens, cu_seqlens_q, num_sequences, max_queries, unit, units_per_sequence, programs,
    window, sinks, out_token, out_head, lse_token, num_rows, FORM: tl.constexpr, BATCH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: the pieces of one (query, head), in the order of keys. Whole sequences were finished by the decode kernel."""
    b, query, h = tl.program_id(0) // max_queries, tl.program_id(0) % max_queries, tl.program_id(1)
    first_query = tl.load(cu_seqlens_q + b)
    num_new = tl.load(cu_seqlens_q + b + 1) - first_query
    if (query >= num_new) | (num_new > max_queries):
        return
    ends, share = line(seq_lens, cu_seqlens_q, num_sequences, max_queries, window, unit, programs, BATCH, FORM)
    index = tl.arange(0, BATCH)
    end = tl.sum(tl.where(index == b, ends, 0), 0)
    begin = tl.sum(tl.where(index == b - 1, ends, 0), 0)
    if FORM.split:
        slot, pieces = b.to(tl.int64) * units_per_sequence, end - begin
    else:
        slot, pieces = (begin // share + b).to(tl.int64), (end - 1) // share - begin // share + 1
    if pieces == 1:
        return
    kv_head, head = h // FORM.G, h % FORM.G
    row = (kv_head * FORM.head_tiles + head // FORM.heads) * FORM.M + query * FORM.heads + head % FORM.heads  # within a slot
    token = (first_query + query).to(tl.int64)
    out, lse = out + token * out_token + h.to(tl.int64) * out_head, lse + token * lse_token + h
    fold(part_out, part_lse, slot * num_rows + row, num_rows, pieces, sinks + h if FORM.sinks else None, out, lse, FORM.Dv, WIDTH)


MOST_DRAFTS = 16
"""New tokens of a sequence that this kernel takes at most; with many heads fewer, so that they fit a tile. Longer ones are prefill's."""


def tuned_for(call: AttentionCall) -> Tuning:
    """By the machine and the heads alone, never by the batch."""
    head_bytes = (call.k.shape[3] + call.v.shape[3]) * call.k.element_size()
    return tuning("decode", target(call.q.device), head_bytes, max(call.q.shape[2], call.out.shape[2]))


def most_queries(call: AttentionCall) -> int:
    """Sequences with at most so many new tokens are decoded."""
    return max(1, min(MOST_DRAFTS, tuned_for(call).M // (call.q.shape[1] // call.k.shape[2])))


def paged_decode(call: AttentionCall) -> None:
    """Attend from the sequences with at most `most_queries` new tokens. Modifies: their rows of call.out and call.lse."""
    B, K, Dv = call.seq_lens.shape[0], call.k.shape[2], call.out.shape[2]
    max_queries, tuned = most_queries(call), tuned_for(call)
    if call.split_tokens is None:  # else one shape of tile for all batches: no bit may depend on the batch
        max_queries = min(max_queries, call.max_seqlen_q)
    rows = triton.next_power_of_2(call.q.shape[1] // K * max_queries)
    form = form_of(call, M=max(16, min(tuned.M, rows)), N=tuned.N)

    heads, unit = K * form.head_tiles, call.split_tokens or form.N
    units_per_sequence = max(1, -(-call.max_seqlen_k // unit))
    programs = max(1, min(target(call.q.device).processors * tuned.programs // heads, B * units_per_sequence))
    slots = B * units_per_sequence if form.split else programs + B if programs > 1 else 0
    part_out = call.q.new_empty((slots, heads, form.M, Dv), dtype=torch.float32)
    part_lse = call.q.new_empty((slots, heads, form.M), dtype=torch.float32)
    window, shape = call.window or 0, {"FORM": form, "BATCH": triton.next_power_of_2(B)}
    steps = (call.out.stride(0), call.out.stride(1), call.lse.stride(0))
    tree_stride = 0 if call.tree_mask is None else call.tree_mask.stride(0)
    decode_kernel[programs, heads](
        call.q, call.out, call.lse, part_out, part_lse, *pools_of(call),
        call.block_table, call.block_table.stride(0), call.rows, call.seq_lens, call.cu_seqlens_q, B, max_queries, unit, units_per_sequence,
        call.scale, call.softcap, window, call.sinks, call.alibi_slopes, call.tree_mask, tree_stride, *call.q.stride()[:2], *steps,
        **shape, num_warps=8 if form.M == 64 else tuned.num_warps, num_stages=tuned.stages,
    )  # fmt: skip
    if slots:
        merge_kernel[B * max_queries, call.q.shape[1]](
            call.out, call.lse, part_out, part_lse, call.seq_lens, call.cu_seqlens_q, B, max_queries, unit, units_per_sequence, programs,
            window, call.sinks, *steps, heads * form.M, **shape, WIDTH=triton.next_power_of_2(Dv), num_warps=4,
        )  # fmt: skip


def objections(case: Case) -> list[str]:
    """Why this kernel, and prefill's likewise, cannot serve `case`."""
    if case.dtype not in (None, "float32", "bfloat16", "float16"):
        return [f"q is {case.dtype}; it takes float32, bfloat16, float16"]
    return []
