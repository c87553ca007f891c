"""Attention of the numba backend, compiled once and kept on disk: loops over addresses and byte strides.

    s[r, t] = scale * q[r] . k[t];   c tanh(s / c);   + slope (t - p);   -inf where not visible
    m, l, o = online softmax over tiles of keys;   out = o / l,   lse = m + ln(l), a sink being one more s without a value

A call is one int64 array: four words for each tensor (address, strides in bytes) and the sizes, at the indices named below. So there is
one signature, one compilation for all dtypes; a row of any dtype becomes float32 when it is loaded, and everything after that is float32.

Unit of work   queries [i0, i1) and kv heads [h0, h1) of sequence b, over chunks [c0, c1) of its keys. All heads of a page are taken
               before the next page, K of all, then V of all: a frame is read in the order in which it lies.
A tile         keys of whole pages, 16 to 64: K rows to float32, R = (i1 - i0) G rows of q against four of them at a time; then V.
Threads        take units from a counter. If keys were cut, each chunk leaves a state (o, m, l); the last unit of a group to arrive
               folds them from the left. With `split_tokens` chunks are given, so no bit depends on the batch or on the threads.

Never read: keys beyond seq_lens, slots of punched pages, padded table entries. Nothing here raises: the arguments were checked.
`reassoc` and `contract` are allowed where sums become vectors; the folding of states is compiled without, so it is exact everywhere.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from pagedkv.kernels.numba.elements import (
    _as_bits,
    _as_float,
    _exp,
    _fetch_add,
    _floats,
    _ints,
    _load,
    _longs,
    _octets,
    _pointer,
    _store,
    _tanh,
)

# What the int64 array of a call holds. Tensors take four words each, then come numbers.
TENSORS = (
    "q",
    "k",
    "v",
    "k_scale",
    "v_scale",
    "table",
    "rows",
    "lens",
    "starts",
    "sinks",
    "slopes",
    "tree",
    "out",
    "lse",
)
Q, KEYS, VALUES, K_SCALE, V_SCALE, TABLE, ROWS, LENS, STARTS, SINKS, SLOPES, TREE, OUT, LSE = range(0, 56, 4)
H, K, D, DV, S, Q_KIND, KV_KIND, CAUSAL, WINDOW, SPLIT, SCALE, SOFTCAP, B, THREADS = range(56, 70)
QUERIES, HEADS, UNITS, NUM_UNITS, GROUPS, PARTIALS, ROOM, ROOM_BYTES, NEXT_UNIT, NEXT_THREAD = range(70, 80)
WORDS = 80

TILE = 64
FAST = {"reassoc", "contract", "nsz"}
UNIT_WORDS, GROUP_WORDS = (
    9,
    4,
)  # b i0 i1 h0 h1 c0 c1 chunk group; units to come, first partial (-1: none), first chunk, end of chunks


@njit
def _span(c: Any, b: int, i0: int, i1: int) -> Any:
    """The keys that any of the queries [i0, i1) of sequence b may see: first and end."""
    n: Any = np.int64(_ints(c[LENS] + b * c[LENS + 1], 1)[0])
    m = np.int64(_ints(c[STARTS] + (b + 1) * c[STARTS + 1], 1)[0] - _ints(c[STARTS] + b * c[STARTS + 1], 1)[0])
    first, end = 0, n
    if c[CAUSAL] and not c[TREE]:
        end = min(n, max(0, n - m + i1))
    if c[WINDOW]:
        first = max(0, n - m + i0 - c[WINDOW] + 1)
    return first, max(first, end)


@njit(cache=True)
def plan(c: Any) -> Any:
    """Units of work int64 [U, 9], groups int64 [N, 4], floats of partial states; see the head of this file.

    Keys are cut where a unit would hold more than a quarter of a thread's share; with `split_tokens`, at its multiples only.
    """
    work, num_bases = 0, 0
    for b in range(c[B]):
        m = np.int64(_ints(c[STARTS] + (b + 1) * c[STARTS + 1], 1)[0] - _ints(c[STARTS] + b * c[STARTS + 1], 1)[0])
        for i0 in range(0, m, c[QUERIES]):
            first, end = _span(c, b, i0, min(m, i0 + c[QUERIES]))
            num_bases += -(-c[K] // c[HEADS])
            work += (end - first) * -(-c[K] // c[HEADS])
    step = c[S] if c[S] >= 16 else 16 // c[S] * c[S]
    target = max(256, -(-work // (4 * c[THREADS]))) if c[THREADS] > 1 else max(1, work)
    target = -(-target // step) * step
    units = np.empty(
        (num_bases + (work // min(target, 256) if c[THREADS] > 1 else 0) + num_bases, UNIT_WORDS), np.int64
    )
    groups = np.empty((num_bases, GROUP_WORDS), np.int64)
    u, g, floats = 0, 0, 0
    for b in range(c[B]):
        m = np.int64(_ints(c[STARTS] + (b + 1) * c[STARTS + 1], 1)[0] - _ints(c[STARTS] + b * c[STARTS + 1], 1)[0])
        for i0 in range(0, m, c[QUERIES]):
            i1 = min(m, i0 + c[QUERIES])
            first, end = _span(c, b, i0, i1)
            for h0 in range(0, c[K], c[HEADS]):
                h1 = min(c[K], h0 + c[HEADS])
                whole = end - first <= target
                chunk = c[SPLIT] if c[SPLIT] else (max(1, end) if whole else target)
                c0, c1 = first // chunk, -(-end // chunk)
                run = max(1, c1 - c0) if whole else max(1, target // chunk)
                count = max(1, -(-(c1 - c0) // run))
                state = (h1 - h0) * (i1 - i0) * (c[H] // c[K]) * (c[DV] + 2)
                groups[g, 0], groups[g, 1], groups[g, 2], groups[g, 3] = count, -1, c0, c1
                if count > 1:
                    groups[g, 1] = floats
                    floats += state * (c1 - c0)
                for part in range(count):
                    units[u, 0], units[u, 1], units[u, 2], units[u, 3], units[u, 4] = b, i0, i1, h0, h1
                    units[u, 5], units[u, 6] = c0 + part * run, min(c1, c0 + (part + 1) * run)
                    units[u, 7], units[u, 8] = chunk, g
                    u += 1
                g += 1
    return units[:u], groups, floats


@njit
def _clear(state: int, rows: int, dv: int) -> None:
    o, m, l = (
        _floats(state, rows * dv),
        _floats(state + 4 * rows * dv, rows),
        _floats(state + 4 * rows * (dv + 1), rows),
    )
    for i in range(rows * dv):
        o[i] = 0
    for r in range(rows):
        m[r], l[r] = -np.inf, 0


@njit
def _fold(into: int, state: int, rows: int, dv: int) -> None:
    """Two states over disjoint keys become one. Compiled without `contract`: the same bits wherever it is done."""
    for r in range(rows):
        m, l = _floats(into + 4 * rows * dv, rows), _floats(into + 4 * rows * (dv + 1), rows)
        other_m, other_l = _floats(state + 4 * rows * dv, rows), _floats(state + 4 * rows * (dv + 1), rows)
        top = other_m[r] if not other_m[r] <= m[r] else m[r]
        if top == -np.inf:
            continue
        a, b = _exp(m[r] - top), _exp(other_m[r] - top)
        o, other = _floats(into + 4 * r * dv, dv), _floats(state + 4 * r * dv, dv)
        for d in range(dv):
            o[d] = o[d] * a + other[d] * b
        m[r], l[r] = top, l[r] * a + other_l[r] * b


@njit(fastmath=FAST)
def _dots(q: int, rows: int, k: int, n: int, dim: int, scores: int) -> None:
    """scores[r, j] = q[r] . k[j] for n keys, a multiple of four; rows of scores are TILE apart."""
    for r in range(rows):
        x, s = _floats(q + 4 * r * dim, dim), _floats(scores + 4 * r * TILE, n)
        for j in range(0, n, 4):
            k0, k1 = _floats(k + 4 * j * dim, dim), _floats(k + 4 * (j + 1) * dim, dim)
            k2, k3 = _floats(k + 4 * (j + 2) * dim, dim), _floats(k + 4 * (j + 3) * dim, dim)
            s0 = s1 = s2 = s3 = np.float32(0)
            for d in range(dim):
                s0 += x[d] * k0[d]
                s1 += x[d] * k1[d]
                s2 += x[d] * k2[d]
                s3 += x[d] * k3[d]
            s[j], s[j + 1], s[j + 2], s[j + 3] = s0, s1, s2, s3


@njit(fastmath=FAST)
def _weigh(o: int, rows: int, v: int, n: int, dim: int, scores: int) -> None:
    """o[r] += sum over j of scores[r, j] v[j]."""
    for r in range(rows):
        out, p = _floats(o + 4 * r * dim, dim), _floats(scores + 4 * r * TILE, n)
        for j in range(0, n, 4):
            v0, v1 = _floats(v + 4 * j * dim, dim), _floats(v + 4 * (j + 1) * dim, dim)
            v2, v3 = _floats(v + 4 * (j + 2) * dim, dim), _floats(v + 4 * (j + 3) * dim, dim)
            p0, p1, p2, p3 = p[j], p[j + 1], p[j + 2], p[j + 3]
            for d in range(dim):
                out[d] += (p0 * v0[d] + p1 * v1[d]) + (p2 * v2[d] + p3 * v3[d])


@njit(fastmath=FAST)
def _soften(state: int, rows: int, dv: int, scores: int, n: int) -> None:
    """Scores become weights e^(s - m); m, l and o of `state` follow a maximum that grew."""
    m, l = _floats(state + 4 * rows * dv, rows), _floats(state + 4 * rows * (dv + 1), rows)
    for r in range(rows):
        s = _floats(scores + 4 * r * TILE, n)
        highest = np.int32(
            -2147483648
        )  # floats are ordered as these integers are, NaN highest: such a maximum becomes vectors
        for j in range(n):
            bits = np.int32(_as_bits(s[j]))
            highest = max(highest, bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        top = _as_float(np.uint32(highest ^ ((highest >> np.int32(31)) & np.int32(0x7FFFFFFF))))
        top = m[r] if top <= m[r] else top
        if top == -np.inf:
            for j in range(n):
                s[j] = 0
            continue
        if top != m[r]:
            factor, o = _exp(m[r] - top), _floats(state + 4 * r * dv, dv)
            m[r], l[r] = top, l[r] * factor
            for d in range(dv):
                o[d] *= factor
        total = np.float32(0)
        for j in range(n):
            s[j] = _exp(s[j] - top)
            total += s[j]
        l[r] += total


@njit
def _shape_scores(c: Any, b: int, rows: Any, t0: int, n: int, there: Any, scores: int) -> None:
    """Soft cap, ALiBi and visibility of scores [h, i, g, n]; `rows` = (i0, i1, h0, h1), `there[j]` is 0 where key t0 + j is not."""
    i0, i1, h0, h1 = rows
    group, length = c[H] // c[K], np.int64(_ints(c[LENS] + b * c[LENS + 1], 1)[0])
    start = np.int64(_ints(c[STARTS] + b * c[STARTS + 1], 1)[0])
    new = length - (np.int64(_ints(c[STARTS] + (b + 1) * c[STARTS + 1], 1)[0]) - start)
    cap, window = _doubles(c)[SOFTCAP], c[WINDOW]
    whole = True
    for j in range(n):
        whole = whole and there[j] != 0
    hides = (
        not whole
        or (c[TREE] and t0 + n > new)
        or (c[CAUSAL] and t0 + n - 1 > new + i0)
        or (window and t0 <= new + i1 - 1 - window)
    )
    if cap == 0 and not c[SLOPES] and not hides:
        return
    row = 0
    for h in range(h0, h1):
        for i in range(i0, i1):
            p, tree = new + i, _octets(c[TREE] + (start + i) * c[TREE + 1], i1 + 1)
            for g in range(group):
                s = _floats(scores + 4 * row * TILE, n)
                row += 1
                if cap != 0:
                    for j in range(n):
                        s[j] = np.float32(cap) * _tanh(s[j] / np.float32(cap))
                if c[SLOPES]:
                    slope = _floats(c[SLOPES] + (h * group + g) * c[SLOPES + 1], 1)[0]
                    for j in range(n):
                        s[j] += slope * np.float32(t0 + j - p)
                if not hides:
                    continue
                for j in range(n):
                    t = t0 + j
                    if c[TREE]:
                        seen = t < new or (there[j] != 0 and tree[(t - new) * c[TREE + 2]] != 0)
                    else:
                        seen = t <= p or not c[CAUSAL]
                    if not (seen and there[j] != 0 and (window == 0 or t > p - window)):
                        s[j] = -np.inf


@njit(inline="always")
def _doubles(c: Any) -> Any:
    return c.view(np.float64)


@njit
def _scale_of(c: Any, which: int, frame: int, offset: int, h: int) -> Any:
    if c[which] == 0:
        return np.float32(1)
    return _floats(c[which] + frame * c[which + 1] + offset * c[which + 2] + h * c[which + 3], 1)[0]


@njit
def _gather(c: Any, pool: int, scale: int, h: int, n: int, where: Any, dim: int, to: int) -> None:
    """The rows of kv head h of a tile as float32 at `to`; zeros where there is none, up to a multiple of four."""
    for j in range(-(-n // 4) * 4):
        row, frame, offset = _floats(to + 4 * j * dim, dim), where[0, j], where[1, j]
        if frame < 0:
            for d in range(dim):
                row[d] = 0
            continue
        address = c[pool] + frame * c[pool + 1] + offset * c[pool + 2] + h * c[pool + 3]
        _load(c[KV_KIND], address, dim, _scale_of(c, scale, frame, offset, h), row)


@njit
def _attend_chunk(c: Any, b: int, rows: Any, span: Any, room: int, state: int) -> None:
    """The state of the queries and heads `rows` over keys `span`, into `state`. In `room`: q, then scores, a tile, places."""
    i0, i1, h0, h1 = rows
    per_head = (i1 - i0) * (c[H] // c[K])
    count, dv, size = per_head * (h1 - h0), c[DV], c[S]
    scores = room + 4 * count * c[D]
    tile = scores + 4 * count * TILE
    where = carray(_pointer(tile + 4 * TILE * max(c[D], dv)), (3, TILE), np.int64)
    row = b if c[ROWS] == 0 else np.int64(_ints(c[ROWS] + b * c[ROWS + 1], 1)[0])
    step = size if size >= 16 else 16 // size * size
    _clear(state, count, dv)
    t = span[0]
    while t < span[1]:
        n = min((t // step + 1) * step, t + TILE, span[1]) - t
        padded, some = -(-n // 4) * 4, False
        for j in range(padded):
            where[0, j], where[1, j], where[2, j] = -1, 0, 0
            if j < n:
                frame = _ints(c[TABLE] + row * c[TABLE + 1] + (t + j) // size * 4, 1)[0]
                where[0, j], where[1, j], where[2, j] = frame, (t + j) % size, frame >= 0
                some = some or frame >= 0
        if some:
            for h in range(h0, h1):
                _gather(c, KEYS, K_SCALE, h, n, where, c[D], tile)
                first = (h - h0) * per_head
                _dots(room + 4 * first * c[D], per_head, tile, padded, c[D], scores + 4 * first * TILE)
            _shape_scores(c, b, rows, t, padded, where[2], scores)
            _soften(state, count, dv, scores, padded)
            for h in range(h0, h1):
                _gather(c, VALUES, V_SCALE, h, n, where, dv, tile)
                first = (h - h0) * per_head
                _weigh(state + 4 * first * dv, per_head, tile, padded, dv, scores + 4 * first * TILE)
        t += n


@njit
def _finish(c: Any, b: int, rows: Any, state: int) -> None:
    """Out and lse of a whole state: sinks join, o is divided by l."""
    i0, i1, h0, h1 = rows
    group, dv = c[H] // c[K], c[DV]
    count = (i1 - i0) * group * (h1 - h0)
    start = np.int64(_ints(c[STARTS] + b * c[STARTS + 1], 1)[0])
    row = 0
    for h in range(h0, h1):
        for i in range(i0, i1):
            for g in range(group):
                o = _floats(state + 4 * row * dv, dv)
                m, l = (
                    _floats(state + 4 * (count * dv + row), 1)[0],
                    _floats(state + 4 * (count * (dv + 1) + row), 1)[0],
                )
                factor, head = np.float32(1), h * group + g
                if c[SINKS]:
                    sink = _floats(c[SINKS] + head * c[SINKS + 1], 1)[0]
                    top = sink if sink > m else m
                    if top > -np.inf:
                        factor = np.float32(1) if m == top else np.float32(math.exp(m - top))  # also of infinity
                        l = l * factor + (np.float32(1) if sink == top else np.float32(math.exp(sink - top)))
                        m = top
                lse = -np.inf if l == 0 else m + math.log(l)
                _store(
                    c[Q_KIND],
                    o,
                    dv,
                    np.float32(0) if l == 0 else factor / l,
                    c[OUT] + (start + i) * c[OUT + 1] + head * c[OUT + 2],
                )
                _floats(c[LSE] + (start + i) * c[LSE + 1] + head * c[LSE + 2], 1)[0] = lse
                row += 1


@njit
def _attend(c: Any, u: Any, room: int) -> None:
    """One unit. In `room`: two states, then what `_attend_chunk` wants there."""
    b, rows, chunk = u[0], (u[1], u[2], u[3], u[4]), u[7]
    i0, i1, h0, h1 = rows
    group, dv = c[H] // c[K], c[DV]
    count = (i1 - i0) * group * (h1 - h0)
    floats, start = count * (dv + 2), np.int64(_ints(c[STARTS] + b * c[STARTS + 1], 1)[0])
    mine, other, inside = room, room + 4 * floats, room + 8 * floats
    row = 0
    for h in range(h0, h1):
        for i in range(i0, i1):
            for g in range(group):
                address = c[Q] + (start + i) * c[Q + 1] + (h * group + g) * c[Q + 2]
                _load(c[Q_KIND], address, c[D], np.float32(_doubles(c)[SCALE]), _floats(inside + 4 * row * c[D], c[D]))
                row += 1
    first, end = _span(c, b, i0, i1)
    shared = _longs(c[GROUPS] + u[8] * GROUP_WORDS * 8, GROUP_WORDS)
    partials = c[PARTIALS] + 4 * shared[1]
    if shared[1] < 0:
        _clear(mine, count, dv)
    for part in range(u[5], u[6]):
        state = (mine if part == u[5] else other) if shared[1] < 0 else partials + 4 * floats * (part - shared[2])
        _attend_chunk(c, b, rows, (max(first, part * chunk), min(end, (part + 1) * chunk)), inside, state)
        if shared[1] < 0 and part > u[5]:
            _fold(mine, other, count, dv)
    if shared[1] < 0:
        _finish(c, b, rows, mine)
    elif _fetch_add(c[GROUPS] + u[8] * GROUP_WORDS * 8, -1) == 1:  # the last to arrive
        for part in range(1, shared[3] - shared[2]):
            _fold(partials, partials + 4 * floats * part, count, dv)
        _finish(c, b, rows, partials)


@cfunc(types.void(types.voidptr), cache=True)
def attend(data: Any) -> None:
    """A thread's share of a call: units, until there are none. `data`: the int64 array of the call."""
    c = carray(data, (WORDS,), np.int64)
    address = c.ctypes.data
    room = c[ROOM] + c[ROOM_BYTES] * _fetch_add(address + 8 * NEXT_THREAD, 1)
    unit = _fetch_add(address + 8 * NEXT_UNIT, 1)
    while unit < c[NUM_UNITS]:
        _attend(c, _longs(c[UNITS] + unit * UNIT_WORDS * 8, UNIT_WORDS), room)
        unit = _fetch_add(address + 8 * NEXT_UNIT, 1)
