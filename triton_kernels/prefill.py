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

from pagedkv.kernels.triton.form import form_of, head_bytes, keys_of, no_form, pool_of, rules_of, steps_of, tables_of
from pagedkv.kernels.triton.merge import fold
from pagedkv.kernels.triton.tile import finish, load_query, query_rows, settled, store_parts, walk
from pagedkv.kernels.triton.tuning import target, tuning

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall
    from pagedkv.kernels.case import Case


@triton.jit(do_not_specialize=["num_sequences", "decoded"])  # these change from step to step
def prefill_kernel(
    q, out, lse, part_out, part_lse, pool, tables, rules, steps, num_sequences, decoded, H,
    FORM: tl.constexpr, BATCH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program: one tile of queries, one kv head (and tile of its query heads), one split of the keys."""
    tile, h, z = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    table, table_stride, table_rows, seq_lens, cu_seqlens_q = tables
    window, slopes, tree_stride = rules[2], rules[4], rules[6]
    kv_head, head_tile = h // FORM.head_tiles, h % FORM.head_tiles
    index = tl.arange(0, BATCH)
    starts = tl.load(cu_seqlens_q + index, mask=index < num_sequences, other=0)
    numbers = tl.where(index < num_sequences, starts // FORM.queries + index, 2147483647)
    b = tl.sum((numbers <= tile).to(tl.int32), 0) - 1
    n, begin = tl.load(seq_lens + b), tl.load(cu_seqlens_q + b)
    num_new = tl.load(cu_seqlens_q + b + 1) - begin
    first_query = (tile - begin // FORM.queries - b) * FORM.queries
    if (first_query >= num_new) | (num_new <= decoded):
        return
    query, head, ok = query_rows(head_tile, first_query, num_new, FORM.M, FORM)
    head += kv_head * FORM.G
    token = (begin + query).to(tl.int64)
    rows = (n - num_new + query, ok, token * tree_stride, n - num_new, num_new)
    if FORM.alibi:
        slopes = tl.load(slopes + head, mask=ok, other=0.0)

    first, last = n * 0, n
    if FORM.causal and not FORM.tree:
        last = tl.minimum(n, n - num_new + first_query + FORM.queries)
    if FORM.window:
        first = tl.maximum(n - num_new + first_query - window + 1, 0) // FORM.N * FORM.N
    if SPLITS > 1:
        share = tl.cdiv(tl.maximum(last - first, 0), FORM.N * SPLITS) * FORM.N
        first += z * share
        last = tl.minimum(last, first + share)
    row_of_table = table + (tl.load(table_rows + b) if table_rows is not None else b).to(tl.int64) * table_stride
    q_parts = load_query(q, token * steps[0] + head.to(tl.int64) * steps[1], ok, FORM)
    acc0, acc1, m, l = walk(q_parts, first, last, row_of_table, pool, kv_head, rows, slopes, rules, FORM)
    acc0, acc1, lse2 = settled(acc0, acc1, m, l)
    if SPLITS > 1:
        row = (token * H + head) * SPLITS + z
        store_parts(part_out, row * FORM.Dv, ok, acc0, acc1, FORM)
        tl.store(part_lse + row, lse2, mask=ok)
    else:
        finish(out, lse, acc0, acc1, lse2, token, head, ok, rules[3], steps, FORM)


@triton.jit(do_not_specialize=["num_sequences", "decoded"])
def merge_splits_kernel(
    out, lse, part_out, part_lse, cu_seqlens_q, sinks, steps, num_sequences, decoded,
    FORM: tl.constexpr, BATCH: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: the splits of one (token, head)."""
    token, h, H = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    _, _, out_token, out_head, lse_token = steps
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
        sinks + h if FORM.sinks else None,
        out,
        lse,
        FORM.Dv,
        WIDTH,
    )


def paged_prefill(call: AttentionCall, decoded: int) -> None:
    """Attend from the sequences with more than `decoded` new tokens. Modifies: their rows of call.out and call.lse."""
    (T, H, Dv), B, K, on = call.out.shape, call.seq_lens.shape[0], call.k.shape[2], target(call.q.device)
    tuned = tuning("prefill", on, head_bytes(call), max(call.q.shape[2], Dv))
    M = tuned.M if call.tree_mask is None and call.split_tokens is None else min(tuned.M, 64)  # see keys_of
    form = form_of(call, M=M, N=keys_of(call, M, tuned.N))
    heads, tiles = K * form.head_tiles, T // form.queries + B
    splits = (
        1
        if call.split_tokens
        else num_splits(-(-T // form.queries) * heads, on.processors, -(-call.max_seqlen_k // form.N))
    )
    slots = T * H * splits if splits > 1 else 0
    part_out, part_lse = (call.q.new_empty(size, dtype=torch.float32) for size in (slots * Dv, slots))
    shape = {"FORM": form, "BATCH": triton.next_power_of_2(B), "SPLITS": splits}
    rules, steps = rules_of(call), steps_of(call)
    prefill_kernel[tiles, heads, splits](
        call.q, call.out, call.lse, part_out, part_lse, pool_of(call), tables_of(call), rules, steps, B, decoded, H,
        **shape, num_warps=tuned.num_warps, num_stages=tuned.stages,
    )  # fmt: skip
    if splits > 1:
        merge_splits_kernel[T, H](
            call.out, call.lse, part_out, part_lse, call.cu_seqlens_q, rules[3], steps, B, decoded,
            **shape, WIDTH=triton.next_power_of_2(Dv), num_warps=1,
        )  # fmt: skip


def num_splits(programs: int, processors: int, key_tiles: int) -> int:
    """How often keys are cut so that `programs` become about as many as there are processors: a power of two, 4 tiles each at least."""
    splits = 1
    while splits < 16 and programs * splits * 2 <= processors and splits * 8 <= key_tiles:
        splits *= 2
    return splits


def objections(case: Case) -> list[str]:
    """Why this kernel cannot serve `case`."""
    return no_form(case)
