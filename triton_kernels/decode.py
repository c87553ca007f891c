"""Paged decode: a few new tokens per sequence (one, or drafts to verify) attend to all of its cached tokens.

    out[t,h,:] = sum over keys j of softmax_j(scale * q[t,h,:] . K(j, h/G)) * V(j, h/G)        lse[t,h] = ln of the sum

Grid      (programs, kv heads * head tiles). A program owns an equal share of all keys of its kv head (plan.py), all query heads of
          the group and all drafts in one tile of M rows: every byte of KV crosses the memory bus once.
A program for each piece of its share: walk (tile.py), then either the finished output, if the piece is a whole sequence, or a partial
          (out float32, LSE) in a slot. Partials are merged by a second small launch, one program per (query, head); or, where the
          tuning says one_launch, by the program that stores a sequence's last one, which a ticket tells: the same sums, in one launch.
Memory    num_stages tiles of N keys in flight (K and V, N * (D + Dv) * bytes each) while one is consumed; frames one tile ahead.
Bytes     (D + Dv) * sizeof(kv) per token and kv head, 4 per page of table; partials: (programs + B) * H * Dv * 4, which no context grows.
Tuned     not on any GPU yet: the table in tuning.json is reasoned from shared memory and bytes in flight, not measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pagedkv.kernels.layout import FARTHEST
from pagedkv.kernels.triton.elements import part_columns
from pagedkv.kernels.triton.form import (
    form_of,
    head_bytes,
    keys_of,
    no_form,
    pool_of,
    rules_of,
    steps_of,
    tables_of,
)
from pagedkv.kernels.triton.merge import fold
from pagedkv.kernels.triton.plan import bounds, first_unit, line, pieces_of
from pagedkv.kernels.triton.tile import finish, load_query, query_rows, settled, store_parts, walk
from pagedkv.kernels.triton.tuning import Tuning, target, tuning

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall
    from pagedkv.kernels.case import Case


@triton.jit(
    do_not_specialize=["num_sequences", "max_queries", "unit", "units_per_sequence"]
)  # these change from step to step
def decode_kernel(
    q, out, lse, part_out, part_lse, arrived, pool, tables, rules, steps, num_sequences, max_queries, unit, units_per_sequence,
    FORM: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: its share of the line of units, for one kv head and one tile of its query heads.

    pool, tables, rules, steps: tuples, see form.py.      ROWS: of a tile, those that a sequence can fill.
    AT_ONCE: partials of each that are merged together.
    """
    p, programs, h = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    ends, share = line(tables[3], tables[4], num_sequences, max_queries, rules[2], unit, programs, BATCH, FORM)
    at, stop = p * share, tl.minimum((p + 1) * share, tl.max(ends, 0))
    while at < stop:
        b, begin, end = bounds(ends, at)
        until = at + 1 if FORM.split else tl.minimum(stop, end)
        token, head, ok, acc0, acc1, lse2 = piece(
            q, h, b, at - begin, until - begin, unit, pool, tables, rules, steps, FORM
        )
        if (at == begin) & (until == end):
            finish(out, lse, acc0, acc1, lse2, token, head, ok, rules[3], steps, FORM)
        else:
            first_slot, pieces = pieces_of(b, begin, end, share, units_per_sequence, FORM)
            slot = first_slot + (at - begin if FORM.split else p - begin // share)
            row = (slot * tl.num_programs(1) + h) * FORM.M + tl.arange(0, FORM.M)
            store_parts(part_out, row * FORM.Dv, ok, acc0, acc1, FORM)
            tl.store(part_lse + row, lse2, mask=ok)
            if FORM.one_launch:
                tl.debug_barrier()  # the whole program has stored before one of its threads says so
                before = tl.atomic_add(arrived + b.to(tl.int64) * tl.num_programs(1) + h, 1, sem="acq_rel")
                if before == pieces - 1:
                    parts = (part_out, part_lse, first_slot, pieces)
                    merge_rows(out, lse, parts, b, h, tables[4], rules[3], steps, ROWS, AT_ONCE, FORM)
        at = until


@triton.jit
def rows_of(h, b, cu_seqlens_q, ROWS: tl.constexpr, FORM: tl.constexpr):
    """token int64, query, head and whether there is such a row, of the first ROWS rows of a tile of sequence b; and its new tokens."""
    first_query = tl.load(cu_seqlens_q + b)
    num_new = tl.load(cu_seqlens_q + b + 1) - first_query
    query, head, ok = query_rows(h % FORM.head_tiles, 0, num_new, ROWS, FORM)
    return (first_query + query).to(tl.int64), query, head + h // FORM.head_tiles * FORM.G, ok, num_new


@triton.jit
def piece(q, h, b, begin, end, unit, pool, tables, rules, steps, FORM: tl.constexpr):
    """The settled state over the units begin..end of sequence b, counted from the first that any query sees, and the rows it is of."""
    table, table_stride, table_rows, seq_lens, cu_seqlens_q = tables
    window, slopes, tree_stride = rules[2], rules[4], rules[6]
    n = tl.load(seq_lens + b)
    token, query, head, ok, num_new = rows_of(h, b, cu_seqlens_q, FORM.M, FORM)
    rows = (n - num_new + query, ok, token * tree_stride, n - num_new, num_new)
    if FORM.alibi:
        slopes = tl.load(slopes + head, mask=ok, other=0.0)

    skipped = first_unit(n, num_new, window, unit, FORM)
    first, last = (skipped + begin) * unit, tl.minimum(n, (skipped + end) * unit)
    if FORM.window and FORM.split:  # keys before every window: whole tiles of them are left out
        first += tl.maximum(tl.maximum(n - num_new - window + 1, 0) - first, 0) // FORM.N * FORM.N
    row_of_table = table + (tl.load(table_rows + b) if table_rows is not None else b).to(tl.int64) * table_stride
    q_parts = load_query(q, token * steps[0] + head.to(tl.int64) * steps[1], ok, FORM)
    acc0, acc1, m, l = walk(q_parts, first, last, row_of_table, pool, h // FORM.head_tiles, rows, slopes, rules, FORM)
    acc0, acc1, lse2 = settled(acc0, acc1, m, l)
    return token, head, ok, acc0, acc1, lse2


@triton.jit
def merge_rows(
    out, lse, parts, b, h, cu_seqlens_q, sinks, steps, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """All pieces of one tile of a sequence, in the order of keys, several of them in flight together, whoever was last to store one."""
    part_out, part_lse, first_slot, pieces = parts
    token, _, head, ok, _ = rows_of(h, b, cu_seqlens_q, ROWS, FORM)
    SECOND: tl.constexpr = FORM.kind == "int4" or FORM.V1 > 0
    m, l = tl.full([ROWS], float("-inf"), tl.float32), tl.full([ROWS], 0.0, tl.float32)
    acc0, acc1 = tl.full([ROWS, FORM.V0], 0.0, tl.float32), tl.full([ROWS, FORM.second], 0.0, tl.float32)
    c0 = part_columns(0, FORM.V0, FORM.V1, FORM)
    c1 = part_columns(1, FORM.V0, FORM.V1, FORM) if SECOND else c0
    for first in range(0, pieces, AT_ONCE):
        j = first + tl.arange(0, AT_ONCE)
        row = ((first_slot + j)[:, None] * tl.num_programs(1) + h) * FORM.M + tl.arange(0, ROWS)[None, :]
        there = (j < pieces)[:, None] & ok[None, :]
        one = tl.load(part_lse + row, mask=there, other=float("-inf"))
        top = tl.maximum(m, tl.max(one, 0))
        safe = tl.where(top == float("-inf"), 0.0, top)
        weight, fade = tl.exp2(one - safe[None, :]), tl.exp2(m - safe)
        at = part_out + (row * FORM.Dv)[:, :, None]
        value = tl.load(at + c0[None, None, :], mask=there[:, :, None] & (c0 < FORM.Dv)[None, None, :], other=0.0)
        acc0 = acc0 * fade[:, None] + tl.sum(value * weight[:, :, None], 0)
        if SECOND:
            value = tl.load(at + c1[None, None, :], mask=there[:, :, None] & (c1 < FORM.Dv)[None, None, :], other=0.0)
            acc1 = acc1 * fade[:, None] + tl.sum(value * weight[:, :, None], 0)
        m, l = top, l * fade + tl.sum(weight, 0)
    acc0, acc1, lse2 = settled(acc0, acc1, m, l)
    finish(out, lse, acc0, acc1, lse2, token, head, ok, sinks, steps, FORM)


@triton.jit(do_not_specialize=["num_sequences", "max_queries", "unit", "units_per_sequence", "programs", "num_rows"])
def merge_kernel(
    out, lse, part_out, part_lse, tables, rules, steps, num_sequences, max_queries, unit, units_per_sequence, programs, num_rows,
    FORM: tl.constexpr, BATCH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: the pieces of one (query, head), in the order of keys. Whole sequences were finished by the decode kernel."""
    b, query, h = tl.program_id(0) // max_queries, tl.program_id(0) % max_queries, tl.program_id(1)
    _, _, _, seq_lens, cu_seqlens_q = tables
    _, _, out_token, out_head, lse_token = steps
    first_query = tl.load(cu_seqlens_q + b)
    num_new = tl.load(cu_seqlens_q + b + 1) - first_query
    if (query >= num_new) | (num_new > max_queries):
        return
    ends, share = line(seq_lens, cu_seqlens_q, num_sequences, max_queries, rules[2], unit, programs, BATCH, FORM)
    index = tl.arange(0, BATCH)
    end = tl.sum(tl.where(index == b, ends, 0), 0)
    begin = tl.sum(tl.where(index == b - 1, ends, 0), 0)
    slot, pieces = pieces_of(b, begin, end, share, units_per_sequence, FORM)
    if pieces == 1:
        return
    kv_head, head = h // FORM.G, h % FORM.G
    row = (
        (kv_head * FORM.head_tiles + head // FORM.heads) * FORM.M + query * FORM.heads + head % FORM.heads
    )  # within a slot
    token = (first_query + query).to(tl.int64)
    out, lse = out + token * out_token + h.to(tl.int64) * out_head, lse + token * lse_token + h
    fold(
        part_out,
        part_lse,
        slot * num_rows + row,
        num_rows,
        pieces,
        rules[3] + h if FORM.sinks else None,
        out,
        lse,
        FORM.Dv,
        WIDTH,
    )


MOST_DRAFTS = 16
"""New tokens of a sequence that this kernel takes at most; with many heads fewer, so that they fit a tile. Longer ones are prefill's."""


def tuned_for(call: AttentionCall) -> Tuning:
    """By the machine and the heads alone, never by the batch."""
    return tuning("decode", target(call.q.device), head_bytes(call), max(call.q.shape[2], call.out.shape[2]))


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
    M = max(16, min(tuned.M, rows))
    form = replace(form_of(call, M=M, N=keys_of(call, M, tuned.N)), one_launch=tuned.one_launch)
    many_warps = M == 64 or (M == 32 and form.dtype == tl.float32)  # or accumulators spill

    heads, unit = K * form.head_tiles, min(call.split_tokens or form.N, FARTHEST)
    units_per_sequence = max(1, -(-call.max_seqlen_k // unit))
    programs = max(1, min(target(call.q.device).processors * tuned.programs // heads, B * units_per_sequence))
    slots = B * units_per_sequence if form.split else programs + B if programs > 1 else 0
    part_out = call.q.new_empty((slots, heads, form.M, Dv), dtype=torch.float32)
    part_lse = call.q.new_empty((slots, heads, form.M), dtype=torch.float32)
    arrived = (
        call.q.new_zeros((B, heads), dtype=torch.int32) if form.one_launch else None
    )  # a graph clears its own at each replay
    tuples = tables_of(call), rules_of(call), steps_of(call)
    bounds, shape = (B, max_queries, unit, units_per_sequence), {"FORM": form, "BATCH": triton.next_power_of_2(B)}
    rows = min(rows, form.M)
    decode_kernel[programs, heads](
        call.q, call.out, call.lse, part_out, part_lse, arrived, pool_of(call), *tuples, *bounds,
        **shape, ROWS=rows, AT_ONCE=max(1, min(16, 8192 // (rows * form.V0))),
        num_warps=8 if many_warps else tuned.num_warps, num_stages=tuned.stages,
    )  # fmt: skip
    if slots and not form.one_launch:
        merge_kernel[B * max_queries, call.q.shape[1]](
            call.out, call.lse, part_out, part_lse, *tuples, *bounds, programs, heads * form.M,
            **shape, WIDTH=triton.next_power_of_2(Dv), num_warps=4,
        )  # fmt: skip


def objections(case: Case) -> list[str]:
    """Why this kernel cannot serve `case`."""
    return no_form(case)
