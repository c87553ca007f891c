"""gather_kv: copy tokens of sequences out of their pages into rows of results, and dequantise them.

    row j of sequence b  =  the vector of the token at position first[b] + j, times its scale, rounded once
                            0 where there is no token: before 0, from seq_lens[b] on, in a punched page

Grid      (rows, groups of HEADS kv heads). Rows of packed results that no token has are skipped.
Program   looks up the sequence of its row by a binary search in `starts` (packed results) and the frame of its token in
          the page table, reads the vectors of K and V once and writes them once.
Bytes     (D + Dv) * K stored elements read, and as many results written, per row.
Tuned     not on any GPU yet.

8-bit floats become fp16 by shifts, which every GPU can do; e4m3 then has an exponent that is too small by 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pagedkv.kernels.layout import scale_kind, scale_strides
from pagedkv.kernels.triton.elements import number, rounded
from pagedkv.kernels.triton.specialisation import KINDS, as_stored

if TYPE_CHECKING:
    from pagedkv.kernels.args import GatherCall


@triton.jit
def value_of(x, KIND: tl.constexpr):
    """Return stored `x` as float32; of int4, the low nibble."""
    if KIND == "e4m3":
        wide = x.to(tl.uint16)
        magnitude = tl.where((wide & 0x7F) == 0x7F, 0x7E00, (wide & 0x7F) << 7).to(tl.uint16)  # 0x7F is NaN
        value = ((wide & 0x80) << 8 | magnitude).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif KIND == "e5m2":
        value = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "int8":
        value = x.to(tl.int8, bitcast=True).to(tl.float32)
    elif KIND == "int4":
        value = (x & 15).to(tl.float32) - 8.0
    else:
        value = number(x).to(tl.float32)
    return value


@triton.jit
def copy_vectors(
    pool, at, held, ok, scale, scale_at, out, to, DIM: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """Store the vectors of HEADS heads at `pool` + `at` to `out` + `to`, times their scales; zeros where not `held`."""
    c = tl.arange(0, WIDTH)
    limit: tl.constexpr = DIM // 2 if KIND == "int4" else DIM
    mask = ok[:, None] & (c < limit)[None, :]
    stored = tl.load(pool + at[:, None] + c[None, :], mask=mask & held[:, None], other=0)
    factor = tl.full(ok.shape, 1.0, tl.float32)
    if SCALE == 1:
        factor = factor * tl.load(scale)
    elif SCALE == 2:
        factor = tl.load(scale + scale_at, mask=held, other=0.0)
    by = tl.broadcast_to(factor[:, None], stored.shape)
    TO: tl.constexpr = out.dtype.element_ty
    value = tl.where(held[:, None], value_of(stored, KIND) * by, 0.0)
    if KIND == "int4":
        odd = tl.where(held[:, None], value_of(stored >> 4, KIND) * by, 0.0)
        tl.store(out + to[:, None] + 2 * c[None, :], rounded(value, TO), mask=mask)
        tl.store(out + to[:, None] + 2 * c[None, :] + 1, rounded(odd, TO), mask=mask)
    else:
        tl.store(out + to[:, None] + c[None, :], rounded(value, TO), mask=mask)


@triton.jit
def gather_kernel(
    k, v, k_scale, v_scale, block_table, rows, seq_lens, first, starts, k_out, v_out, K, B, steps, padded_rows,
    k_frame, k_slot, k_head, v_frame, v_slot, v_head, ks_frame, ks_slot, ks_head, vs_frame, vs_slot, vs_head,
    table_row, rows_stride, ko_sequence, ko_row, ko_head, vo_sequence, vo_row, vo_head,
    S: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr,
    HEADS: tl.constexpr, KIND: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One program: key and value of HEADS kv heads of one row. steps: of the binary search over B sequences."""
    row = tl.program_id(0).to(tl.int64)
    if PACKED:
        if row >= tl.load(starts + B):
            return
        sequence, beyond = row * 0, row * 0 + B
        for _ in range(steps):
            middle = (sequence + beyond) // 2
            is_before = tl.load(starts + middle) <= row
            sequence = tl.where(is_before, middle, sequence)
            beyond = tl.where(is_before, beyond, middle)
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
    copy_vectors(
        k, frame * k_frame + at * k_slot + head * k_head, held, ok,
        k_scale, frame * ks_frame + at * ks_slot + head * ks_head,
        k_out, sequence * ko_sequence + out_row * ko_row + head * ko_head, D, KW, KIND, K_SCALE,
    )  # fmt: skip
    copy_vectors(
        v, frame * v_frame + at * v_slot + head * v_head, held, ok,
        v_scale, frame * vs_frame + at * vs_slot + head * vs_head,
        v_out, sequence * vo_sequence + out_row * vo_row + head * vo_head, Dv, VW, KIND, V_SCALE,
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
    widths = [triton.next_power_of_2(max(1, pool.shape[3])) for pool in (x.k, x.v)]
    out_strides = [(0,) * packed + out.stride()[:-1] for out in (call.k_out, call.v_out)]
    gather_kernel[rows, triton.cdiv(K, heads)](
        as_stored(x.k), as_stored(x.v), *scales, x.block_table, x.rows, x.seq_lens, x.first, call.starts,
        call.k_out, call.v_out, K, B, B.bit_length(), 1 if packed else call.k_out.shape[1],
        *x.k.stride()[:3], *x.v.stride()[:3], *(stride for scale in scales for stride in scale_strides(scale)),
        x.block_table.stride(0), 0 if x.rows is None else x.rows.stride(0), *out_strides[0], *out_strides[1],
        S=x.k.shape[1], D=call.k_out.shape[-1], Dv=call.v_out.shape[-1], KW=widths[0], VW=widths[1], HEADS=heads,
        KIND=KINDS.get(x.k.dtype, ""), K_SCALE=scale_kind(x.k_scale), V_SCALE=scale_kind(x.v_scale), PACKED=packed,
        num_warps=4,
    )  # fmt: skip
