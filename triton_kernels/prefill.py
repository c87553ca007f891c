"""Paged prefill: sequences with many new tokens (prompts, chunks of prompts, long drafts) attend to all of their cached tokens.

    out, lse   as in decode.py; the two kernels share a batch, each takes the sequences that are its own by their number of new tokens

Grid      (tiles of queries, kv heads * head tiles, splits). A tile is M rows: M / G queries times the G heads of the group, which see the
          same keys. The number of tiles is bounded from T and B, so the grid is fixed; a program finds its sequence by one look at
          cu_seqlens_q (tile i of sequence b has number cu[b] / queries + b + i), and leaves at once if there is none.
A program walks (tile.py) the keys that its tile sees: up to its last query if causal, from its first query's window on. Tiles run from
          the end of the line: they see the most keys, and the short ones fill the gaps. If T and B promise fewer programs than the GPU
          holds, keys are split evenly and merged by a small second launch.
Bytes     every tile reads its keys again, from L2 mostly: G query heads * M / G queries share a read. Scores never leave the registers.
Tuned     not on any GPU yet (see decode.py).

With `split_tokens` a sequence is never split here, so its sums depend on nothing but itself; short ones are decode's, whatever the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pagedkv.kernels.triton.merge import fold
from pagedkv.kernels.triton.specialisation import (
    head_bytes,
    keys_of,
    pool_of,
    rules_of,
    specialisation_of,
    strides_of,
    tables_of,
    why_no_specialisation,
)
from pagedkv.kernels.triton.tile import finish, load_query, normalised, query_rows, store_parts, walk
from pagedkv.kernels.triton.tuning import target, tuning

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall
    from pagedkv.kernels.case import Case


@triton.jit(do_not_specialize=["num_sequences", "decoded"])  # these change from step to step
def prefill_kernel(
    q, out, lse, part_out, part_lse, pool, tables, rules, strides, num_sequences, decoded, H,
    SPEC: tl.constexpr, BATCH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program: one tile of queries, one kv head (and tile of its query heads), one split of the keys."""
    tile, h, z = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    table, table_stride, table_rows, seq_lens, cu_seqlens_q = tables
    window, slopes, tree_stride = rules[2], rules[4], rules[6]
    kv_head, head_tile = h // SPEC.head_tiles, h % SPEC.head_tiles
    index = tl.arange(0, BATCH)
    starts = tl.load(cu_seqlens_q + index, mask=index < num_sequences, other=0)
    numbers = tl.where(index < num_sequences, starts // SPEC.queries + index, 2147483647)
    b = tl.sum((numbers <= tile).to(tl.int32), 0) - 1
    n, begin = tl.load(seq_lens + b), tl.load(cu_seqlens_q + b)
    num_new = tl.load(cu_seqlens_q + b + 1) - begin
    first_query = (tile - begin // SPEC.queries - b) * SPEC.queries
    if (first_query >= num_new) | (num_new <= decoded):
        return
    query, head, ok = query_rows(head_tile, first_query, num_new, SPEC.M, SPEC)
    head += kv_head * SPEC.G
    token = (begin + query).to(tl.int64)
    rows = (n - num_new + query, ok, token * tree_stride, n - num_new, num_new)
    if SPEC.alibi:
        slopes = tl.load(slopes + head, mask=ok, other=0.0)

    first, last = n * 0, n
    if SPEC.causal and not SPEC.tree:
        last = tl.minimum(n, n - num_new + first_query + SPEC.queries)
    if SPEC.window:
        first = tl.maximum(n - num_new + first_query - window + 1, 0) // SPEC.N * SPEC.N
    if SPLITS > 1:
        share = tl.cdiv(tl.maximum(last - first, 0), SPEC.N * SPLITS) * SPEC.N
        first += z * share
        last = tl.minimum(last, first + share)
    row_of_table = table + (tl.load(table_rows + b) if table_rows is not None else b).to(tl.int64) * table_stride
    q_parts = load_query(q, token * strides[0] + head.to(tl.int64) * strides[1], ok, SPEC)
    acc0, acc1, m, l = walk(q_parts, first, last, row_of_table, pool, kv_head, rows, slopes, rules, SPEC)
    acc0, acc1, lse2 = normalised(acc0, acc1, m, l)
    if SPLITS > 1:
        row = (token * H + head) * SPLITS + z
        store_parts(part_out, row * SPEC.Dv, ok, acc0, acc1, SPEC)
        tl.store(part_lse + row, lse2, mask=ok)
    else:
        finish(out, lse, acc0, acc1, lse2, token, head, ok, rules[3], strides, SPEC)


@triton.jit(do_not_specialize=["num_sequences", "decoded"])
def merge_splits_kernel(
    out, lse, part_out, part_lse, cu_seqlens_q, sinks, strides, num_sequences, decoded,
    SPEC: tl.constexpr, BATCH: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: the splits of one (token, head)."""
    token, h, H = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    _, _, out_token, out_head, lse_token = strides
    index = tl.arange(0, BATCH)
    starts = tl.load(cu_seqlens_q + index, mask=index < num_sequences, other=2147483647)
    b = tl.sum((starts <= token).to(tl.int32), 0) - 1
    begin, end = tl.load(cu_seqlens_q + b), tl.load(cu_seqlens_q + b + 1)
    if (token >= end) | (end - begin <= decoded):  # padding; or decode's
        return
    wide = token.to(tl.int64)
    out, lse = out + wide * out_token + h.to(tl.int64) * out_head, lse + wide * lse_token + h
    fold(
        part_out,
        part_lse,
        (wide * H + h) * SPLITS,
        1,
        SPLITS,
        sinks + h if SPEC.sinks else None,
        out,
        lse,
        SPEC.Dv,
        WIDTH,
    )


def paged_prefill(call: AttentionCall, decoded: int) -> None:
    """Attend from the sequences with more than `decoded` new tokens. Modifies: their rows of call.out and call.lse."""
    (T, H, Dv), B, K, on = call.out.shape, call.seq_lens.shape[0], call.k.shape[2], target(call.q.device)
    tuned = tuning("prefill", on, head_bytes(call), max(call.q.shape[2], Dv))
    M = tuned.M if call.tree_mask is None and call.split_tokens is None else min(tuned.M, 64)  # see keys_of
    spec = specialisation_of(call, M=M, N=keys_of(call, M, tuned.N))
    heads, tiles = K * spec.head_tiles, T // spec.queries + B
    splits = (
        1
        if call.split_tokens
        else num_splits(-(-T // spec.queries) * heads, on.processors, -(-call.max_seqlen_k // spec.N))
    )
    slots = T * H * splits if splits > 1 else 0
    part_out, part_lse = (call.q.new_empty(size, dtype=torch.float32) for size in (slots * Dv, slots))
    constants = {"SPEC": spec, "BATCH": triton.next_power_of_2(B), "SPLITS": splits}
    rules, strides = rules_of(call), strides_of(call)
    prefill_kernel[tiles, heads, splits](
        call.q, call.out, call.lse, part_out, part_lse, pool_of(call), tables_of(call), rules, strides, B, decoded, H,
        **constants, num_warps=tuned.num_warps, num_stages=tuned.stages,
    )  # fmt: skip
    if splits > 1:
        merge_splits_kernel[T, H](
            call.out, call.lse, part_out, part_lse, call.cu_seqlens_q, rules[3], strides, B, decoded,
            **constants, WIDTH=triton.next_power_of_2(Dv), num_warps=1,
        )  # fmt: skip


def num_splits(programs: int, processors: int, key_tiles: int) -> int:
    """How often keys are cut so that `programs` become about as many as there are processors: a power of two, 4 tiles each at least."""
    splits = 1
    while splits < 16 and programs * splits * 2 <= processors and splits * 8 <= key_tiles:
        splits *= 2
    return splits


def objections(case: Case) -> list[str]:
    """Why this kernel cannot serve `case`."""
    return why_no_specialisation(case)
