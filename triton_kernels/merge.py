"""Merging softmax over parts of the keys into softmax over all keys: partials of a launch, states of `merge_states`.

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
from pagedkv.kernels.triton.tile import LN2, LOG2E

if TYPE_CHECKING:
    from torch import Tensor


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
def merge_states_kernel(
    out_a, lse_a, out_b, lse_b, out, lse, a_token, a_head, b_token, b_head, la_token, la_head, lb_token, lb_head, H,
    Dv: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Merge one row of two states."""
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, WIDTH)
    a, b = tl.load(lse_a + token * la_token + h * la_head), tl.load(lse_b + token * lb_token + h * lb_head)
    x = number(tl.load(out_a + token * a_token + h * a_head + c, mask=c < Dv, other=0.0)).to(tl.float32)
    y = number(tl.load(out_b + token * b_token + h * b_head + c, mask=c < Dv, other=0.0)).to(tl.float32)
    top = tl.maximum(a, b)
    safe = tl.where(top == float("-inf"), 0.0, top)
    # a state with an infinite sink has lse inf: inf - inf would be NaN
    weigh_a = tl.where(a == float("inf"), 1.0, tl.exp(a - safe))
    weigh_b = tl.where(b == float("inf"), 1.0, tl.exp(b - safe))
    total = weigh_a + weigh_b
    total = tl.where(total == 0, 1.0, total)
    merged = tl.where(weigh_a > 0, x * (weigh_a / total), 0.0) + tl.where(weigh_b > 0, y * (weigh_b / total), 0.0)
    tl.store(out + (token * H + h) * Dv + c, rounded(merged, out.dtype.element_ty), mask=c < Dv)
    tl.store(lse + token * H + h, top + tl.log(total))


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state over the keys of both: out [T, H, Dv] of `out_a`'s dtype, lse float32 [T, H], contiguous."""
    T, H, Dv = out_a.shape
    out, lse = torch.empty_like(out_a, memory_format=torch.contiguous_format), lse_a.new_empty((T, H))
    out_a, out_b = (x if x.stride(2) == 1 else x.contiguous() for x in (out_a, out_b))
    if T and H:
        strides = (*out_a.stride()[:2], *out_b.stride()[:2], *lse_a.stride(), *lse_b.stride())
        width = triton.next_power_of_2(Dv)
        merge_states_kernel[T, H](out_a, lse_a, out_b, lse_b, out, lse, *strides, H, Dv=Dv, WIDTH=width, num_warps=1)
    return out, lse
