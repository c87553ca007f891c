"""Stored elements and products: how bytes of the pool become numbers a tensor core takes, and what the interpreter needs instead.

    kind    a byte x becomes                                   factor, folded into scores and outputs
    e4m3    float8e4nv, converted natively; or fp16 bits       1; or 256, for fp16's exponent is biased by 8 more
            (x & 0x80) << 8 | (x & 0x7f) << 7
    e5m2    fp16 bits x << 8                                   1
    int8    an exact small number                              1
    int4    two numbers: (x & 15) - 8, (x >> 4) - 8            1

A head is read in two parts, because a tile's width must be a power of two: elements 0..W0 and W0..W0+W1 (80 = 64 + 16, 192 = 128 + 64,
576 = 512 + 64), or for int4 the even ones (low nibbles) and the odd ones. No byte is read twice and the padding is small.

Triton's interpreter computes in numpy, which has no bfloat16: there everything becomes float32, rounded where the GPU would round.
This file knows nothing of pages, masks or softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Decided when this module is imported, as `triton.jit` does."""


@triton.jit
def number(x):
    """`x` for the interpreter's arithmetic; on a GPU, `x`."""
    if INTERPRET:
        if x.dtype == tl.bfloat16:
            x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        else:
            x = x.to(tl.float32)
    return x


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 `x` as DTYPE, to nearest even: the interpreter's own cast to bfloat16 truncates."""
    if INTERPRET and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        bits = tl.where(finite, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def product(a, b, acc, SPEC: tl.constexpr):
    """acc + a @ b in float32; float32 operands are multiplied to float32's precision, not TF32's."""
    if SPEC.dtype == tl.float32:
        acc = tl.dot(number(a), number(b), acc, input_precision=SPEC.float32_products)
    else:
        acc = tl.dot(number(a), number(b), acc)
    return acc


@triton.jit
def element(x, SPEC: tl.constexpr):
    """Stored `x` as numbers of q's type (in the interpreter: float32), `Specialisation.factor` times too small."""
    TO: tl.constexpr = tl.float32 if INTERPRET else SPEC.dtype
    if SPEC.kind == "e4m3":
        if SPEC.native_fp8:
            x = x.to(tl.float8e4nv, bitcast=True).to(TO)
        else:
            wide = x.to(tl.uint16)
            x = ((wide & 0x80) << 8 | (wide & 0x7F) << 7).to(tl.float16, bitcast=True).to(TO)
    elif SPEC.kind == "e5m2":
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(TO)
    elif SPEC.kind == "int8":
        x = x.to(tl.int8, bitcast=True).to(TO)
    return x


@triton.jit
def columns(x, row, present, FROM: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr):
    """x[row, FROM : FROM + WIDTH], zeros where a row is not `present` or a column reaches LIMIT: nothing is read there."""
    c = FROM + tl.arange(0, WIDTH)
    mask = present[:, None]
    if FROM + WIDTH > LIMIT:
        mask = mask & (c < LIMIT)[None, :]
    return tl.load(x + row[:, None] + c[None, :], mask=mask, other=0)


@triton.jit
def parts(x, row, present, W0: tl.constexpr, W1: tl.constexpr, LIMIT: tl.constexpr, SPEC: tl.constexpr):
    """Both parts of stored heads as numbers; the second is the first again where there is only one. LIMIT: their elements in memory."""
    stored = columns(x, row, present, 0, W0, LIMIT)
    if SPEC.kind == "int4":
        TO: tl.constexpr = tl.float32 if INTERPRET else SPEC.dtype
        first = ((stored & 15).to(tl.int8) - 8).to(TO)
        second = ((stored >> 4).to(tl.int8) - 8).to(TO)
    else:
        first = element(stored, SPEC)
        second = first
        if W1 > 0:
            second = element(columns(x, row, present, W0, W1, LIMIT), SPEC)
    return first, second


@triton.jit
def part_columns(SECOND: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, SPEC: tl.constexpr):
    """Which elements of an unpacked head (a query, an output) the columns of a part are."""
    if SPEC.kind == "int4":
        c = 2 * tl.arange(0, W0) + SECOND
    elif SECOND:
        c = W0 + tl.arange(0, W1)
    else:
        c = tl.arange(0, W0)
    return c
