"""Writing of the numba backend, compiled once and kept on disk: new tokens' keys or values into their slots.

    x      = the vector, rotated by the angle of its position if there are tables (RoPE)
    stored = x, or round(clamp(x / scale, -qmax, qmax));   scale = amax / qmax of the vector, 1 where that is 0, if per (token, head)

A call is one int64 array: four words for each tensor (address, strides in bytes), then numbers, at the indices named below.
Unit of work: a run of tokens, all kv heads of each. Nothing here raises: the arguments were checked.
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

TENSORS = ("new", "pool", "scale", "slots", "cos", "sin", "positions")
W_NEW, W_POOL, W_SCALE, W_SLOTS, W_COS, W_SIN, W_POSITIONS = range(0, 28, 4)
W_T, W_K, W_D, W_S, W_NEW_KIND, W_KIND, W_PER_TOKEN, W_ROTARY, W_INTERLEAVED, W_ROOM, W_NEXT, W_NEXT_THREAD, W_RUN = (
    range(28, 41)
)
WORDS = 41


@njit
def _turn(w: Any, token: int, x: Any) -> None:
    """Rotate the first dims of x by the angles of the token's position: pairs (i, i + R/2), or (2i, 2i + 1) if interleaved."""
    position, half = _longs(w[W_POSITIONS] + token * w[W_POSITIONS + 1], 1)[0], w[W_ROTARY]
    cos = _floats(w[W_COS] + position * w[W_COS + 1], half)
    sin = _floats(w[W_SIN] + position * w[W_SIN + 1], half)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if w[W_INTERLEAVED] else (i, i + half)
        first, second = x[a], x[b]
        x[a], x[b] = first * cos[i] - second * sin[i], second * cos[i] + first * sin[i]


@njit
def _nearest(x: float) -> Any:
    """Half to even; NaN is 0."""
    return np.int32(np.rint(x) if x == x else np.float32(0))


@njit
def _quantise(kind: int, x: Any, n: int, scale: float, address: int) -> None:
    """round(clamp(x / scale, -qmax, qmax)) as stored elements."""
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


_QMAX = np.array([0, 0, 0, 448, 57344, 127, 7], np.float32)


@njit
def _write_vector(w: Any, token: int, slot: int, h: int, x: Any) -> None:
    """One token's vector of one kv head; x is float32 room for it."""
    frame, offset, n = slot // w[W_S], slot % w[W_S], w[W_D]
    fresh = w[W_NEW] + token * w[W_NEW + 1] + h * w[W_NEW + 2]
    to = w[W_POOL] + frame * w[W_POOL + 1] + offset * w[W_POOL + 2] + h * w[W_POOL + 3]
    if w[W_NEW_KIND] == w[W_KIND] and not w[W_ROTARY]:
        size = n * (4 if w[W_KIND] == F32 else 2)
        source, target = _octets(fresh, size), _octets(to, size)
        for i in range(size):
            target[i] = source[i]
        return
    _load(w[W_NEW_KIND], fresh, n, np.float32(1), x)
    if w[W_ROTARY]:
        _turn(w, token, x)
    if w[W_KIND] <= F16:
        _store(w[W_KIND], x, n, np.float32(1), to)
        return
    scale = np.float32(1)
    if w[W_SCALE]:
        stored = _floats(w[W_SCALE] + frame * w[W_SCALE + 1] + offset * w[W_SCALE + 2] + h * w[W_SCALE + 3], 1)
        if w[W_PER_TOKEN]:
            bits = np.uint32(0)  # magnitudes are ordered as their bits are, NaN last
            for i in range(n):
                bits = max(bits, _as_bits(x[i]) & np.uint32(0x7FFFFFFF))
            exact = _as_float(bits) / _QMAX[w[W_KIND]]
            stored[0] = np.float32(1) if exact == 0 else exact
        scale = stored[0]
    _quantise(w[W_KIND], x, n, scale, to)


@cfunc(types.void(types.voidptr), cache=True)
def write(data: Any) -> None:
    """A thread's share of a write: runs of W_RUN tokens, until there are none. `data`: the int64 array of the call."""
    w = carray(data, (WORDS,), np.int64)
    address = w.ctypes.data
    x = _floats(w[W_ROOM] + 4 * w[W_D] * _fetch_add(address + 8 * W_NEXT_THREAD, 1), w[W_D])
    first = _fetch_add(address + 8 * W_NEXT, w[W_RUN])
    while first < w[W_T]:
        for token in range(first, min(w[W_T], first + w[W_RUN])):
            slot = _longs(w[W_SLOTS] + token * w[W_SLOTS + 1], 1)[0]
            if slot >= 0:
                for h in range(w[W_K]):
                    _write_vector(w, token, slot, h, x)
        first = _fetch_add(address + 8 * W_NEXT, w[W_RUN])
