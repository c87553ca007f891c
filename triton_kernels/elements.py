"""Stored elements and products: from bytes of the pool to operands of tensor cores, or to the interpreter's numbers.

    kind    a byte x becomes                                   factor, folded into scores and outputs
    e4m3    float8e4nv, converted natively; or fp16 bits       1; or 256, for fp16's exponent is biased by 8 more
            (x & 0x80) << 8 | (x & 0x7f) << 7; fp16's NaN for x & 0x7f = 0x7f
    e5m2    fp16 bits x << 8                                   1
    int8    fp16 bits 0x6400 | x ^ 0x80, less 1152             1
    int5    two numbers of a byte and two fifth bits, each     1
            0x6400 | bit << 4 | nibble, less 1040
    code4   two numbers of a byte, each a polynomial of its    1
            nibble (`_level`)

Operands are float16, which holds each of these numbers exactly; beside a float32 query they are float32. A bfloat16
query and the weights become float16, too: powers of two keep them in its range (`scaled_queries`, tile.py). A
conversion to bfloat16 would be an instruction of its own for each element (F2F), at a quarter of the rate.

A head is read in two parts, because a tile's width must be a power of two: elements 0..W0 and W0..W0+W1 (80 = 64 + 16,
192 = 128 + 64, 576 = 512 + 64); for int5 and code4 the even elements (low nibbles) and the odd elements. No byte is
read twice, and the padding is small. Queries and outputs are rotated as whole vectors (`_hadamard`), once for each walk
over keys; stored elements never are.

Triton's interpreter computes in numpy, which has no bfloat16: in the interpreter every element becomes float32, rounded
where the GPU would round. This file knows nothing of pages, masks or softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether the kernels are interpreted; fixed when this module is imported, as in `triton.jit`."""

SLOPE = tl.constexpr((0.0015239715576171875, -0.003871917724609375, 12.28125))
"""The polynomial of `_level`, numbers of float16: a level is about (SLOPE[0] z^4 + SLOPE[1] z^2 + SLOPE[2]) z."""


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
def _element(x, KIND: tl.constexpr, NATIVE: tl.constexpr, TO: tl.constexpr):
    """Return stored `x` as TO, floats of 16 and 32 bits as they are. e4m3 is too small by 256 unless NATIVE."""
    if KIND == "e4m3":
        if NATIVE:
            x = x.to(tl.float8e4nv, bitcast=True).to(TO)
        else:
            wide = x.to(tl.uint16)
            magnitude = tl.where((wide & 0x7F) == 0x7F, 0x7E00, (wide & 0x7F) << 7).to(tl.uint16)  # 0x7F is NaN
            x = ((wide & 0x80) << 8 | magnitude).to(tl.float16, bitcast=True).to(TO)
    elif KIND == "e5m2":
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(TO)
    elif KIND == "int8":
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
def _nibbles(x, even, odd):
    """Return float16 1024 + the low nibbles of bytes `x`, and 64 + the high ones; `even` and `odd`: more bits of these.

    Float16 1024 + n ends with the bits of n, 64 + n with those of 16 n: no shift, and two elements in an instruction.
    """
    x = x.to(tl.uint16)
    even, odd = (x & 15) | even | 0x6400, (x & 0xF0) | odd | 0x5400
    return even.to(tl.float16, bitcast=True), odd.to(tl.float16, bitcast=True)


@triton.jit
def _level(z):
    """Return the level of a code, quant.LEVELS[z + 7.5]; z is float16.

    An odd polynomial is within 0.44 of each level in float16, with fused products or without. Its sum with 1536 is an
    integer, because float16 has no fractions from 1024 on.
    """
    square = z * z
    return (((SLOPE[0] * square + SLOPE[1]) * square + SLOPE[2]) * z + 1536.0) - 1536.0


@triton.jit
def _columns(x, row, present, FROM: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr):
    """Return x[row, FROM : FROM + WIDTH]; rows not `present` and columns past LIMIT are not read and give zeros."""
    c = FROM + tl.arange(0, WIDTH)
    mask = present[:, None]
    if FROM + WIDTH > LIMIT:
        mask = mask & (c < LIMIT)[None, :]
    return tl.load(x + row[:, None] + c[None, :], mask=mask, other=0)


