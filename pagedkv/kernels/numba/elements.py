"""Elements of the numba backend, compiled: from memory to float32 and back. This file knows no page and no attention.

    float16, bfloat16, fp8, int8, code4  --_load-->  float32  --_store, or write.py-->  the same, half to even

int5 is low nibbles, and the fifth bits elsewhere (`_load_fives`). code4 is the index of a level. quant.rotate is
`_sign`, then `_hadamard`; back, it is `_hadamard`, then `_sign`.

Addresses are int64; `_floats(address, n)`, `_halves`, `_octets`, `_ints` and `_longs` are views of n elements there.
These functions are compiled without fast-math: conversions are exact, and NaN stays NaN. `_exp` and `_tanh` are written
out, because a call of a library's function keeps LLVM from making vectors of a loop over scores.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from pagedkv.kernels import quant
from pagedkv.machine_code import MachineCode

MACHINE_CODE = MachineCode(Path(__file__).parent, numba, "pagedkv's numba kernels for this machine (about 10 s)")

F32, BF16, F16, E4M3, E5M2, I8, I5, C4 = range(8)  # spec.NUMBERS


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    return types.voidptr(types.int64), lambda context, builder, _, args: builder.inttoptr(
        args[0], context.get_value_type(types.voidptr)
    )


@intrinsic
def _as_float(typing: Any, bits: Any) -> Any:
    return types.float32(types.uint32), lambda context, builder, _, args: builder.bitcast(
        args[0], context.get_value_type(types.float32)
    )


@intrinsic
def _as_bits(typing: Any, x: Any) -> Any:
    return types.uint32(types.float32), lambda context, builder, _, args: builder.bitcast(
        args[0], context.get_value_type(types.uint32)
    )


@intrinsic
def _fetch_add(typing: Any, address: Any, n: Any) -> Any:
    """Add n to the int64 at `address`, atomically, and return its old value.

    After the add, the thread sees all that other threads wrote before their adds.
    """

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        return builder.atomic_rmw(
            "add", builder.inttoptr(args[0], context.get_value_type(types.CPointer(types.int64))), args[1], "acq_rel"
        )

    return types.int64(types.int64, types.int64), generate


def _view_of(dtype: Any) -> Any:
    @njit(inline="always")
    def view(address: int, n: int) -> Any:
        return carray(_pointer(address), (n,), dtype)

    return view


_floats, _halves, _octets, _ints, _longs = map(_view_of, (np.float32, np.uint16, np.uint8, np.int32, np.int64))


@njit
def _exp(x: float) -> Any:
    """Return e^x in float32 for x <= 0, and 0 below -87.3; NaN stays NaN.

    Range reduction by ln 2 in two parts, then a polynomial (Cephes, expf).
    """
    y = np.float32(-87.5) if x < np.float32(-87.5) else x
    k = np.floor(y * np.float32(1.44269504) + np.float32(0.5))
    y = (y - k * np.float32(0.693359375)) + k * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * y + np.float32(1.3981999507e-3)
    p = p * y + np.float32(8.3334519073e-3)
    p = p * y + np.float32(4.1665795894e-2)
    p = p * y + np.float32(1.6666665459e-1)
    p = p * y + np.float32(5.0000001201e-1)
    p = p * y * y + y + np.float32(1.0)
    power = np.int32(k if k == k else np.float32(0)) + np.int32(127)
    return np.float32(0) if x < np.float32(-87.3) else p * _as_float(np.uint32(power << 23))


@njit
def _tanh(x: float) -> Any:
    """Return tanh x in float32: by a polynomial for small x, where 1 - 2 / (e^2x + 1) would cancel (Cephes, tanhf)."""
    z = x * x
    p = np.float32(-5.70498872745e-3)
    p = p * z + np.float32(2.06390887954e-2)
    p = p * z + np.float32(-5.37397155531e-2)
    p = p * z + np.float32(1.33314422036e-1)
    p = p * z + np.float32(-3.33332819422e-1)
    small = p * z * x + x
    e = _exp(np.float32(-2) * abs(x))
    large = (np.float32(1) - e) / (np.float32(1) + e)
    return small if abs(x) < np.float32(0.625) else (-large if x < 0 else large)


@njit
def _of_half(h: int) -> Any:
    """Return the value of a float16, given by its bits."""
    bits = np.uint32(h & 0x7FFF) << np.uint32(13)
    if bits >= np.uint32(0x0F800000):
        bits += np.uint32(0x70000000)  # infinity, NaN
    elif bits >= np.uint32(0x00800000):
        bits += np.uint32(0x38000000)
    else:
        bits = _as_bits(_as_float(bits + np.uint32(0x38800000)) - _as_float(np.uint32(0x38800000)))
    return _as_float(bits | np.uint32(h & 0x8000) << np.uint32(16))


@njit
def _to_half(x: float) -> Any:
    """Return the bits of x as float16, half to even."""
    bits = _as_bits(x)
    a, sign = bits & np.uint32(0x7FFFFFFF), (bits >> np.uint32(16)) & np.uint32(0x8000)
    if a > np.uint32(0x7F800000):
        return np.uint16(sign | np.uint32(0x7E00))
    if a >= np.uint32(0x47800000):
        return np.uint16(sign | np.uint32(0x7C00))
    if a < np.uint32(0x38800000):  # float32 at 0.5 has the spacing of subnormal halves: the addition rounds
        return np.uint16(sign | (_as_bits(_as_float(a) + np.float32(0.5)) - np.uint32(0x3F000000)))
    return np.uint16(
        sign | ((a + np.uint32(0xFFF) + ((a >> np.uint32(13)) & np.uint32(1)) - np.uint32(0x38000000)) >> np.uint32(13))
    )


@njit
def _to_bfloat(x: float) -> Any:
    """Return the bits of x as bfloat16, half to even."""
    bits = _as_bits(x)
    if x != x:
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x7FC0))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit
def _to_fp8(x: float, mantissa: int) -> Any:
    """Return the byte of a clamped x, half to even: of e4m3 if `mantissa` is 3, of e5m2 if 2."""
    bits = _as_bits(x)
    a, sign = bits & np.uint32(0x7FFFFFFF), (bits >> np.uint32(24)) & np.uint32(0x80)
    smallest, magic, bias = (0x3C800000, 0x46800000, 120 << 3) if mantissa == 3 else (0x38800000, 0x43000000, 112 << 2)
    shift = np.uint32(23 - mantissa)
    if a > np.uint32(0x7F800000):
        return np.uint8(sign | np.uint32(0x7F))
    if a < np.uint32(smallest):  # float32 at `magic` has the spacing of subnormal fp8: the addition rounds
        return np.uint8(sign | (_as_bits(_as_float(a) + _as_float(np.uint32(magic))) - np.uint32(magic)))
    half = (np.uint32(1) << (shift - np.uint32(1))) - np.uint32(1)
    return np.uint8(sign | (((a + half + ((a >> shift) & np.uint32(1))) >> shift) - np.uint32(bias)))


@njit
def _of_fp8(code: int, mantissa: int) -> Any:
    """Return the value of a byte of e4m3 (`mantissa` 3) or e5m2 (2)."""
    exponent, fraction = (code & 0x7F) >> mantissa, code & ((1 << mantissa) - 1)
    steps, bias = 1 << mantissa, (7 if mantissa == 3 else 15)
    if (code & 0x7F) == 0x7F or (mantissa == 2 and exponent == 31):
        x = np.inf if mantissa == 2 and fraction == 0 else np.nan
    elif exponent == 0:
        x = fraction / steps * 2.0 ** (1 - bias)
    else:
        x = (1 + fraction / steps) * 2.0 ** (exponent - bias)
    return np.float32(-x if code & 0x80 else x)


FP8 = np.array([[_of_fp8.py_func(code, mantissa) for code in range(256)] for mantissa in (3, 2)], np.float32)
"""float32 [2, 256]: the values of e4m3 and of e5m2 by their bytes. A constant of the compiled code."""

LEVELS, MIDS = np.array(quant.LEVELS, np.float32), np.array(quant.MIDS, np.float32)


@njit
def _load(kind: int, address: int, n: int, factor: float, to: Any) -> None:
    """Set to[0:n] to the row of n elements at `address`, times `factor`."""
    if kind == F32:
        floats = _floats(address, n)
        for i in range(n):
            to[i] = floats[i] * factor
    elif kind == BF16:
        halves = _halves(address, n)
        for i in range(n):
            to[i] = _as_float(np.uint32(halves[i]) << np.uint32(16)) * factor
    elif kind == F16:
        halves = _halves(address, n)
        for i in range(n):
            to[i] = _of_half(halves[i]) * factor
    elif kind == I8:
        octets = _octets(address, n)
        for i in range(n):
            to[i] = np.float32(np.int8(octets[i])) * factor
    elif kind == C4:
        octets = _octets(address, n // 2)
        for i in range(n // 2):
            to[2 * i] = LEVELS[octets[i] & 15] * factor
            to[2 * i + 1] = LEVELS[octets[i] >> 4] * factor
    else:
        octets, values = _octets(address, n), FP8[kind - E4M3]
        for i in range(n):
            to[i] = values[octets[i]] * factor


@njit
def _load_fives(low: int, high: int, n: int, factor: float, to: Any) -> None:
    """Set to[0:n] to n int5, times `factor`: their low nibbles are at `low`, their fifth bits at `high`."""
    octets, fifth = _octets(low, n // 2), _octets(high, n // 8)
    for i in range(n // 8):
        for j in range(4):  # a loop of constant length: LLVM makes vectors of it
            octet, bits = np.int32(octets[4 * i + j]), np.int32(fifth[i]) >> np.int32(2 * j)
            to[8 * i + 2 * j] = np.float32((octet & 15 | (bits & 1) << 4) - 16) * factor
            to[8 * i + 2 * j + 1] = np.float32((octet >> 4 | (bits & 2) << 3) - 16) * factor


@njit
def _store(kind: int, x: Any, n: int, factor: float, address: int) -> None:
    """Store x[0:n] times `factor` at `address`, as float32, bfloat16 or float16."""
    if kind == F32:
        floats = _floats(address, n)
        for i in range(n):
            floats[i] = x[i] * factor
    else:
        halves = _halves(address, n)
        for i in range(n):
            halves[i] = _to_bfloat(x[i] * factor) if kind == BF16 else _to_half(x[i] * factor)


@njit
def _code(x: float, scale: float) -> Any:
    """Return the code of x, by its level. A middle belongs to the smaller magnitude."""
    above = 0
    for i in range(len(MIDS)):
        above += abs(x) > scale * MIDS[i]
    return 8 + above if x > 0 else 7 - above


@njit
def _encode(x: Any, n: int, address: int) -> Any:
    """Store the codes of x[0:n] at `address`, and return the bits of their scale, float16 (quant.store).

    The scale of the mean square chooses codes. The scale that fits these codes chooses the codes that are stored.
    """
    squares, dot, norm = np.float32(0), np.float32(0), np.float32(0)
    for i in range(n):
        squares += x[i] * x[i]
    scale = np.float32(math.sqrt(squares / np.float32(n))) / np.float32(46.476)
    for i in range(n):
        level = LEVELS[_code(x[i], scale)]
        dot += x[i] * level
        norm += level * level
    half = _to_half(np.float32(65504) if dot / norm > np.float32(65504) else dot / norm)
    scale, octets = _of_half(half), _octets(address, n // 2)
    for i in range(n // 2):
        octets[i] = np.uint8(_code(x[2 * i], scale) | _code(x[2 * i + 1], scale) << 4)
    return half


@njit
def _sign(x: Any, n: int) -> None:
    """Negate the elements of x[0:n] for which the hash of the index has its highest bit: quant.rotate."""
    for i in range(n):
        h = np.uint32(np.uint32(i) * np.uint32(0x9E3779B1))
        h = np.uint32((h ^ (h >> np.uint32(15))) * np.uint32(0x85EBCA6B))
        x[i] = _as_float(_as_bits(x[i]) ^ (h & np.uint32(0x80000000)))


@njit
def _hadamard(x: Any, n: int) -> None:
    """Multiply runs of x[0:n] by a Hadamard matrix over its root. A run is the largest power of two that divides n."""
    run, step = n & -n, 1
    while step < run:
        for first in range(0, n, 2 * step):
            for i in range(first, first + step):
                a, b = x[i], x[i + step]
                x[i], x[i + step] = a + b, a - b
        step *= 2
    factor = np.float32(1 / math.sqrt(run))
    for i in range(n):
        x[i] *= factor
