"""Merging softmax over parts of the keys into softmax over all keys: partials of a launch, states of `merge_states`,
results of another library (`store_states`).

    lse = ln sum_i e^(lse_i)        out = sum_i e^(lse_i - lse) * out_i

A part that saw no key (lse -inf) has weight 0, even if its out holds garbage.

Grid      one program per (token, query head).
Program   reads 16 LSEs and 16 rows of Dv at a time, so that these loads are in flight together; always in key order.
Bytes     (parts + 1) * Dv * 4 per token and head: small beside the keys of the parts.
Tuned     not on any GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pagedkv.kernels.triton.elements import number, rounded
from pagedkv.kernels.triton.partition import sequence_of_row
from pagedkv.kernels.triton.tile import LN2, LOG2E

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pagedkv.kernels.args import AttentionCall


@triton.jit
def fold(part_out, part_lse, row, stride, parts, sink, out, lse, Dv: tl.constexpr, WIDTH: tl.constexpr):
    """Merge the `parts` rows `row`, row + stride, ... of the partials; store the row at `out` and its LSE at `lse`.

    part_lse: LSE in base 2.   sink: pointer to the head's sink logit, or None.   lse: natural.
    """
    c = tl.arange(0, WIDTH)
    top, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    acc = tl.full([WIDTH], 0.0, tl.float32)
    for first in range(0, parts, 16):
        j = first + tl.arange(0, 16)
        rows = row + j.to(tl.int64) * stride
        one = tl.load(part_lse + rows, mask=j < parts, other=float("-inf"))
        value = tl.load(
            part_out + rows[:, None] * Dv + c[None, :], mask=(j < parts)[:, None] & (c < Dv)[None, :], other=0.0
        )
        higher = tl.maximum(top, tl.max(one, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight, fade = tl.exp2(one - safe), tl.exp2(top - safe)
        acc = acc * fade + tl.sum(value * weight[:, None], 0)
        total = total * fade + tl.sum(weight, 0)
        top = higher
    if sink is not None:
        logit = tl.load(sink) * LOG2E
        higher = tl.maximum(top, logit)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(top - safe)
        weight = tl.where(logit == float("inf"), 1.0, tl.exp2(logit - safe))  # inf - inf would be NaN
        acc, total, top = acc * fade, total * fade + weight, higher
    total = tl.where(total == 0, 1.0, total)  # if total is 0, top is -inf and acc is 0
    tl.store(out + c, rounded(acc / total, out.dtype.element_ty), mask=c < Dv)
    tl.store(lse, (top + tl.log2(total)) * LN2)


@triton.jit
def _merged_rows(x, a, y, b):
    """Return rows and LSEs over the keys of both: x, y [WIDTH] or [N, WIDTH], a, b [] or [N], natural LSEs."""
    top = tl.maximum(a, b)
    safe = tl.where(top == float("-inf"), 0.0, top)
    # a state with an infinite sink has lse inf: inf - inf would be NaN
    weigh_a = tl.where(a == float("inf"), 1.0, tl.exp(a - safe))
    weigh_b = tl.where(b == float("inf"), 1.0, tl.exp(b - safe))
    total = weigh_a + weigh_b
    total = tl.where(total == 0, 1.0, total)
    by_a, by_b = weigh_a / total, weigh_b / total
    if len(x.shape) == 2:
        by_a, by_b = tl.broadcast_to(by_a[:, None], x.shape), tl.broadcast_to(by_b[:, None], x.shape)
    return tl.where(by_a > 0, x * by_a, 0.0) + tl.where(by_b > 0, y * by_b, 0.0), top + tl.log(total)


@triton.jit
def _merge_states_kernel(
    out_a, lse_a, out_b, lse_b, out, lse, a_token, a_head, b_token, b_head, la_token, la_head, lb_token, lb_head, H,
    Dv: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Merge one row of two states."""
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, WIDTH)
    a, b = tl.load(lse_a + token * la_token + h * la_head), tl.load(lse_b + token * lb_token + h * lb_head)
    x = number(tl.load(out_a + token * a_token + h * a_head + c, mask=c < Dv, other=0.0)).to(tl.float32)
    y = number(tl.load(out_b + token * b_token + h * b_head + c, mask=c < Dv, other=0.0)).to(tl.float32)
    merged, merged_lse = _merged_rows(x, a, y, b)
    tl.store(out + (token * H + h) * Dv + c, rounded(merged, out.dtype.element_ty), mask=c < Dv)
    tl.store(lse + token * H + h, merged_lse)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state over the keys of both: out [T, H, Dv] of `out_a`'s dtype, lse float32 [T, H], contiguous."""
    T, H, Dv = out_a.shape
    out, lse = torch.empty_like(out_a, memory_format=torch.contiguous_format), lse_a.new_empty((T, H))
    out_a, out_b = (x if x.stride(2) == 1 else x.contiguous() for x in (out_a, out_b))
    if T and H:
        strides = (*out_a.stride()[:2], *out_b.stride()[:2], *lse_a.stride(), *lse_b.stride())
        width = triton.next_power_of_2(Dv)
        _merge_states_kernel[T, H](out_a, lse_a, out_b, lse_b, out, lse, *strides, H, Dv=Dv, WIDTH=width, num_warps=1)
    return out, lse