@triton.jit
def _pairs(
    x, page, slot, stride, present,
    WIDTH: tl.constexpr, DIM: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr, TO: tl.constexpr,
):  # fmt: skip
    """Return the even and the odd elements, each [N, WIDTH], of int5 or code4 heads as TO.

    page, slot, stride: as in `parts`. int5 has the nibbles of all slots of a page before the fifth bits of all.
    """
    if KIND == "int5":
        nibbles = _columns(x, page + slot * (DIM // 2), present, 0, WIDTH, DIM // 2)
        fifth = _columns(x, page + S * (DIM // 2) + slot * (DIM // 8), present, 0, WIDTH // 4, DIM // 8)
        # a byte of fifth bits is that of four bytes of nibbles
        fifth = fifth.to(tl.uint16)[:, :, None] >> (2 * tl.arange(0, 4)).to(tl.uint16)[None, None, :]
        fifth = tl.reshape(fifth, nibbles.shape)
        even, odd = _nibbles(nibbles, (fifth & 1) << 4, (fifth & 2) << 7)
        even, odd = even - 1040.0, odd - 80.0
    else:
        codes = _columns(x, page + slot * stride, present, 0, WIDTH, DIM // 2)
        even, odd = _nibbles(codes, 0, 0)
        even, odd = _level(even - 1032.0 + 0.5), _level(odd - 71.5)
    return even.to(TO), odd.to(TO)


@triton.jit
def parts(
    x, page, slot, stride, present,
    W0: tl.constexpr, W1: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Return both parts of the stored heads of DIM elements at `page` + `slot` * `stride` as numbers.

    With a single part, the second result is the first again. e4m3 is too small by `Specialisation.factor`.
    """
    TO: tl.constexpr = tl.float32 if INTERPRET else SPEC.operand
    if KIND == "int5" or KIND == "code4":
        first, second = _pairs(x, page, slot, stride, present, W0, DIM, SPEC.S, KIND, TO)
    else:
        row = page + slot * stride
        first = _element(_columns(x, row, present, 0, W0, DIM), KIND, SPEC.native_fp8, TO)
        second = first
        if W1 > 0:
            second = _element(_columns(x, row, present, W0, W1, DIM), KIND, SPEC.native_fp8, TO)
    return first, second


@triton.jit
def _whole(even, odd):
    """Return vectors [N, 2 * WIDTH] of their even and odd elements."""
    return tl.reshape(tl.join(even, odd), [even.shape[0], 2 * even.shape[1]])


@triton.jit
def _halves(x):
    """Return the even and the odd elements of vectors x [N, WIDTH]."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def _signs(c):
    """Return the sign of each element `c` of a rotation as float32 (quant.py): bit 31 of a hash."""
    h = c.to(tl.uint32) * 0x9E3779B1
    h = (h ^ (h >> 15)) * 0x85EBCA6B
    return tl.where((h >> 31) != 0, -1.0, 1.0)


@triton.jit
def _hadamard(x, DIM: tl.constexpr):
    """Return float32 x [N, WIDTH], elements of vectors of DIM, times quant's Hadamard matrix.

    WIDTH is a multiple of the runs of DIM. A column gets the other one of its pair as the sum of both, of the bits as
    integers, less itself: a shuffle if the columns lie in two threads, and no instruction if they do not. (The
    interpreter's sums have 64 bits.)
    """
    RUN: tl.constexpr = DIM & -DIM
    other_sign = tl.where(tl.arange(0, 2) == 1, -1.0, 1.0)[None, None, :, None]
    for i in tl.static_range(10):
        if 1 << i < RUN:
            pair = tl.reshape(x, [x.shape[0], x.shape[1] >> (i + 1), 2, 1 << i])
            bits = pair.to(tl.int32, bitcast=True)
            other = (tl.sum(bits, 2, keep_dims=True).to(tl.int64) - bits).to(tl.int32).to(tl.float32, bitcast=True)
            x = tl.reshape(pair * other_sign + other, x.shape)
    return x * RUN**-0.5
