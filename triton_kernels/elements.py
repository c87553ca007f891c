"""Stored elements and products: from bytes of the pool to operands of tensor cores, or to the interpreter's numbers.

    kind    a byte x becomes                                   factor, folded into scores and outputs
    e4m3    float8e4nv, converted natively; or fp16 bits       1; or 256, for fp16's exponent is biased by 8 more
            (x & 0x80) << 8 | (x & 0x7f) << 7; fp16's NaN for x & 0x7f = 0x7f
    e5m2    fp16 bits x << 8                                   1
    int8    fp16 bits 0x6400 | x ^ 0x80, less 1152             1
    int4    two numbers: (x & 15) - 8, (x >> 4) - 8            1

Operands are float16, which holds each of these numbers exactly; beside a float32 query they are float32. A bfloat16
query and the weights become float16, too: powers of two keep them in its range (`scaled_queries`, tile.py). A
conversion to bfloat16 would be an instruction of its own for each element (F2F), at a quarter of the rate.

A head is read in two parts, because a tile's width must be a power of two: elements 0..W0 and W0..W0+W1 (80 = 64 + 16,
192 = 128 + 64, 576 = 512 + 64); for int4 the even elements (low nibbles) and the odd elements. No byte is read twice,
and the padding is small.

Triton's interpreter computes in numpy, which has no bfloat16: in the interpreter every element becomes float32, rounded
where the GPU would round. This file knows nothing of pages, masks or softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether the kernels are interpreted; fixed when this module is imported, as in `triton.jit`."""


@triton.jit
def number(x):
    """Return `x` as float32 in the interpreter; on a GPU, return `x`."""
    if INTERPRET:
        if x.dtype == tl.bfloat16:
            x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        else:
            x = x.to(tl.float32)
    return x


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Return float32 `x` as DTYPE, rounded to nearest even; the interpreter's own cast to bfloat16 truncates."""
    if INTERPRET and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        bits = tl.where(finite, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def power(exponent):
    """Return 2^exponent as float32, for exponents of -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(x):
    """Return floor(log2 x) of float32 x >= 0; -127 for 0 and subnormals, 128 for what is not finite."""
    return (x.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def scaled_queries(q0, q1, SPEC: tl.constexpr):
    """Return both parts of q as operands, each row times a power of two; and the inverse of the powers, float32 [M].

    The powers bring bfloat16 into float16's range: the largest element of a row has the exponent 14.
    """
    q0, q1 = number(q0).to(tl.float32), number(q1).to(tl.float32)
    up = tl.minimum(14 - exponent_of(tl.maximum(tl.max(tl.abs(q0), 1), tl.max(tl.abs(q1), 1))), 126)
    return (q0 * power(up)[:, None]).to(tl.float16), (q1 * power(up)[:, None]).to(tl.float16), power(-up)


@triton.jit
def product(a, b, acc, SPEC: tl.constexpr):
    """Return acc + a @ b in float32. float32 operands are multiplied with float32's precision, not TF32's."""
    if SPEC.dtype == tl.float32:
        acc = tl.dot(number(a), number(b), acc, input_precision=SPEC.float32_products)
    else:
        acc = tl.dot(number(a), number(b), acc)
    return acc


@triton.jit
def _element(x, SPEC: tl.constexpr):
    """Return stored `x` as operands (interpreter: float32), too small by `Specialisation.factor`."""
    TO: tl.constexpr = tl.float32 if INTERPRET else SPEC.operand
    if SPEC.kind == "e4m3":
        if SPEC.native_fp8:
            x = x.to(tl.float8e4nv, bitcast=True).to(TO)
        else:
            wide = x.to(tl.uint16)
            magnitude = tl.where((wide & 0x7F) == 0x7F, 0x7E00, (wide & 0x7F) << 7).to(tl.uint16)  # 0x7F is NaN
            x = ((wide & 0x80) << 8 | magnitude).to(tl.float16, bitcast=True).to(TO)
    elif SPEC.kind == "e5m2":
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(TO)
    elif SPEC.kind == "int8":
        x = _small_integer(x, 0x80, 128, TO)
    return x


@triton.jit
def _small_integer(x, FLIP: tl.constexpr, BIAS: tl.constexpr, TO: tl.constexpr):
    """Return (x ^ FLIP) - BIAS of byte `x` as TO.

    Float16 1024 + x ends with the bits of x; a conversion of integers would be slow.
    """
    if tl.float16 == TO:
        x = (x.to(tl.uint16) ^ (0x6400 | FLIP)).to(tl.float16, bitcast=True) - (1024.0 + BIAS)
    else:
        x = ((x ^ FLIP).to(tl.int16) - BIAS).to(TO)
    return x


@triton.jit
def _columns(x, row, present, FROM: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr):
    """Return x[row, FROM : FROM + WIDTH]; rows not `present` and columns past LIMIT are not read and give zeros."""
    c = FROM + tl.arange(0, WIDTH)
    mask = present[:, None]
    if FROM + WIDTH > LIMIT:
        mask = mask & (c < LIMIT)[None, :]
    return tl.load(x + row[:, None] + c[None, :], mask=mask, other=0)


@triton.jit
def parts(x, row, present, W0: tl.constexpr, W1: tl.constexpr, LIMIT: tl.constexpr, SPEC: tl.constexpr):
    """Return both parts of stored heads as numbers. With a single part, the second result is the first again.

    LIMIT: the elements of a head in memory.
    """
    stored = _columns(x, row, present, 0, W0, LIMIT)
    if SPEC.kind == "int4":
        TO: tl.constexpr = tl.float32 if INTERPRET else SPEC.operand
        first, second = _small_integer(stored & 15, 0, 8, TO), _small_integer(stored >> 4, 0, 8, TO)
    else:
        first = _element(stored, SPEC)
        second = first
        if W1 > 0:
            second = _element(_columns(x, row, present, W0, W1, LIMIT), SPEC)
    return first, second


@triton.jit
def part_columns(SECOND: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, SPEC: tl.constexpr):
    """Return the elements of an unpacked head (a query, an output) that the columns of a part hold."""
    if SPEC.kind == "int4":
        c = 2 * tl.arange(0, W0) + SECOND
    elif SECOND:
        c = W0 + tl.arange(0, W1)
    else:
        c = tl.arange(0, W0)
    return c
