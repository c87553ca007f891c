"""gather_kv: copy tokens of sequences out of their pages into rows of results, and dequantise them; page tables without
holes, for kernels that know none.

    row j of sequence b  =  the vector of the token at position first[b] + j, times its scale, rounded once;
                            k8v4, k5v4: rotated back; K then times its divisor and plus its centre (quant.py)
                            0 where there is no token: before 0, from seq_lens[b] on, in a hole

Grid      (rows, groups of HEADS kv heads). Rows of packed results that no token has are skipped.
Program   looks up the sequence of its row by a binary search in `starts` (packed results) and the frame of its token in
          the page table, reads the vectors of K and V once and writes them once.
Bytes     (D + Dv) * K stored elements read, and as many results written, per row.
Tuned     not on any GPU yet.

8-bit floats become fp16 by shifts, which every GPU can do; e4m3 then has an exponent that is too small by 8.

`_present_kernel` has one program for each sequence. It reads the table once, BLOCK entries at a time, and stores entry
by entry where a prefix sum of the pages that are there says: 8 bytes a page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pagedkv.kernels.layout import scale_kind, scale_strides
from pagedkv.kernels.triton.elements import _element, _hadamard, _pairs, _signs, _whole, number, rounded
from pagedkv.kernels.triton.partition import sequence_of_row
from pagedkv.kernels.triton.specialisation import _kind_of, as_stored

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.kernels.args import AttentionCall, GatherCall


@triton.jit
def _copy_vectors(
    pool, page, slot, stride, head, held, ok, scale, scale_at, calibration, out, to,
    S: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr,
    ROTATED: tl.constexpr,
):  # fmt: skip
    """Store the vectors of HEADS heads at `pool` + `page` + `slot` * `stride` to `out` + `to`; zeros where not `held`.

    calibration: the statistics of K's channels, or None.
    """
    c = tl.arange(0, WIDTH)
    mask = ok[:, None] & (c < DIM)[None, :]
    if KIND == "int5" or KIND == "code4":
        even, odd = _pairs(pool, page, slot, stride, held, WIDTH // 2, DIM, S, KIND, tl.float32)
        value = _whole(even, odd)
    else:
        row = (page + slot * stride)[:, None]
        stored = tl.load(pool + row + c[None, :], mask=mask & held[:, None], other=0)
        value = number(_element(stored, KIND, False, tl.float32)).to(tl.float32)
        if KIND == "e4m3":
            value = value * 256.0
    factor = tl.full(ok.shape, 1.0, tl.float32)
    if SCALE == 1:
        factor = factor * tl.load(scale)
    elif SCALE == 2:
        factor = number(tl.load(scale + scale_at, mask=held, other=0.0)).to(tl.float32)
    value = value * tl.broadcast_to(factor[:, None], value.shape)
    if ROTATED:
        value = _hadamard(value, DIM) * _signs(c)[None, :]
    if calibration is not None:
        of_channel = calibration + head[:, None] * (2 * DIM) + c[None, :]
        divisor = tl.load(of_channel + DIM, mask=mask, other=0.0)
        value = value * divisor + tl.load(of_channel, mask=mask, other=0.0)
    value = tl.where(held[:, None], value, 0.0)
    tl.store(out + to[:, None] + c[None, :], rounded(value, out.dtype.element_ty), mask=mask)


@triton.jit
def _gather_kernel(
    k, v, k_scale, v_scale, calibration, block_table, rows, seq_lens, first, starts, k_out, v_out,
    K, B, steps, padded_rows,
    k_frame, k_slot, k_head, v_frame, v_slot, v_head, ks_frame, ks_slot, ks_head, vs_frame, vs_slot, vs_head,
    table_row, rows_stride, ko_sequence, ko_row, ko_head, vo_sequence, vo_row, vo_head,
    S: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr,
    HEADS: tl.constexpr, KIND: tl.constexpr, V_KIND: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """One program: key and value of HEADS kv heads of one row. steps: of the binary search over B sequences."""
    row = tl.program_id(0).to(tl.int64)
    if PACKED:
        if row >= tl.load(starts + B):
            return
        sequence = sequence_of_row(starts, row, B, steps)
        in_sequence = row - tl.load(starts + sequence)
        out_row = row
    else:
        sequence = row // padded_rows
        in_sequence = row % padded_rows
        out_row = in_sequence
    position = tl.load(first + sequence).to(tl.int64) + in_sequence
    there = (position >= 0) & (position < tl.load(seq_lens + sequence))
    table = sequence
    if rows is not None:
        table = tl.load(rows + sequence * rows_stride).to(tl.int64)
    frame = tl.load(block_table + table * table_row + position // S, mask=there, other=-1).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    ok, at = head < K, position % S
    held = ok & (frame + 0 * head >= 0)  # a mask of one scalar and of a tensor is more than the interpreter takes
    _copy_vectors(
        k, frame * k_frame + head * k_head, at, k_slot, head, held, ok,
        k_scale, frame * ks_frame + at * ks_slot + head * ks_head, calibration,
        k_out, sequence * ko_sequence + out_row * ko_row + head * ko_head,
        S, D, KW, KIND, K_SCALE, V_KIND == "code4",
    )  # fmt: skip
    _copy_vectors(
        v, frame * v_frame + head * v_head, at, v_slot, head, held, ok,
        v_scale, frame * vs_frame + at * vs_slot + head * vs_head, None,
        v_out, sequence * vo_sequence + out_row * vo_row + head * vo_head,
        S, Dv, VW, V_KIND, V_SCALE, V_KIND == "code4",
    )  # fmt: skip


def gather_kv(call: GatherCall) -> None:
    """Copy the tokens of each sequence out of their pages. Modifies: call.k_out, call.v_out."""
    x, packed = call.source, call.starts is not None
    K, B, rows = x.k.shape[2], len(x.seq_lens), call.k_out.shape[0]
    rows = rows if packed else rows * call.k_out.shape[1]
    if not rows or not B:
        return
    heads = min(8, triton.next_power_of_2(K))
    scales = (x.k_scale, x.v_scale)
    kinds, dims = (_kind_of(x.k), _kind_of(x.v, True)), (call.k_out.shape[-1], call.v_out.shape[-1])
    widths = [triton.next_power_of_2(max(1, dim)) for dim in dims]
    out_strides = [(0,) * packed + out.stride()[:-1] for out in (call.k_out, call.v_out)]
    _gather_kernel[rows, triton.cdiv(K, heads)](
        as_stored(x.k), as_stored(x.v), *scales, x.calibration, x.block_table, x.rows, x.seq_lens, x.first, call.starts,
        call.k_out, call.v_out, K, B, B.bit_length(), 1 if packed else call.k_out.shape[1],
        *x.k.stride()[:3], *x.v.stride()[:3], *(stride for scale in scales for stride in scale_strides(scale)),
        x.block_table.stride(0), 0 if x.rows is None else x.rows.stride(0), *out_strides[0], *out_strides[1],
        S=x.k.shape[1], D=dims[0], Dv=dims[1], KW=widths[0], VW=widths[1], HEADS=heads,
        KIND=kinds[0], V_KIND=kinds[1], K_SCALE=scale_kind(x.k_scale), V_SCALE=scale_kind(x.v_scale), PACKED=packed,
        num_warps=4,
    )  # fmt: skip


# do_not_specialize: these numbers change from step to step
@triton.jit(do_not_specialize=["pages", "M", "prefix", "reach"])
def _present_kernel(
    block_table, rows, seq_lens, cu_seqlens_q, table, found, table_row, rows_stride, pages, M, prefix, reach,
    S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the table of one sequence without its holes, and its row of `found` (see `present`)."""
    b, B = tl.program_id(0), tl.num_programs(0)
    begin = tl.load(cu_seqlens_q + b)
    new = tl.load(cu_seqlens_q + b + 1) - begin
    total = tl.where(new > 0, tl.load(seq_lens + b), 0)
    row = b
    if rows is not None:
        row = tl.load(rows + b * rows_stride)
    block_table += row.to(tl.int64) * table_row
    table += b.to(tl.int64) * pages
    kept, tokens, punched = new * 0, new * 0, new * 0
    for first in range(0, tl.minimum(pages, tl.cdiv(total, S)), BLOCK):
        page = first + tl.arange(0, BLOCK)
        here = tl.minimum(total - page * S, S)
        live = (page < pages) & (here > 0)
        frame = tl.load(block_table + page, mask=live, other=-1)
        held = live & (frame >= 0)
        tl.store(table + kept + tl.cumsum(held.to(tl.int32), 0) - 1, frame, mask=held)
        kept += tl.sum(held.to(tl.int32), 0)
        tokens += tl.sum(tl.where(held, here, 0), 0)
        punched += tl.sum((live & (frame < 0) & (page * S + S > total - new - reach)).to(tl.int32), 0)
    uneven = (prefix >= 0) & ((begin != b * M) | (tokens - new != prefix))
    tl.store(found + b, tokens)
    tl.store(found + B + b, 0)
    tl.store(found + 2 * B + b, ((punched > 0) | uneven).to(tl.int32))


