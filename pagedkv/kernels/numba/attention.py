"""Attention of the numba backend, compiled once and kept on disk: loops over addresses and byte strides.

    s[r, t] = scale * q[r] . k[t];   c tanh(s / c);   + slope (t - p);   -inf where not visible
    m, l, o = online softmax over tiles of keys;   out = o / l,   lse = m + ln(l)
    A sink is one more s, without a value.
    A layer is rotated if its values are code4. Then q is rotate(q d), scale q . c is added to s, and out is rotated
    back; c and d are the calibration of K's channels (0 and 1 without one).

A call is one int64 array, `c` in the loops: tensors as addresses and byte strides, then numbers, at the indices named
below. So there is one signature and one compilation for all dtypes. A row of any dtype becomes float32 when it is
loaded; all arithmetic is float32.

Unit of work   queries [i0, i1) and kv heads [h0, h1) of sequence b, over chunks [c0, c1) of its keys. The loops take
               all heads of a page before the next page, and K of all heads before V: the order in memory of a frame.
Tile           one page, small pages of up to 16 keys together, or 64 keys of a larger page. K rows become float32, and
               each of the (i1 - i0) G rows of a head's q is multiplied by four of them at a time. Then the same for V.
State          o [rows, Dv], m [rows], l [rows] of online softmax: float32, one after the other, at one address.
Threads        take units from a counter. If the keys of a group of units were cut, each chunk leaves a partial state,
               and the unit that finishes last folds the states in the order of their keys. With `split_tokens` the
               chunks are given, so neither the rest of the batch nor the number of threads changes a bit.

Never read: keys beyond seq_lens, slots of holes, padded table entries. The loops raise nothing: the arguments
were checked, and `is_in_bounds` looked at the tables. LLVM may reorder and contract sums in the functions marked FAST,
which makes vectors of them. The folding of states is compiled without FAST, so its bits are the same everywhere.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from pagedkv.kernels.layout import FARTHEST
from pagedkv.kernels.numba.elements import (
    C4,
    F16,
    I5,
    MACHINE_CODE,
    _as_bits,
    _as_float,
    _exp,
    _fetch_add,
    _floats,
    _hadamard,
    _halves,
    _ints,
    _load,
    _load_fives,
    _longs,
    _octets,
    _of_half,
    _pointer,
    _sign,
    _store,
    _tanh,
)

# The layout of a call's int64 array. A tensor takes four words and is named by the index of the first:
# its address (0: there is no such tensor), then up to three strides in bytes.
Q, KEYS, VALUES, K_SCALE, V_SCALE = range(0, 20, 4)
TABLE, ROWS, SEQ_LENS, CU_SEQLENS = range(20, 36, 4)  # block_table, rows, seq_lens, cu_seqlens_q
SINKS, SLOPES, TREE, CAUSAL_OF = range(36, 52, 4)  # sinks, alibi_slopes, tree_mask, causal_of
OUT, LSE, CALIBRATION = range(52, 64, 4)
# Then come numbers: sizes; kinds of elements, as in elements.py; options, 0 for none (RIGHT: FARTHEST).
H, K, D, DV, S = range(64, 69)
Q_KIND, K_KIND, V_KIND, K_SCALE_KIND, V_SCALE_KIND = range(69, 74)
CAUSAL, WINDOW, RIGHT, SPLIT_TOKENS = range(74, 78)
SCALE, SOFTCAP = range(78, 80)  # the bits of float64
# The input of `partition`: sequences, threads, and the most queries and kv heads of a unit.
B, THREADS, UNIT_QUERIES, UNIT_HEADS = range(80, 84)
# The units, the groups, and memory: addresses, except NUM_UNITS and SCRATCH_BYTES (those of one thread).
UNITS, NUM_UNITS, GROUPS, PARTIALS, SCRATCH, SCRATCH_BYTES = range(84, 90)
# Counters that the threads share: the units and the threads that have begun.
NEXT_UNIT, NEXT_THREAD = range(90, 92)
# The ends of what the tables may name: queries of q, frames, rows and pages of the table; max_seqlen_q, max_seqlen_k.
NUM_TOKENS, NUM_FRAMES, NUM_ROWS, NUM_PAGES, MOST_QUERIES, MOST_KEYS = range(92, 98)
WORDS = 98

# A unit: b, i0, i1, h0, h1, c0, c1, the tokens of a chunk, the index of its group.
UNIT_WORDS = 9
# A group is the units of the same queries and heads: the number of units that are not finished, the index in PARTIALS
# of the group's first float (-1: one unit has all keys), c0 and c1 of all its units together.
GROUP_WORDS = 4

TILE = 64
FAST = {"reassoc", "contract", "nsz"}


def scratch_words(rows: int, d: int, dv: int) -> int:
    """Return the int64 words of one thread's scratch memory, for units of at most `rows` rows.

    The parts lie in this order: two states, q [rows, d], scale q . c [rows], scores [rows, TILE], a tile of keys or
    values, and the places of the tile's keys, int64 [3, TILE].
    """
    size = 4 * (rows * (2 * (dv + 2) + d + 1 + TILE) + TILE * max(d, dv)) + 8 * 3 * TILE + 64
    return size // 8 + 1


@njit
def _entry(c: Any, vector: int, i: int) -> Any:
    """Return entry i of an int32 vector of the call, as int64."""
    return np.int64(_ints(c[vector] + i * c[vector + 1], 1)[0])


@njit
def _num_queries(c: Any, b: int) -> Any:
    """Return the number of new tokens of sequence b."""
    return _entry(c, CU_SEQLENS, b + 1) - _entry(c, CU_SEQLENS, b)


@njit
def _is_causal(c: Any, b: int) -> Any:
    """Return whether sequence b is causal."""
    if c[CAUSAL_OF]:
        return _octets(c[CAUSAL_OF] + b * c[CAUSAL_OF + 1], 1)[0] != 0
    return c[CAUSAL] != 0


@njit
def _right(c: Any, b: int) -> Any:
    """Return the positions after its own that a query of sequence b sees. A tree mask may hide more of them."""
    return 0 if _is_causal(c, b) and not c[TREE] else c[RIGHT]


@njit
def _whole_pages(c: Any) -> Any:
    """Return the keys of one page, or of the small pages that fit into 16 keys. No tile crosses a multiple of them."""
    return c[S] if c[S] >= 16 else 16 // c[S] * c[S]


@njit
def _span(c: Any, b: int, i0: int, i1: int) -> Any:
    """Return the first key that any of the queries [i0, i1) of sequence b may see, and the end of those keys."""
    n, m = _entry(c, SEQ_LENS, b), _num_queries(c, b)
    first, end = 0, min(n, max(0, n - m + i1 + _right(c, b)))
    if c[WINDOW]:
        first = max(0, n - m + i0 - c[WINDOW] + 1)
    return first, max(first, end)


@MACHINE_CODE.keep(njit)
def is_in_bounds(c: Any) -> bool:
    """Return whether the tables of a call name only what is there: the rules of checks.table_values.

    O(sequences + pages).
    """
    if _entry(c, CU_SEQLENS, 0) != 0 or _entry(c, CU_SEQLENS, c[B]) > c[NUM_TOKENS]:
        return False
    for b in range(c[B]):
        m, n = _num_queries(c, b), _entry(c, SEQ_LENS, b)
        if m < 0 or m > c[MOST_QUERIES]:
            return False
        if m == 0:
            continue
        row, pages = _entry(c, ROWS, b) if c[ROWS] else b, (n + c[S] - 1) // c[S]
        if n < 0 or (_is_causal(c, b) and 0 < n < m) or n > c[MOST_KEYS]:
            return False
        if pages > c[NUM_PAGES] or row < 0 or row >= c[NUM_ROWS]:
            return False
        entries = _ints(c[TABLE] + row * c[TABLE + 1], pages)
        for page in range(pages):
            if entries[page] >= c[NUM_FRAMES] or entries[page] < -1:
                return False
    return True


@MACHINE_CODE.keep(njit)
def partition(c: Any) -> Any:
    """Partition a call into units of work.

    Return units int64 [U, UNIT_WORDS], groups int64 [N, GROUP_WORDS] and the number of floats of the partial states.
    Keys are cut where a unit would hold more than a quarter of a thread's share; with `split_tokens`, only at multiples
    of `split_tokens`.
    """
    work, num_groups = 0, 0
    for b in range(c[B]):
        m = _num_queries(c, b)
        for i0 in range(0, m, c[UNIT_QUERIES]):
            first, end = _span(c, b, i0, min(m, i0 + c[UNIT_QUERIES]))
            num_groups += -(-c[K] // c[UNIT_HEADS])
            work += (end - first) * -(-c[K] // c[UNIT_HEADS])
    target = max(256, -(-work // (4 * c[THREADS]))) if c[THREADS] > 1 else max(1, work)
    target = -(-target // _whole_pages(c)) * _whole_pages(c)
    cuts = work // min(target, 256) if c[THREADS] > 1 else 0
    units = np.empty((2 * num_groups + cuts, UNIT_WORDS), np.int64)
    groups = np.empty((num_groups, GROUP_WORDS), np.int64)
    u, g, floats = 0, 0, 0
    for b in range(c[B]):
        m = _num_queries(c, b)
        for i0 in range(0, m, c[UNIT_QUERIES]):
            i1 = min(m, i0 + c[UNIT_QUERIES])
            first, end = _span(c, b, i0, i1)
            for h0 in range(0, c[K], c[UNIT_HEADS]):
                h1 = min(c[K], h0 + c[UNIT_HEADS])
                is_whole = end - first <= target
                chunk = c[SPLIT_TOKENS] if c[SPLIT_TOKENS] else (max(1, end) if is_whole else target)
                c0, c1 = first // chunk, -(-end // chunk)
                per_unit = max(1, c1 - c0) if is_whole else max(1, target // chunk)
                parts = max(1, -(-(c1 - c0) // per_unit))
                groups[g, 0], groups[g, 1], groups[g, 2], groups[g, 3] = parts, -1, c0, c1
                if parts > 1:
                    groups[g, 1] = floats
                    floats += (h1 - h0) * (i1 - i0) * (c[H] // c[K]) * (c[DV] + 2) * (c1 - c0)
                for part in range(parts):
                    units[u, 0], units[u, 1], units[u, 2], units[u, 3], units[u, 4] = b, i0, i1, h0, h1
                    units[u, 5], units[u, 6] = c0 + part * per_unit, min(c1, c0 + (part + 1) * per_unit)
                    units[u, 7], units[u, 8] = chunk, g
                    u += 1
                g += 1
    return units[:u], groups, floats


@njit
def _clear(state: int, rows: int, dv: int) -> None:
    """Set a state to that of no keys."""
    o = _floats(state, rows * dv)
    m, l = _floats(state + 4 * rows * dv, rows), _floats(state + 4 * rows * (dv + 1), rows)
    for i in range(rows * dv):
        o[i] = 0
    for r in range(rows):
        m[r], l[r] = -np.inf, 0


@njit
def _fold(into: int, state: int, rows: int, dv: int) -> None:
    """Fold `state` into `into`: states of the same rows over disjoint keys. Compiled without FAST, see the head."""
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
def _dots(q: int, rows: int, k: int, n: int, dim: int, first: int, scores: int) -> None:
    """Set scores[r, j] to first[r] + q[r] . k[j] for n keys; n is a multiple of four, rows of scores are TILE apart."""
    for r in range(rows):
        x, s = _floats(q + 4 * r * dim, dim), _floats(scores + 4 * r * TILE, n)
        for j in range(0, n, 4):
            k0, k1 = _floats(k + 4 * j * dim, dim), _floats(k + 4 * (j + 1) * dim, dim)
            k2, k3 = _floats(k + 4 * (j + 2) * dim, dim), _floats(k + 4 * (j + 3) * dim, dim)
            s0 = s1 = s2 = s3 = _floats(first, rows)[r]
            for d in range(dim):
                s0 += x[d] * k0[d]
                s1 += x[d] * k1[d]
                s2 += x[d] * k2[d]
                s3 += x[d] * k3[d]
            s[j], s[j + 1], s[j + 2], s[j + 3] = s0, s1, s2, s3


@njit(fastmath=FAST)
def _weigh(o: int, rows: int, v: int, n: int, dim: int, scores: int) -> None:
    """Add the sum over j of scores[r, j] v[j] to o[r]."""
    for r in range(rows):
        out, p = _floats(o + 4 * r * dim, dim), _floats(scores + 4 * r * TILE, n)
        for j in range(0, n, 4):
            v0, v1 = _floats(v + 4 * j * dim, dim), _floats(v + 4 * (j + 1) * dim, dim)
            v2, v3 = _floats(v + 4 * (j + 2) * dim, dim), _floats(v + 4 * (j + 3) * dim, dim)
            p0, p1, p2, p3 = p[j], p[j + 1], p[j + 2], p[j + 3]
            for d in range(dim):
                out[d] += (p0 * v0[d] + p1 * v1[d]) + (p2 * v2[d] + p3 * v3[d])


@njit(fastmath=FAST)
def _to_weights(state: int, rows: int, dv: int, scores: int, n: int) -> None:
    """Replace scores by weights e^(s - m), and add them to l. Where a row's maximum m grew, rescale l and o first."""
    m, l = _floats(state + 4 * rows * dv, rows), _floats(state + 4 * rows * (dv + 1), rows)
    for r in range(rows):
        s = _floats(scores + 4 * r * TILE, n)
        # Floats are ordered as these integers are, NaN highest: LLVM makes vectors of a maximum of integers.
        highest = np.int32(-2147483648)
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
def _shape_scores(c: Any, b: int, bounds: Any, t0: int, n: int, exists: Any, scores: int) -> None:
    """Apply soft cap, ALiBi and masks to scores [h, i, g, n] of the keys from t0 on.

    `bounds` is (i0, i1, h0, h1); exists[j] is 0 if there is no key t0 + j.
    """
    i0, i1, h0, h1 = bounds
    group, start = c[H] // c[K], _entry(c, CU_SEQLENS, b)
    p0 = _entry(c, SEQ_LENS, b) - _num_queries(c, b)  # the position of the first query
    cap, window, right = _doubles(c)[SOFTCAP], c[WINDOW], _right(c, b)
    all_exist = True
    for j in range(n):
        all_exist = all_exist and exists[j] != 0
    is_masked = (
        not all_exist
        or (c[TREE] and t0 + n > p0)
        or t0 + n - 1 > p0 + i0 + right
        or (window and t0 <= p0 + i1 - 1 - window)
    )
    if cap == 0 and not c[SLOPES] and not is_masked:
        return
    row = 0
    for h in range(h0, h1):
        for i in range(i0, i1):
            p, tree = p0 + i, _octets(c[TREE] + (start + i) * c[TREE + 1], i1 + 1)
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
                if not is_masked:
                    continue
                for j in range(n):
                    t = t0 + j
                    visible = t <= p + right
                    if c[TREE] and visible:
                        visible = t < p0 or (exists[j] != 0 and tree[(t - p0) * c[TREE + 2]] != 0)
                    if not (visible and exists[j] != 0 and (window == 0 or t > p - window)):
                        s[j] = -np.inf


