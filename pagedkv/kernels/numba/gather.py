"""Gathering of the numba backend, compiled once and kept on disk: tokens of sequences, out of their pages.

    row j of sequence b  =  the vector of the token at position first[b] + j, times its scale, rounded once
                            0 where there is no token: before 0, from seq_lens[b] on, in a punched page

A call is one int64 array, `c` in the loops: tensors as addresses and byte strides, then numbers, at the indices named
below. Keys and values are two calls. Unit of work: a run of rows, all kv heads of each. The loops raise nothing: the
arguments were checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from pagedkv.kernels.numba.elements import (
    F32,
    MACHINE_CODE,
    _fetch_add,
    _floats,
    _ints,
    _load,
    _longs,
    _octets,
    _store,
)

# The layout of a call's int64 array. A tensor takes four words and is named by the index of the first:
# its address (0: there is no such tensor), then up to three strides in bytes.
POOL, SCALE, TABLE, ROWS, SEQ_LENS, FIRST, STARTS, OUT = range(0, 32, 4)
# Sizes; rows of each sequence, if results are padded; rows of all; kinds of elements, as in elements.py.
B, L, N, K, D, S = range(32, 38)
POOL_KIND, OUT_KIND = range(38, 40)
# The address of the scratch memory, float32 [threads, D], and the rows of a run.
SCRATCH, RUN = range(40, 42)
# Counters that the threads share.
NEXT_ROW, NEXT_THREAD = range(42, 44)
WORDS = 44


@njit
def _start(c: Any, b: int) -> Any:
    """Return the number of the first row of sequence b, counted over all sequences."""
    return _longs(c[STARTS] + b * c[STARTS + 1], 1)[0] if c[STARTS] else b * c[L]


@njit
def _frame(c: Any, b: int, position: int) -> Any:
    """Return the frame of a token, and -1 if there is no such token."""
    if position < 0 or position >= _ints(c[SEQ_LENS] + b * c[SEQ_LENS + 1], 1)[0]:
        return -1
    row = _ints(c[ROWS] + b * c[ROWS + 1], 1)[0] if c[ROWS] else b
    return _ints(c[TABLE] + row * c[TABLE + 1] + position // c[S] * c[TABLE + 2], 1)[0]


@njit
def _gather_row(c: Any, b: int, j: int, to: int, x: Any) -> None:
    """Fill row j of sequence b, which is at the address `to`; `x` float32 [D] is scratch memory."""
    position = _ints(c[FIRST] + b * c[FIRST + 1], 1)[0] + j
    frame, n, size = _frame(c, b, position), c[D], 4 if c[OUT_KIND] == F32 else 2
    offset = position % c[S]
    for h in range(c[K]):
        target = to + h * c[OUT + 3]
        stored = c[POOL] + frame * c[POOL + 1] + offset * c[POOL + 2] + h * c[POOL + 3]
        if frame < 0:
            octets = _octets(target, n * size)
            for i in range(n * size):
                octets[i] = 0
        elif c[POOL_KIND] == c[OUT_KIND]:
            source, octets = _octets(stored, n * size), _octets(target, n * size)
            for i in range(n * size):
                octets[i] = source[i]
        else:
            factor = np.float32(1)
            if c[SCALE]:
                factor = _floats(c[SCALE] + frame * c[SCALE + 1] + offset * c[SCALE + 2] + h * c[SCALE + 3], 1)[0]
            _load(c[POOL_KIND], stored, n, factor, x)
            _store(c[OUT_KIND], x, n, np.float32(1), target)


@MACHINE_CODE.keep(cfunc, types.void(types.voidptr))
def gather(data: Any) -> None:
    """Gather one thread's share of a call: take runs of rows until none is left. `data`: the call's array."""
    c = carray(data, (WORDS,), np.int64)
    address = c.ctypes.data
    x = _floats(c[SCRATCH] + 4 * c[D] * _fetch_add(address + 8 * NEXT_THREAD, 1), c[D])
    first = _fetch_add(address + 8 * NEXT_ROW, c[RUN])
    while first < c[N]:
        b, beyond = 0, c[B]  # the last sequence that starts at or before the run
        while b + 1 < beyond:
            middle = (b + beyond) // 2
            if _start(c, middle) <= first:
                b = middle
            else:
                beyond = middle
        for row in range(first, min(c[N], first + c[RUN])):
            while row >= _start(c, b + 1):
                b += 1
            j = row - _start(c, b)
            _gather_row(c, b, j, c[OUT] + b * c[OUT + 1] + (row if c[STARTS] else j) * c[OUT + 2], x)
        first = _fetch_add(address + 8 * NEXT_ROW, c[RUN])
