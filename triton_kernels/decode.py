"""Paged decode: a few new tokens per sequence (one, or drafts to verify) attend to all of its cached tokens.

    out[t,h,:] = sum over keys j of softmax_j(scale * q[t,h,:] . K(j, h/G)) * V(j, h/G)        lse[t,h] = ln of the sum

Grid      (programs, kv heads * head tiles). A program owns an equal share of all keys of its kv head (partition.py),
          with all query heads of the group and all drafts in one tile of M rows: every byte of KV crosses the memory
          bus once.
Program   for each piece of its share: walk the keys (tile.py); then store the finished output, if the piece is a whole
          sequence, or a partial (out float32, LSE) in a slot.
Merge     of partials: a second small launch, one program per (query, head).
Memory    num_stages tiles of N keys in flight (K and V, N * (D + Dv) * bytes each) while one tile is consumed; frames
          are loaded one tile ahead.
Bytes     (D + Dv) * sizeof(kv) per token and kv head, 4 per page of the table; partials: (programs + B) * H * Dv * 4,
          independent of the context.
Tuned     on an H200, for tiles of 16 rows and narrow keys: one warp has all rows, so it waits for no barrier. The rest
          of tuning.json follows from shared memory and bytes in flight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pagedkv.kernels.layout import FARTHEST
from pagedkv.kernels.triton.merge import fold
from pagedkv.kernels.triton.partition import ends_and_share, first_seen_unit, sequence_of_unit, slots_of_sequence
from pagedkv.kernels.triton.specialisation import Arguments, head_bytes, keys_of, right_of, specialisation_of
from pagedkv.kernels.triton.tile import finish, load_query, normalised, query_rows, store_parts, walk
from pagedkv.kernels.triton.tuning import Tuning, target, tuning

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall


# do_not_specialize: these numbers change from step to step
@triton.jit(do_not_specialize=["num_sequences", "max_queries", "unit", "units_per_sequence", "tree", "tree_stride"])
def _decode_kernel(
    q, out, lse, part_out, part_lse, pool, tables, rules, strides,
    num_sequences, max_queries, unit, units_per_sequence, tree, tree_stride,
    SPEC: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """One program: its share of the line of units, for one kv head and one tile of its query heads.

    pool, tables, rules, strides: tuples, see specialisation.py.   SPEC: the Specialisation.
    tree, tree_stride: see `_mask_of` in specialisation.py.
    """
    if SPEC.split:  # a function cannot return None in a tuple
        rules = (rules[0], rules[1], rules[2], rules[3], rules[4], tree, tree_stride, rules[7])
    p, programs, h = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    ends, share = ends_and_share(
        tables[3], tables[4], num_sequences, max_queries, rules[2], unit, programs, BATCH, SPEC
    )
    at, stop = p * share, tl.minimum((p + 1) * share, tl.max(ends, 0))
    while at < stop:
        b, begin, end = sequence_of_unit(ends, at)
        until = at + 1 if SPEC.split else tl.minimum(stop, end)
        token, head, ok, acc0, acc1, lse2 = piece(
            q, h, b, at - begin, until - begin, unit, pool, tables, rules, strides, SPEC
        )
        if (at == begin) & (until == end):
            finish(out, lse, acc0, acc1, lse2, token, head, ok, rules[3], strides, SPEC)
        else:
            first_slot, _ = slots_of_sequence(b, begin, end, share, units_per_sequence, SPEC)
            slot = first_slot + (at - begin if SPEC.split else p - begin // share)
            row = (slot * tl.num_programs(1) + h) * SPEC.M + tl.arange(0, SPEC.M)
            store_parts(part_out, row * SPEC.Dv, ok, acc0, acc1, SPEC)
            tl.store(part_lse + row, lse2, mask=ok)
        at = until


@triton.jit
def piece(q, h, b, begin, end, unit, pool, tables, rules, strides, SPEC: tl.constexpr):
    """Return token, head and ok of the rows of a tile, then their output and base-2 LSE over the units begin..end.

    Units of sequence b are counted from the first one that any query sees.
    """
    table, table_stride, table_rows, seq_lens, cu_seqlens_q, _ = tables
    window, slopes, tree_stride = rules[2], rules[4], rules[6]
    n = tl.load(seq_lens + b)
    first_query = tl.load(cu_seqlens_q + b)
    num_new = tl.load(cu_seqlens_q + b + 1) - first_query
    query, head, ok = query_rows(h % SPEC.head_tiles, 0, num_new, SPEC.M, SPEC)
    kv_head = h // SPEC.head_tiles
    token, head = (first_query + query).to(tl.int64), head + kv_head * SPEC.G
    rows = (n - num_new + query, ok, token * tree_stride, n - num_new, num_new, right_of(b, tables, rules, SPEC), n)
    if SPEC.alibi:
        slopes = tl.load(slopes + head, mask=ok, other=0.0)

    skipped = first_seen_unit(n, num_new, window, unit, SPEC)
    first, last = (skipped + begin) * unit, tl.minimum(n, (skipped + end) * unit)
    if SPEC.window and SPEC.split:  # keys before every window: whole tiles are skipped
        first += tl.maximum(tl.maximum(n - num_new - window + 1, 0) - first, 0) // SPEC.N * SPEC.N
    row_of_table = table + (tl.load(table_rows + b) if table_rows is not None else b).to(tl.int64) * table_stride
    q_parts = load_query(q, token * strides[0] + head.to(tl.int64) * strides[1], ok, pool[16], kv_head, SPEC)
    acc0, acc1, m, l = walk(q_parts, first, last, row_of_table, pool, kv_head, rows, slopes, rules, SPEC)
    acc0, acc1, lse2 = normalised(acc0, acc1, m, l, SPEC)
    return token, head, ok, acc0, acc1, lse2


@triton.jit(do_not_specialize=["num_sequences", "max_queries", "unit", "units_per_sequence", "programs", "num_rows"])
def _merge_kernel(
    out, lse, part_out, part_lse, tables, rules, strides,
    num_sequences, max_queries, unit, units_per_sequence, programs, num_rows,
    SPEC: tl.constexpr, BATCH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: the pieces of one (query, head), merged in the order of keys.

    The decode kernel has finished the sequences of a single piece.
    """
    b, query, h = tl.program_id(0) // max_queries, tl.program_id(0) % max_queries, tl.program_id(1)
    _, _, _, seq_lens, cu_seqlens_q, _ = tables
    _, _, out_token, out_head, lse_token = strides
    first_query = tl.load(cu_seqlens_q + b)
    num_new = tl.load(cu_seqlens_q + b + 1) - first_query
    if (query >= num_new) | (num_new > max_queries):
        return
    if SPEC.above:  # noqa: SIM102, for Triton has no `and` that stops at a False
        if num_new <= SPEC.above:
            return
    ends, share = ends_and_share(
        seq_lens, cu_seqlens_q, num_sequences, max_queries, rules[2], unit, programs, BATCH, SPEC
    )
    index = tl.arange(0, BATCH)
    end = tl.sum(tl.where(index == b, ends, 0), 0)
    begin = tl.sum(tl.where(index == b - 1, ends, 0), 0)
    slot, pieces = slots_of_sequence(b, begin, end, share, units_per_sequence, SPEC)
    if pieces == 1:
        return
    kv_head, head = h // SPEC.G, h % SPEC.G
    # the row within a slot
    row = (kv_head * SPEC.head_tiles + head // SPEC.heads) * SPEC.M + query * SPEC.heads + head % SPEC.heads
    token = (first_query + query).to(tl.int64)
    out, lse = out + token * out_token + h.to(tl.int64) * out_head, lse + token * lse_token + h
    sink = rules[3] + h if SPEC.sinks else None
    fold(part_out, part_lse, slot * num_rows + row, num_rows, pieces, sink, out, lse, SPEC.Dv, WIDTH)


MOST_DRAFTS = 16
"""The most new tokens of a sequence that decode serves; fewer with many heads, so that they fit a tile."""


def _tuned_for(call: AttentionCall, kernel: str = "decode") -> Tuning:
    """Return the tuning for `call`; it depends on the device and the heads, never on the batch."""
    return tuning(kernel, target(call.q.device), head_bytes(call), max(call.q.shape[2], call.out.shape[2]))


def most_queries(call: AttentionCall) -> int:
    """Return the most new tokens with which a sequence of `call` is decoded."""
    return max(1, min(MOST_DRAFTS, _tuned_for(call).M // (call.q.shape[1] // call.k.shape[2])))


def paged_decode(call: AttentionCall) -> None:
    """Compute attention for the sequences with at most `most_queries` new tokens.

    With `split_tokens`, no bit may depend on the batch, so the tile of a sequence follows from its own new tokens:
    sequences of at most 16 rows have one launch, and the others another one.
    Modifies: their rows of call.out and call.lse.
    """
    most = most_queries(call)
    if call.split_tokens is None:
        _decode(call, 0, min(most, call.max_seqlen_q))
        return
    few = min(most, max(1, 16 // (call.q.shape[1] // call.k.shape[2])))
    _decode(call, 0, few)
    if min(most, call.max_seqlen_q) > few:
        _decode(call, few, most)


def _decode(call: AttentionCall, above: int, max_queries: int) -> None:
    """Compute attention for the sequences with more than `above` new tokens and at most `max_queries`."""
    B, K, Dv = call.seq_lens.shape[0], call.k.shape[2], call.out.shape[2]
    tuned = _tuned_for(call)
    rows = triton.next_power_of_2(call.q.shape[1] // K * max_queries)
    M = max(16, min(tuned.M, rows))
    if M == 16:
        tuned = _tuned_for(call, "decode_16")
    spec = specialisation_of(call, M=M, N=keys_of(call, M, tuned.N))
    spec = replace(spec, mixed=max_queries > 1 or spec.tree, above=above)
    many_warps = M == 64 or (M == 32 and spec.dtype == tl.float32)  # with fewer warps, accumulators would spill

    heads, unit = K * spec.head_tiles, min(call.split_tokens or spec.N, FARTHEST)
    units_per_sequence = max(1, -(-call.max_seqlen_k // unit))
    programs = max(1, min(target(call.q.device).processors * tuned.programs // heads, B * units_per_sequence))
    slots = B * units_per_sequence if spec.split else programs + B if programs > 1 else 0
    part_out = call.q.new_empty((slots, heads, spec.M, Dv), dtype=torch.float32)
    part_lse = call.q.new_empty((slots, heads, spec.M), dtype=torch.float32)
    given = Arguments.of(call)
    tuples = given.tables, given.rules, given.strides
    max_queries = min(max_queries, call.max_seqlen_q)  # merged, and never the size of a tile
    sizes, constants = (B, max_queries, unit, units_per_sequence), {"SPEC": spec, "BATCH": triton.next_power_of_2(B)}
    _decode_kernel[programs, heads](
        call.q, call.out, call.lse, part_out, part_lse, given.pool, *tuples, *sizes,
        *given.mask, **constants, num_warps=8 if many_warps else tuned.num_warps, num_stages=tuned.stages,
    )  # fmt: skip
    if slots:
        _merge_kernel[B * max_queries, call.q.shape[1]](
            call.out, call.lse, part_out, part_lse, *tuples, *sizes, programs, heads * spec.M,
            **constants, WIDTH=triton.next_power_of_2(Dv), num_warps=4,
        )  # fmt: skip