@njit(inline="always")
def _doubles(c: Any) -> Any:
    """Return the call's array as float64, for the words that hold such numbers."""
    return c.view(np.float64)


@njit
def _scale_of(c: Any, scale: int, frame: int, offset: int, h: int) -> Any:
    """Return the scale of one vector, 1 if there are no scales. `scale` is K_SCALE or V_SCALE."""
    if c[scale] == 0:
        return np.float32(1)
    address = c[scale] + frame * c[scale + 1] + offset * c[scale + 2] + h * c[scale + 3]
    kind = c[K_SCALE_KIND if scale == K_SCALE else V_SCALE_KIND]
    return _of_half(_halves(address, 1)[0]) if kind == F16 else _floats(address, 1)[0]


@njit
def _gather(c: Any, pool: int, scale: int, h: int, n: int, places: Any, dim: int, tile: int) -> None:
    """Load the n keys or values of kv head h at `places` into `tile`, as float32.

    Rows of holes, and rows from n to the next multiple of four, become zeros.
    """
    kind = c[K_KIND if pool == KEYS else V_KIND]
    for j in range(-(-n // 4) * 4):
        row, frame, offset = _floats(tile + 4 * j * dim, dim), places[0, j], places[1, j]
        if frame < 0:
            for d in range(dim):
                row[d] = 0
            continue
        address, factor = c[pool] + frame * c[pool + 1] + h * c[pool + 3], _scale_of(c, scale, frame, offset, h)
        if kind == I5:  # planes of a page: the nibbles of all slots, then the fifth bits
            _load_fives(address + offset * dim // 2, address + (c[S] * 4 + offset) * dim // 8, dim, factor, row)
        else:
            _load(kind, address + offset * c[pool + 2], dim, factor, row)


@njit
def _attend_chunk(c: Any, b: int, bounds: Any, span: Any, q: int, state: int) -> None:
    """Compute the state of `bounds` = (i0, i1, h0, h1) over the keys `span` = (first, end), into `state`.

    `q` is the address of the scaled queries; what follows them is in scratch_words.
    """
    i0, i1, h0, h1 = bounds
    per_head = (i1 - i0) * (c[H] // c[K])
    rows, dv, size = per_head * (h1 - h0), c[DV], c[S]
    products = q + 4 * rows * c[D]
    scores = products + 4 * rows
    tile = scores + 4 * rows * TILE
    # places[:, j]: frame of the tile's key j (-1: a hole, or past the end), offset in the frame, 1 if the key exists
    places = carray(_pointer(tile + 4 * TILE * max(c[D], dv)), (3, TILE), np.int64)
    table_row = b if c[ROWS] == 0 else _entry(c, ROWS, b)
    step = _whole_pages(c)
    _clear(state, rows, dv)
    t = span[0]
    while t < span[1]:
        n = min((t // step + 1) * step, t + TILE, span[1]) - t
        padded, any_exists = -(-n // 4) * 4, False
        for j in range(padded):
            places[0, j], places[1, j], places[2, j] = -1, 0, 0
            if j < n:
                frame = _ints(c[TABLE] + table_row * c[TABLE + 1] + (t + j) // size * 4, 1)[0]
                places[0, j], places[1, j], places[2, j] = frame, (t + j) % size, frame >= 0
                any_exists = any_exists or frame >= 0
        if any_exists:
            for h in range(h0, h1):
                _gather(c, KEYS, K_SCALE, h, n, places, c[D], tile)
                first = (h - h0) * per_head
                of_head = scores + 4 * first * TILE
                _dots(q + 4 * first * c[D], per_head, tile, padded, c[D], products + 4 * first, of_head)
            _shape_scores(c, b, bounds, t, padded, places[2], scores)
            _to_weights(state, rows, dv, scores, padded)
            for h in range(h0, h1):
                _gather(c, VALUES, V_SCALE, h, n, places, dv, tile)
                first = (h - h0) * per_head
                _weigh(state + 4 * first * dv, per_head, tile, padded, dv, scores + 4 * first * TILE)
        t += n


@njit
def _finish(c: Any, b: int, bounds: Any, state: int) -> None:
    """Write out and lse from the state of all keys: sinks join, and o is divided by l."""
    i0, i1, h0, h1 = bounds
    group, dv = c[H] // c[K], c[DV]
    rows = (i1 - i0) * group * (h1 - h0)
    start, row = _entry(c, CU_SEQLENS, b), 0
    for h in range(h0, h1):
        for i in range(i0, i1):
            for g in range(group):
                o = _floats(state + 4 * row * dv, dv)
                m = _floats(state + 4 * (rows * dv + row), 1)[0]
                l = _floats(state + 4 * (rows * (dv + 1) + row), 1)[0]
                factor, head = np.float32(1), h * group + g
                if c[SINKS]:
                    sink = _floats(c[SINKS] + head * c[SINKS + 1], 1)[0]
                    top = sink if sink > m else m
                    if top > -np.inf:
                        # The comparisons serve infinite m and sink, whose difference is NaN.
                        factor = np.float32(1) if m == top else np.float32(math.exp(m - top))
                        l = l * factor + (np.float32(1) if sink == top else np.float32(math.exp(sink - top)))
                        m = top
                lse = -np.inf if l == 0 else m + math.log(l)
                if c[V_KIND] == C4:
                    _hadamard(o, dv)
                    _sign(o, dv)
                out = c[OUT] + (start + i) * c[OUT + 1] + head * c[OUT + 2]
                _store(c[Q_KIND], o, dv, np.float32(0) if l == 0 else factor / l, out)
                _floats(c[LSE] + (start + i) * c[LSE + 1] + head * c[LSE + 2], 1)[0] = lse
                row += 1


@njit
def _load_queries(c: Any, b: int, bounds: Any, q: int) -> None:
    """Load the queries of `bounds` = (i0, i1, h0, h1), times the call's scale, as float32 [h, i, g, D] at `q`.

    They are multiplied by the divisor and rotated, if keys are; then scale q . c follows, float32 [h, i, g].
    """
    i0, i1, h0, h1 = bounds
    group, start, row = c[H] // c[K], _entry(c, CU_SEQLENS, b), 0
    rows = (h1 - h0) * (i1 - i0) * group
    products = _floats(q + 4 * rows * c[D], rows)
    for h in range(h0, h1):
        centre = _floats(c[CALIBRATION] + h * c[CALIBRATION + 1], c[D])
        divisor = _floats(c[CALIBRATION] + h * c[CALIBRATION + 1] + c[CALIBRATION + 2], c[D])
        for i in range(i0, i1):
            for g in range(group):
                address = c[Q] + (start + i) * c[Q + 1] + (h * group + g) * c[Q + 2]
                x, products[row] = _floats(q + 4 * row * c[D], c[D]), 0
                _load(c[Q_KIND], address, c[D], np.float32(_doubles(c)[SCALE]), x)
                if c[CALIBRATION]:
                    for d in range(c[D]):
                        products[row] += x[d] * centre[d]
                        x[d] *= divisor[d]
                if c[V_KIND] == C4:
                    _sign(x, c[D])
                    _hadamard(x, c[D])
                row += 1


@njit
def _has_nan(c: Any, b: int, bounds: Any, row: int) -> bool:
    """Return whether the results of `bounds` hold a NaN. The address `row` is a scratch buffer of Dv float32."""
    i0, i1, h0, h1 = bounds
    group, start, x = c[H] // c[K], _entry(c, CU_SEQLENS, b), _floats(row, c[DV])
    for i in range(i0, i1):
        for head in range(h0 * group, h1 * group):
            _load(c[Q_KIND], c[OUT] + (start + i) * c[OUT + 1] + head * c[OUT + 2], c[DV], np.float32(1), x)
            for d in range(c[DV]):
                if x[d] != x[d]:
                    return True
    return False


@njit
def _mend(c: Any, b: int, bounds: Any, scratch: int) -> None:
    """Recompute each query of `bounds` whose result holds a NaN, one at a time, over the keys that the query sees.

    0 * NaN is NaN: a value that is not finite reaches all rows that were computed together, also rows that do not see
    the value. If the query sees a NaN, its result is NaN again.
    """
    i0, i1, h0, h1 = bounds
    if not (c[TREE] or (i1 - i0 > 1 and (_right(c, b) < FARTHEST or c[WINDOW]))):
        return
    start, dv, rows = _entry(c, CU_SEQLENS, b), c[DV], c[H] // c[K] * (h1 - h0)
    new = _entry(c, SEQ_LENS, b) - _num_queries(c, b)
    size = 4 * rows * (dv + 2)
    whole, part, q = scratch, scratch + size, scratch + 2 * size
    for i in range(i0, i1):
        query = (i, i + 1, h0, h1)
        if not _has_nan(c, b, query, scratch):
            continue
        _load_queries(c, b, query, q)
        _clear(whole, rows, dv)
        first, end = _span(c, b, i, i + 1)
        tree = c[TREE] + (start + i) * c[TREE + 1]
        while first < end:
            stop = first if c[TREE] else end
            while stop < end and (stop < new or _octets(tree + (stop - new) * c[TREE + 2], 1)[0] != 0):
                stop += 1
            if first < stop:
                _attend_chunk(c, b, query, (first, stop), q, part)
                _fold(whole, part, rows, dv)
            first = stop + 1
        _finish(c, b, query, whole)


@njit
def _attend(c: Any, unit: Any, scratch: int) -> None:
    """Compute one unit, int64 [UNIT_WORDS], with the scratch memory at `scratch`.

    A unit that has all keys of its group folds its chunks and writes the result. Otherwise each chunk has a partial
    state of its own, and the last unit of the group folds them and writes the result.
    """
    b, bounds = unit[0], (unit[1], unit[2], unit[3], unit[4])
    c0, c1, chunk = unit[5], unit[6], unit[7]
    group = _longs(c[GROUPS] + unit[8] * GROUP_WORDS * 8, GROUP_WORDS)
    is_alone, group_c0, group_c1 = group[1] < 0, group[2], group[3]
    dv, rows = c[DV], (bounds[1] - bounds[0]) * (c[H] // c[K]) * (bounds[3] - bounds[2])
    size = 4 * rows * (dv + 2)  # bytes of a state
    whole, next_chunk, q = scratch, scratch + size, scratch + 2 * size
    partials = c[PARTIALS] + 4 * group[1]
    _load_queries(c, b, bounds, q)
    first, end = _span(c, b, bounds[0], bounds[1])
    if is_alone:
        _clear(whole, rows, dv)
    for part in range(c0, c1):
        state = (whole if part == c0 else next_chunk) if is_alone else partials + size * (part - group_c0)
        _attend_chunk(c, b, bounds, (max(first, part * chunk), min(end, (part + 1) * chunk)), q, state)
        if is_alone and part > c0:
            _fold(whole, next_chunk, rows, dv)
    if is_alone:
        _finish(c, b, bounds, whole)
        _mend(c, b, bounds, scratch)
    elif _fetch_add(c[GROUPS] + unit[8] * GROUP_WORDS * 8, -1) == 1:  # this unit is the last of its group
        for part in range(1, group_c1 - group_c0):
            _fold(partials, partials + size * part, rows, dv)
        _finish(c, b, bounds, partials)
        _mend(c, b, bounds, scratch)


@MACHINE_CODE.keep(cfunc, types.void(types.voidptr))
def attend(data: Any) -> None:
    """Compute one thread's share of a call: take units until none is left. `data`: the call's array."""
    c = carray(data, (WORDS,), np.int64)
    address = c.ctypes.data
    scratch = c[SCRATCH] + c[SCRATCH_BYTES] * _fetch_add(address + 8 * NEXT_THREAD, 1)
    unit = _fetch_add(address + 8 * NEXT_UNIT, 1)
    while unit < c[NUM_UNITS]:
        _attend(c, _longs(c[UNITS] + unit * UNIT_WORDS * 8, UNIT_WORDS), scratch)
        unit = _fetch_add(address + 8 * NEXT_UNIT, 1)
