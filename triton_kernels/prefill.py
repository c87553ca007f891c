"""Paged prefill: many new tokens per sequence (prompts, chunks, long drafts) attend to all of its cached tokens.

    out, lse   as in decode.py; the two kernels share a batch: decode takes the sequences with few new tokens, prefill
               all others

Grid      (tiles of queries, kv heads * head tiles, splits). A tile is M rows: M / G queries times the G heads of the
          group, which see the same keys. T and B bound the number of tiles, so the grid is fixed. A program finds its
          sequence with one read of cu_seqlens_q (tile i of sequence b has number cu[b] / queries + b + i); a program
          without a sequence returns at once.
Program   walks (tile.py) the keys that its tile sees: up to its last query if causal, from its first query's window
          on. The last tiles start first: they see the most keys, and shorter tiles fill the gaps. If T and B give fewer
          programs than the GPU holds, keys are split evenly and a second small launch merges the splits.
Bytes     every tile reads its keys again, mostly from L2: G query heads * M / G queries share a read. Scores never
          leave the registers.
Tuned     on an H200, for bfloat16 heads of 128; the rest as in decode.py.

With `split_tokens`, this kernel never splits keys, so the sums of a sequence depend on that sequence alone. Short
sequences always go to decode, in any batch. A call with a tree mask runs the same code as one without. It reads the
mask once to find which tiles all rows see, so a mask that says what causality says gives the same tiles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pagedkv.kernels.triton.merge import fold
from pagedkv.kernels.triton.specialisation import Arguments, head_bytes, keys_of, right_of, specialisation_of
from pagedkv.kernels.triton.tile import bounds_of_mask, finish, load_query, normalised, query_rows, store_parts, walk
from pagedkv.kernels.triton.tuning import INTERPRETER, target, tuning

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.kernels.args import AttentionCall


# do_not_specialize: these numbers change from step to step
@triton.jit(do_not_specialize=["num_sequences", "decoded", "tree", "tree_stride"])
def _prefill_kernel(
    q, out, lse, part_out, part_lse, pool, tables, rules, strides, only, num_sequences, decoded, H, tree, tree_stride,
    SPEC: tl.constexpr, BATCH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program: one tile of queries, one kv head (and tile of its query heads), one split of the keys.

    only: int32 [B], 0 for sequences that are left out; None: all take part.
    tree, tree_stride: see `_mask_of` in specialisation.py.
    """
    if SPEC.split:  # a function cannot return None in a tuple
        rules = (rules[0], rules[1], rules[2], rules[3], rules[4], tree, tree_stride, rules[7])
    tile, h, z = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    table, table_stride, table_rows, seq_lens, cu_seqlens_q, _ = tables
    window, slopes, tree, tree_stride = rules[2], rules[4], rules[5], rules[6]
    kv_head, head_tile = h // SPEC.head_tiles, h % SPEC.head_tiles
    index = tl.arange(0, BATCH)
    starts = tl.load(cu_seqlens_q + index, mask=index < num_sequences, other=0)
    numbers = tl.where(index < num_sequences, starts // SPEC.queries + index, 2147483647)
    b = tl.sum((numbers <= tile).to(tl.int32), 0) - 1
    n, begin = tl.load(seq_lens + b), tl.load(cu_seqlens_q + b)
    num_new = tl.load(cu_seqlens_q + b + 1) - begin
    first_query = (tile - begin // SPEC.queries - b) * SPEC.queries
    left_out = num_new <= decoded
    if only is not None:
        left_out = left_out | (tl.load(only + b) == 0)
    if (first_query >= num_new) | left_out:
        return
    query, head, ok = query_rows(head_tile, first_query, num_new, SPEC.M, SPEC)
    head += kv_head * SPEC.G
    token = (begin + query).to(tl.int64)
    right = right_of(b, tables, rules, SPEC)
    rows = (n - num_new + query, ok, token * tree_stride, n - num_new, num_new, right, n)
    if SPEC.alibi:
        slopes = tl.load(slopes + head, mask=ok, other=0.0)

    first, last = n * 0, n
    if SPEC.right:
        last = tl.minimum(n, n - num_new + first_query + SPEC.queries + right)
    if SPEC.split:
        hidden = n
        if tree_stride >= 0:  # the walk has the tiles that it would have if the mask said what causality says
            seen_by_all, seen_by_some = bounds_of_mask(rows, tree, SPEC)
            hidden = n - num_new + seen_by_all
            last = tl.minimum(last, n - num_new + seen_by_some)
        rows = (rows[0], rows[1], rows[2], rows[3], rows[4], rows[5], hidden)
    if SPEC.window:
        first = tl.maximum(n - num_new + first_query - window + 1, 0) // SPEC.N * SPEC.N
    if SPLITS > 1:
        share = tl.cdiv(tl.maximum(last - first, 0), SPEC.N * SPLITS) * SPEC.N
        first += z * share
        last = tl.minimum(last, first + share)
    row_of_table = table + (tl.load(table_rows + b) if table_rows is not None else b).to(tl.int64) * table_stride
    q_parts = load_query(q, token * strides[0] + head.to(tl.int64) * strides[1], ok, pool[16], kv_head, SPEC)
    acc0, acc1, m, l = walk(q_parts, first, last, row_of_table, pool, kv_head, rows, slopes, rules, SPEC)
    acc0, acc1, lse2 = normalised(acc0, acc1, m, l, SPEC)
    if SPLITS > 1:
        row = (token * H + head) * SPLITS + z
        store_parts(part_out, row * SPEC.Dv, ok, acc0, acc1, SPEC)
        tl.store(part_lse + row, lse2, mask=ok)
    else:
        finish(out, lse, acc0, acc1, lse2, token, head, ok, rules[3], strides, SPEC)


@triton.jit(do_not_specialize=["num_sequences", "decoded"])
def _merge_splits_kernel(
    out, lse, part_out, part_lse, cu_seqlens_q, sinks, strides, only, num_sequences, decoded,
    SPEC: tl.constexpr, BATCH: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: the splits of one (token, head), merged."""
    token, h, H = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    _, _, out_token, out_head, lse_token = strides
    index = tl.arange(0, BATCH)
    starts = tl.load(cu_seqlens_q + index, mask=index < num_sequences, other=2147483647)
    b = tl.sum((starts <= token).to(tl.int32), 0) - 1
    begin, end = tl.load(cu_seqlens_q + b), tl.load(cu_seqlens_q + b + 1)
    left_out = (token >= end) | (end - begin <= decoded)  # padding, or a row of decode
    if only is not None:
        left_out = left_out | (tl.load(only + b) == 0)
    if left_out:
        return
    wide = token.to(tl.int64)
    out, lse = out + wide * out_token + h.to(tl.int64) * out_head, lse + wide * lse_token + h
    sink = sinks + h if SPEC.sinks else None
    fold(part_out, part_lse, (wide * H + h) * SPLITS, 1, SPLITS, sink, out, lse, SPEC.Dv, WIDTH)


def paged_prefill(call: AttentionCall, decoded: int, only: Tensor | None = None) -> None:
    """Compute attention for the sequences with more than `decoded` new tokens.

    only: int32 [B], 0 for sequences that are left out; None: none is.
    Modifies: their rows of call.out and call.lse.
    """
    (T, H, Dv), B, K, on = call.out.shape, call.seq_lens.shape[0], call.k.shape[2], target(call.q.device)
    tuned = tuning("prefill", on, head_bytes(call), max(call.q.shape[2], Dv))
    M = tuned.M if call.tree_mask is None or call.split_tokens is not None else min(tuned.M, 64)  # see keys_of
    spec = specialisation_of(call, M=M, N=keys_of(call, M, tuned.N))
    edges = not (spec.window or (spec.tree and not spec.split))
    fits = spec.dtype != tl.float32 and not spec.kind and spec.K1 == 0 and spec.K0 <= 128 and not spec.v_in_k
    spec = replace(spec, edges=edges, overlapped=edges and fits and on.arch in ("sm_90", INTERPRETER))
    heads, tiles = K * spec.head_tiles, T // spec.queries + B
    key_tiles, splits = -(-call.max_seqlen_k // spec.N), 1
    if not call.split_tokens:
        splits = num_splits(-(-T // spec.queries) * heads, on.processors, key_tiles)
    slots = T * H * splits if splits > 1 else 0
    part_out, part_lse = (call.q.new_empty(size, dtype=torch.float32) for size in (slots * Dv, slots))
    constants = {"SPEC": spec, "BATCH": triton.next_power_of_2(B), "SPLITS": splits}
    given, about = Arguments.of(call), (only, B, decoded)
    _prefill_kernel[tiles, heads, splits](
        call.q, call.out, call.lse, part_out, part_lse, given.pool, given.tables, given.rules, given.strides,
        *about, H, *given.mask, **constants, num_warps=tuned.num_warps, num_stages=tuned.stages,
    )  # fmt: skip
    if splits > 1:
        _merge_splits_kernel[T, H](
            call.out, call.lse, part_out, part_lse, call.cu_seqlens_q, given.rules[3], given.strides, *about,
            **constants, WIDTH=triton.next_power_of_2(Dv), num_warps=1,
        )  # fmt: skip


def num_splits(programs: int, processors: int, key_tiles: int) -> int:
    """Return into how many splits to divide the keys, so that `programs` times splits is about `processors`.

    A power of two, at most 16, with at least 4 tiles of keys in each split.
    """
    splits = 1
    while splits < 16 and programs * splits * 2 <= processors and splits * 8 <= key_tiles:
        splits *= 2
    return splits
