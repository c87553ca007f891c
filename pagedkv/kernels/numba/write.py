"""Writing of the numba backend, compiled once and kept on disk: new tokens' keys or values into their slots.

    x      = the vector, rotated by the angles of its token's position if there are angles (RoPE)
    stored = x, or round(clamp(x / scale, -qmax, qmax)) if the pool is quantised
    scale  = amax / qmax of the vector, or 1 where that is 0, if scales are per (token, head)

A call is one int64 array, `c` in the loops: tensors as addresses and byte strides, then numbers, at the indices named
below. Keys and values are two calls. Unit of work: a run of tokens, all kv heads of each. The loops raise nothing: the
arguments were checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from pagedkv.kernels.numba.elements import (
    E4M3,
    F16,
    F32,
    I4,
    I8,
    MACHINE_CODE,
    _as_bits,
    _as_float,
    _fetch_add,
    _floats,
    _load,
    _longs,
    _octets,
    _store,
    _to_fp8,
)

# The layout of a call's int64 array. A tensor takes four words and is named by the index of the first:
# its address (0: there is no such tensor), then up to three strides in bytes.
NEW, POOL, SCALE, SLOTS = range(0, 16, 4)
COS, SIN, POSITIONS = range(16, 28, 4)
# Sizes; kinds of elements, as in elements.py; 1 if scales are per (token, head); RoPE: angles of a position, layout.
T, K, D, S = range(28, 32)
NEW_KIND, POOL_KIND, PER_TOKEN = range(32, 35)
ROTARY, INTERLEAVED = range(35, 37)
# The address of the scratch memory, float32 [threads, D], and the tokens of a run.
SCRATCH, RUN = range(37, 39)
# Counters that the threads share.
NEXT_TOKEN, NEXT_THREAD = range(39, 41)
# The ends of what the call may name: slots of the pool, positions of the angles.
NUM_SLOTS, NUM_ANGLES = range(41, 43)
WORDS = 43

_QMAX = np.array([0, 0, 0, 448, 57344, 127, 7], np.float32)
"""float32 [7]: the largest magnitude of a stored element, by its kind."""


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
def _rotate(c: Any, token: int, x: Any) -> None:
    """Rotate the first R dims of x by the angles of the token's position.

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
def _quantise(kind: int, x: Any, n: int, scale: float, address: int) -> None:
    """Store round(clamp(x / scale, -qmax, qmax)) at `address`. Modifies: x, which becomes the clamped quotients."""
    limit, octets = _QMAX[kind], _octets(address, n)
    for i in range(n):
        y = x[i] / scale
        y = -limit if y < -limit else y
        x[i] = limit if y > limit else y
    if kind == I8:
        for i in range(n):
            octets[i] = np.uint8(_nearest(x[i]) & 255)
    elif kind == I4:
        for i in range(n // 2):
            octets[i] = np.uint8((_nearest(x[2 * i]) + 8) | (_nearest(x[2 * i + 1]) + 8) << 4)
    else:
        for i in range(n):
            octets[i] = _to_fp8(x[i], 3 if kind == E4M3 else 2)


@njit
def _write_vector(c: Any, token: int, slot: int, h: int, x: Any) -> None:
    """Store one token's vector of one kv head at `slot`; `x` float32 [D] is scratch memory."""
    frame, offset, n = slot // c[S], slot % c[S], c[D]
    new = c[NEW] + token * c[NEW + 1] + h * c[NEW + 2]
    stored = c[POOL] + frame * c[POOL + 1] + offset * c[POOL + 2] + h * c[POOL + 3]
    if c[NEW_KIND] == c[POOL_KIND] and not c[ROTARY]:
        size = n * (4 if c[POOL_KIND] == F32 else 2)
        source, target = _octets(new, size), _octets(stored, size)
        for i in range(size):
            target[i] = source[i]
        return
    _load(c[NEW_KIND], new, n, np.float32(1), x)
    if c[ROTARY]:
        _rotate(c, token, x)
    if c[POOL_KIND] <= F16:
        _store(c[POOL_KIND], x, n, np.float32(1), stored)
        return
    scale = np.float32(1)
    if c[SCALE]:
        scale_of_vector = _floats(c[SCALE] + frame * c[SCALE + 1] + offset * c[SCALE + 2] + h * c[SCALE + 3], 1)
        if c[PER_TOKEN]:
            bits = np.uint32(0)  # the bits of the largest magnitude: floats >= 0 are ordered as their bits, NaN last
            for i in range(n):
                bits = max(bits, _as_bits(x[i]) & np.uint32(0x7FFFFFFF))
            exact = _as_float(bits) / _QMAX[c[POOL_KIND]]
            scale_of_vector[0] = np.float32(1) if exact == 0 else exact
        scale = scale_of_vector[0]
    _quantise(c[POOL_KIND], x, n, scale, stored)


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