def present(call: AttentionCall, prefix: int | None) -> tuple[Tensor, Tensor]:
    """Return the tables without holes and, of each sequence: the tokens that are present, 0, and whether it is lost.

    A sequence is lost if a page of its new tokens, or of their windows, is a hole. With a `prefix`, it is lost, too, if
    its new tokens do not begin at token b * max_seqlen_q, or if it has not `prefix` tokens before them.

    Shapes: int32 [B, P], entries past the last page of a sequence hold anything; int32 [3, B]
    """
    B, S = call.seq_lens.shape[0], call.k.shape[1]
    pages = min(call.block_table.shape[1], -(-call.max_seqlen_k // S))
    table, found = call.seq_lens.new_empty(B, pages), call.seq_lens.new_empty(3, B)
    _present_kernel[B,](
        call.block_table, call.rows, call.seq_lens, call.cu_seqlens_q, table, found, call.block_table.stride(0),
        0 if call.rows is None else call.rows.stride(0), pages, call.max_seqlen_q, -1 if prefix is None else prefix,
        0 if call.window is None else min(call.window - 1, call.max_seqlen_k), S=S, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return table, found


@triton.jit(do_not_specialize=["B"])
def _starts_kernel(lens, wide, narrow, B, BLOCK: tl.constexpr):
    """One program: the sums of the lengths before each sequence, and of all, as int64 and int32."""
    tl.store(wide, 0)
    tl.store(narrow, 0)
    before = tl.load(lens).to(tl.int64) * 0
    for first in range(0, B, BLOCK):
        b = first + tl.arange(0, BLOCK)
        n = tl.load(lens + b, mask=b < B, other=0).to(tl.int64)
        sums = before + tl.cumsum(n, 0)
        tl.store(wide + 1 + b, sums, mask=b < B)
        tl.store(narrow + 1 + b, sums.to(tl.int32), mask=b < B)
        before += tl.sum(n, 0)


def starts_of(lens: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each sequence of `lens` tokens begins in packed rows, and the end: int64 and int32 [B + 1]."""
    B = lens.shape[0]
    wide, narrow = lens.new_empty(B + 1, dtype=torch.int64), lens.new_empty(B + 1)
    _starts_kernel[1,](lens, wide, narrow, B, BLOCK=256, num_warps=4)
    return wide, narrow