@triton.jit
def _rows_at(out, lse, strides, part, row, head, ok, Dv: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows [HEADS, WIDTH] and LSEs [HEADS] of one token of a state, both float32."""
    c = tl.arange(0, WIDTH)
    at = part * strides[0] + row * strides[1] + head * strides[2]
    x = tl.load(out + at[:, None] + c[None, :], mask=ok[:, None] & (c < Dv)[None, :], other=0.0)
    lse_at = part * strides[3] + row * strides[4] + head * strides[5]
    return number(x).to(tl.float32), tl.load(lse + lse_at, mask=ok, other=float("-inf"))


@triton.jit
def _not_finite(x, log):
    """Return how many elements of each row of x [N, WIDTH] are not finite; 0 where log [N] is -inf: no key was seen."""
    found = tl.sum((tl.abs(x) < float("inf")).to(tl.int32), 1)
    return tl.where(log == float("-inf"), 0, x.shape[1] - found)


@triton.jit(do_not_specialize=["B", "steps", "length"])
def _store_states_kernel(
    out_a, lse_a, a_strides, out_b, lse_b, b_strides, out, lse, cu_seqlens_q, lens, doubtful, H, B, steps, length,
    out_token, out_head, lse_token, Dv: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One program: HEADS heads of one token. steps: of the binary search over B sequences.

    The rows are loaded before the search, so that both wait for memory at the same time. Rows of padding exist and hold
    anything.
    """
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    ok = head < H
    wide, part, row = head.to(tl.int64), (token // length).to(tl.int64), (token % length).to(tl.int64)
    value, log = _rows_at(out_a, lse_a, a_strides, part, row, wide, ok, Dv, WIDTH)
    if out_b is not None:
        other, other_log = _rows_at(out_b, lse_b, b_strides, part, row, wide, ok, Dv, WIDTH)
    sequence = sequence_of_row(cu_seqlens_q, token, B, steps)
    written = ok & (token + 0 * head < tl.load(cu_seqlens_q + B))
    sees = tl.load(lens + sequence) + 0 * head > 0
    lost = 0 * head
    if out_b is not None:
        lost = tl.where(sees & written, _not_finite(value, log) + _not_finite(other, other_log), 0)
        value, log = _merged_rows(value, log, other, other_log)
    value = tl.where(tl.broadcast_to((sees & written)[:, None], value.shape), value, 0.0)
    log = tl.where(sees, log, float("-inf"))
    c = tl.arange(0, WIDTH)
    to = out + token.to(tl.int64) * out_token + wide[:, None] * out_head + c[None, :]
    tl.store(to, rounded(value, out.dtype.element_ty), mask=written[:, None] & (c < Dv)[None, :])
    tl.store(lse + token.to(tl.int64) * lse_token + head, log, mask=written)
    bad = tl.sum(tl.sum((value != value).to(tl.int32), 1) + lost, 0)
    tl.store(doubtful + sequence, 1, mask=bad > 0)


def store_states(call: AttentionCall, states: Sequence[tuple[Tensor, Tensor]], lens: Tensor, doubtful: Tensor) -> None:
    """Store the state over the keys of one or two states. A sequence of length 0 gives 0 and -inf.

    Shapes:   each state out [X, N, H, Dv] and lse float32 [X, N, H], any strides, last dim of out contiguous: token t
              is row t % N of part t // N; lens, doubtful int32 [B]
    Modifies: call.out, call.lse; doubtful: 1 where a result of the sequence is NaN, or one of two states is not finite,
              which a weight of 0 would hide
    """
    (T, H, Dv), B = call.out.shape, lens.shape[0]
    width = triton.next_power_of_2(Dv)
    heads = min(triton.next_power_of_2(H), max(1, 4096 // width))
    (out_a, lse_a), (out_b, lse_b) = states[0], states[1] if len(states) == 2 else (None, None)
    a, b = (
        (0,) * 6 if out is None or part is None else (*out.stride()[:3], *part.stride())
        for out, part in ((out_a, lse_a), (out_b, lse_b))
    )
    _store_states_kernel[T, triton.cdiv(H, heads)](
        out_a, lse_a, a, out_b, lse_b, b, call.out, call.lse, call.cu_seqlens_q, lens, doubtful, H, B, B.bit_length(),
        out_a.shape[1], *call.out.stride()[:2], call.lse.stride(0),
        Dv=Dv, WIDTH=width, HEADS=heads, num_warps=max(1, min(8, heads * width // 512)),
    )  # fmt: skip
