"""Writing of the numba backend, compiled once and kept on disk: new tokens' keys or values into their slots.

    x      = the vector, turned by the angles of its token's position if there are angles (RoPE); if V is code4, less
             the centre and over the divisor of its channels (a calibrated key), and rotated
    stored = x, or round(clamp(x / scale, low, qmax)) if the pool is quantised, or a code
    scale  = amax / qmax of the vector, or 1 where that is 0, rounded up to float16, if scales are per (token, head)

A call is one int64 array, `c` in the loops: tensors as addresses and byte strides, then numbers, at the indices named
below. Keys and values are two calls. Unit of work: a run of tokens, all kv heads of each. The loops raise nothing: the
arguments were checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from pagedkv.kernels.numba.elements import (
    C4,
    E4M3,
    F16,
    F32,
    I5,
    I8,
    MACHINE_CODE,
    _as_bits,
    _as_float,
    _encode,
    _fetch_add,
    _floats,
    _hadamard,
    _halves,
    _load,
    _longs,
    _octets,
    _of_half,
    _sign,
    _store,
    _to_fp8,
    _to_half,
)

# The layout of a call's int64 array. A tensor takes four words and is named by the index of the first:
# its address (0: there is no such tensor), then up to three strides in bytes.
NEW, POOL, SCALE, SLOTS, CALIBRATION = range(0, 20, 4)
COS, SIN, POSITIONS = range(20, 32, 4)
# Sizes; kinds of elements, as in elements.py; 1 if scales are per (token, head), and if the vectors are rotated;
# RoPE: angles of a position, layout.
T, K, D, S = range(32, 36)
NEW_KIND, POOL_KIND, PER_TOKEN, ROTATED = range(36, 40)
ROTARY, INTERLEAVED = range(40, 42)
# The address of the scratch memory, float32 [threads, D], and the tokens of a run.
SCRATCH, RUN = range(42, 44)
# Counters that the threads share.
NEXT_TOKEN, NEXT_THREAD = range(44, 46)
# The ends of what the call may name: slots of the pool, positions of the angles.
NUM_SLOTS, NUM_ANGLES = range(46, 48)
WORDS = 48

_QMAX = np.array([0, 0, 0, 448, 57344, 127, 15], np.float32)
"""float32 [7]: the largest magnitude of a stored element, by its kind. int5 has -16 too."""


@MACHINE_CODE.keep(njit)
def is_in_bounds(c: Any) -> bool:
    """Return whether slots and positions are there: the rules of checks.slot_values. O(tokens)."""
    for token in range(c[T]):
        slot = _longs(c[SLOTS] + token * c[SLOTS + 1], 1)[0]
        if slot >= c[NUM_SLOTS]:
            return False
        if slot >= 0 and c[COS]:
            position = _longs(c[POSITIONS] + token * c[POSITIONS + 1], 1)[0]
            if position < 0 or position >= c[NUM_ANGLES]:
                return False
    return True


@njit
def _rope(c: Any, token: int, x: Any) -> None:
    """Turn the first R dims of x by the angles of the token's position.

    Pairs are (i, i + R/2), or (2i, 2i + 1) if interleaved.
    """
    position, half = _longs(c[POSITIONS] + token * c[POSITIONS + 1], 1)[0], c[ROTARY]
    cos = _floats(c[COS] + position * c[COS + 1], half)
    sin = _floats(c[SIN] + position * c[SIN + 1], half)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if c[INTERLEAVED] else (i, i + half)
        first, second = x[a], x[b]
        x[a], x[b] = first * cos[i] - second * sin[i], second * cos[i] + first * sin[i]


@njit
def _nearest(x: float) -> Any:
    """Return the nearest integer, half to even, and 0 for NaN."""
    return np.int32(np.rint(x) if x == x else np.float32(0))


@njit
def _clamp(kind: int, x: Any, n: int, scale: float) -> None:
    """Replace x by clamp(x / scale, low, qmax)."""
    limit = _QMAX[kind]
    low = -limit - np.float32(kind == I5)
    for i in range(n):
        y = x[i] / scale
        y = low if y < low else y
        x[i] = limit if y > limit else y


@njit
def _put(kind: int, x: Any, n: int, address: int) -> None:
    """Store round(x) at `address`, as int8 or fp8."""
    octets = _octets(address, n)
    if kind == I8:
        for i in range(n):
            octets[i] = np.uint8(_nearest(x[i]) & 255)
    else:
        for i in range(n):
            octets[i] = _to_fp8(x[i], 3 if kind == E4M3 else 2)


@njit
def _put_fives(x: Any, n: int, low: int, high: int) -> None:
    """Store round(x) as int5: the low nibbles at `low`, the fifth bits at `high`."""
    octets, fifth = _octets(low, n // 2), _octets(high, n // 8)
    for i in range(n // 2):
        a, b = _nearest(x[2 * i]) + 16, _nearest(x[2 * i + 1]) + 16
        octets[i] = np.uint8((a & 15) | (b & 15) << 4)
        earlier = fifth[i // 4] if i % 4 else 0
        fifth[i // 4] = np.uint8(earlier | (a >> 4 | b >> 4 << 1) << i % 4 * 2)


@njit
def _write_vector(c: Any, token: int, slot: int, h: int, x: Any) -> None:
    """Store one token's vector of one kv head at `slot`; `x` float32 [D] is scratch memory."""
    frame, offset, n = slot // c[S], slot % c[S], c[D]
    new = c[NEW] + token * c[NEW + 1] + h * c[NEW + 2]
    page = c[POOL] + frame * c[POOL + 1] + h * c[POOL + 3]
    stored = page + offset * c[POOL + 2]
    if c[NEW_KIND] == c[POOL_KIND] and not c[ROTARY]:
        size = n * (4 if c[POOL_KIND] == F32 else 2)
        source, target = _octets(new, size), _octets(stored, size)
        for i in range(size):
            target[i] = source[i]
        return
    _load(c[NEW_KIND], new, n, np.float32(1), x)
    if c[ROTARY]:
        _rope(c, token, x)
    if c[POOL_KIND] <= F16:
        _store(c[POOL_KIND], x, n, np.float32(1), stored)
        return
    if c[CALIBRATION]:
        centre = _floats(c[CALIBRATION] + h * c[CALIBRATION + 1], n)
        divisor = _floats(c[CALIBRATION] + h * c[CALIBRATION + 1] + c[CALIBRATION + 2], n)
        for i in range(n):
            x[i] = (x[i] - centre[i]) / divisor[i]
    if c[ROTATED]:
        _sign(x, n)
        _hadamard(x, n)
    scale = np.float32(1)
    if c[SCALE]:
        address = c[SCALE] + frame * c[SCALE + 1] + offset * c[SCALE + 2] + h * c[SCALE + 3]
        if c[POOL_KIND] == C4:
            _halves(address, 1)[0] = _encode(x, n, stored)
            return
        if c[PER_TOKEN]:
            bits = np.uint32(0)  # the bits of the largest magnitude: floats >= 0 are ordered as their bits, NaN last
            for i in range(n):
                bits = max(bits, _as_bits(x[i]) & np.uint32(0x7FFFFFFF))
            exact = _as_float(bits) / _QMAX[c[POOL_KIND]]
            exact = np.float32(1) if exact == 0 else min(exact, np.float32(65504))
            half = _to_half(exact)
            half += _of_half(half) < exact
            scale = _of_half(half)
            _halves(address, 1)[0] = half
        else:
            scale = _floats(address, 1)[0]
    _clamp(c[POOL_KIND], x, n, scale)
    if c[POOL_KIND] == I5:
        _put_fives(x, n, page + offset * n // 2, page + (c[S] * 4 + offset) * n // 8)
    else:
        _put(c[POOL_KIND], x, n, stored)


@MACHINE_CODE.keep(cfunc, types.void(types.voidptr))
def write(data: Any) -> None:
    """Store one thread's share of a call: take runs of tokens until none is left. `data`: the call's array."""
    c = carray(data, (WORDS,), np.int64)
    address = c.ctypes.data
    x = _floats(c[SCRATCH] + 4 * c[D] * _fetch_add(address + 8 * NEXT_THREAD, 1), c[D])
    first = _fetch_add(address + 8 * NEXT_TOKEN, c[RUN])
    while first < c[T]:
        for token in range(first, min(c[T], first + c[RUN])):
            slot = _longs(c[SLOTS] + token * c[SLOTS + 1], 1)[0]
            if slot >= 0:
                for h in range(c[K]):
                    _write_vector(c, token, slot, h, x)
        first = _fetch_add(address + 8 * NEXT_TOKEN, c[RUN])
