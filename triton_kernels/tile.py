"""Attention of one tile of query rows over a run of keys: the common part of decode and prefill.

    rows of the tile   M (query, head) pairs of one kv head: row r is query r // heads, head r % heads. So a key is read
                       once for all heads of its group, and a group of any size (1, 5, 7, 16) fills a tile of a power
                       of two
    an iteration       N keys: frames from the page table, loaded one iteration ahead, which hides their latency;
                       K [N, D] and V [N, Dv] gathered row by row, 16 bytes per thread; scores [M, N]; online softmax

        s = log2(e) * alibi(cap(scale * q k'))      m' = max(m, max s)      a = 2^(m - m')      p = 2^(s - m')
        l = a l + sum p                             acc = a acc + p v       (m, l, acc) starts at (-inf, 0, 0)

    overlap            if SPEC.overlapped, s of the next tile is multiplied under the softmax of a tile (WGMMA on sm_90)
    tree mask          of bytes, loaded as [M, N]; with `split_tokens`, as a word of N bits for each row
    never read         a key at or past `end`, a key of a hole (-1), a table entry past the last page: every
                       load is masked, and a masked value is 0, so that 0 * NaN cannot happen
    hidden values      a row that does not see a key still multiplies its value by p = 0. If SPEC.mixed, rows of a tile
                       see different keys; if a result is NaN then, the keys are walked again: values that are not
                       finite count as 0, and the rows that see one become NaN

Each product with a stride is 64-bit. Logarithms have base 2 in this file; the LSE that leaves the kernels is natural.
Scales of keys multiply scores; scales of values multiply p, or the sum if there is one scale for all; elements are
never scaled. Scales of tokens are loaded one tile ahead: a float16 is too small for an asynchronous copy. If p is
float16 (SPEC.narrow), p and acc carry a power of two: 13, so that weights down to 2^-37 count; or beside scales of
tokens `lift`, which brings the largest scale so far below 2^14. Rotated keys and values (quant.py) stay rotated:
`load_query` rotates q, `normalised` rotates the output back. The bias q . centre of a calibration is equal for all
keys, so without soft cap it is added to m after the last key. This file knows one sequence and one kv head at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.kernels.triton.elements import (
    _hadamard,
    _halves,
    _signs,
    _whole,
    exponent_of,
    number,
    parts,
    power,
    product,
    rounded,
    scaled_queries,
)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(x):
    """Return tanh(x) to float32's precision: near 0, where 1 - e^-2|x| would cancel, by an odd series."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    y = x * x
    near = x * (1.0 + y * (-0.3333333333 + y * (0.1333333333 + y * (-0.0539682540 + y * 0.0218694885))))
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0, -far, far))


@triton.jit
def query_rows(head_tile, first_query, num_queries, ROWS: tl.constexpr, SPEC: tl.constexpr):
    """Return the tile's first ROWS rows: query int32, head within the group int32, existence bool; each [ROWS]."""
    r = tl.arange(0, ROWS)
    query = first_query + r // SPEC.heads
    head = head_tile * SPEC.heads + r % SPEC.heads
    ok = (r < SPEC.queries * SPEC.heads) & (query < num_queries) & (head < SPEC.G)
    return query, head, ok


@triton.jit
def load_query(q, row, ok, calibration, kv_head, SPEC: tl.constexpr):
    """Return both parts of q at the 64-bit offsets `row`, [M, K0] and [M, K1], and the bias of each row.

    Rows that do not exist and columns past D are zeros. For rotated keys, q is times the divisors of their channels and
    rotated; the bias is q . centre, float32 [M].
    """
    WIDTH: tl.constexpr = 2 * SPEC.K0 if SPEC.kind == "int5" else SPEC.K0
    first, bias = _query_part(q, row, ok, calibration, kv_head, 0, WIDTH, SPEC)
    second = first
    if SPEC.K1 > 0:
        second, more = _query_part(q, row, ok, calibration, kv_head, WIDTH, SPEC.K1, SPEC)
        bias += more
    if SPEC.kind == "int5":
        first, second = _halves(first)
    return first, second, bias


@triton.jit
def _query_part(q, row, ok, calibration, kv_head, FROM: tl.constexpr, WIDTH: tl.constexpr, SPEC: tl.constexpr):
    """Return the elements FROM : FROM + WIDTH of q as `load_query` does, and their share of the bias."""
    bias = tl.full([SPEC.M], 0.0, tl.float32)
    c = FROM + tl.arange(0, WIDTH)
    x = tl.load(q + row[:, None] + c[None, :], mask=ok[:, None] & (c < SPEC.D)[None, :], other=0)
    if SPEC.rotated:
        x = number(x).to(tl.float32)
        if SPEC.calibrated:
            calibration += kv_head.to(tl.int64) * (2 * SPEC.D) + c
            bias = tl.sum(x * tl.load(calibration, mask=c < SPEC.D, other=0.0)[None, :], 1)
            x = x * tl.load(calibration + SPEC.D, mask=c < SPEC.D, other=0.0)[None, :]
        x = _hadamard(x * _signs(c)[None, :], SPEC.D)
    return x, bias


@triton.jit
def store_parts(to, row, ok, first, second, SPEC: tl.constexpr):
    """Store both parts of outputs at `to` + `row`, in the type of `to`."""
    c = tl.arange(0, first.shape[1])
    tl.store(
        to + row[:, None] + c[None, :], rounded(first, to.dtype.element_ty), mask=ok[:, None] & (c < SPEC.Dv)[None, :]
    )
    if SPEC.V1 > 0:
        c = SPEC.V0 + tl.arange(0, SPEC.V1)
        tl.store(
            to + row[:, None] + c[None, :],
            rounded(second, to.dtype.element_ty),
            mask=ok[:, None] & (c < SPEC.Dv)[None, :],
        )


@triton.jit
def bounds_of_mask(rows, tree, SPEC: tl.constexpr):
    """Return (n, m): every row of a tile sees the first n new tokens, and no row sees a new token after the first m."""
    _, ok, tree_row, _, num_new, _, _ = rows
    n = tl.arange(0, SPEC.N)
    seen_by_all, seen_by_some = num_new, num_new * 0
    for first in range(0, num_new, SPEC.N):
        j = first + n
        there = ok[:, None] & (j < num_new)[None, :]
        allowed = tl.load(tree + tree_row[:, None] + j[None, :], mask=there, other=0)
        hidden = tl.where(there & (allowed == 0), j[None, :], num_new)
        seen_by_all = tl.minimum(seen_by_all, tl.min(tl.min(hidden, 1), 0))
        seen_by_some = tl.maximum(seen_by_some, tl.max(tl.max(tl.where(allowed != 0, j[None, :] + 1, 0), 1), 0))
    return seen_by_all, seen_by_some


@triton.jit
def _words_of_mask(start, rows, tree, is_masked, SPEC: tl.constexpr):
    """Return [M], a bit for each key of the tile from `start` on: whether the mask lets a row see it.

    A load of [M, N] elements has a layout of its own, and Triton would sum the weights of a row in that layout or in
    that of the products, as it likes; a load of [M] elements takes the layout of its row.
    """
    position, ok, tree_row, new, num_new, _, _ = rows
    KEYS: tl.constexpr = SPEC.N
    WORD: tl.constexpr = tl.int32 if KEYS <= 32 else tl.int64
    words = tl.full([SPEC.M], -1, WORD)
    if is_masked & (start + KEYS > new):
        words = tl.full([SPEC.M], 0, WORD)
        for first in range(0, KEYS, 8):  # eight loads under way; all of them would be most of the kernel's code
            for i in tl.static_range(8):
                j = start + first + i - new + 0 * position  # [M], because the interpreter loses bools of no dimension
                allowed = tl.load(tree + tree_row + j, mask=ok & (j >= 0) & (j < num_new), other=1)
                words = words | ((allowed != 0).to(WORD) << (first + i))
    return words


@triton.jit
def _seen(start, t, present, rows, rules, SPEC: tl.constexpr):
    """Return bool [M, N]: whether each row may see the key at each position of `t`, `start` and those behind it."""
    position, ok, tree_row, new, num_new, right, _ = rows
    window, tree = rules[2], rules[5]
    visible = present[None, :]
    if SPEC.tree and SPEC.split:
        words = _words_of_mask(start, rows, tree, rules[6] >= 0, SPEC)
        visible = visible & (((words[:, None] >> tl.arange(0, SPEC.N)[None, :]) & 1) != 0)
    elif SPEC.tree:
        j = t - new
        among_new = (j >= 0) & (j < num_new) & present
        allowed = tl.load(tree + tree_row[:, None] + j[None, :], mask=ok[:, None] & among_new[None, :], other=1)
        visible = visible & (allowed != 0)
    if SPEC.right:
        visible = visible & (t[None, :] <= (position + right)[:, None])
    if SPEC.window:
        visible = visible & (t[None, :] > (position - window)[:, None])
    return visible


@triton.jit
def _scored(s, t, position, slopes, scale, bias, softcap, SPEC: tl.constexpr):
    """Return the products `s` [M, N] of queries and keys as logits of base 2.

    Without soft cap and ALiBi, the caller has multiplied `scale` by log2(e). Without soft cap, `walk` adds the bias.
    """
    s = s * scale
    if SPEC.softcap:
        if SPEC.calibrated:
            s = s + bias[:, None]
        s = softcap * _tanh(s / softcap)
    if SPEC.alibi:
        s = s + slopes[:, None] * (t[None, :] - position[:, None]).to(tl.float32)
    if SPEC.softcap or SPEC.alibi:
        s = s * LOG2E
    return s


@triton.jit
def _finite(x):
    """Return whether each element of `x` is a number, and not infinite."""
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def walk(q_parts, first, end, table_row, pool, kv_head, rows, slopes, rules, SPEC: tl.constexpr):
    """Return the state of a tile's rows over the keys first..end: acc0 [M, V0], acc1 [M, V1], m [M], l [M].

    q_parts: from `load_query`.             table_row: pointer to the sequence's row of the page tables.
    pool, rules: as in specialisation.py.   slopes: the ALiBi slope of each row.
    rows: (position, ok, tree_row, position of the first new token, number of new tokens, positions after its own that a
    row may see, position of the first token that a tree mask hides from some row).
    """
    bias = q_parts[2] * rules[0]
    if SPEC.narrow:
        q_parts = scaled_queries(q_parts[0], q_parts[1], SPEC)
    q_parts = (q_parts[0], q_parts[1], q_parts[2], bias)
    state = _no_keys(SPEC)
    middle = first
    if SPEC.edges:  # all rows see the keys before `middle`, but for those of holes
        seen_by_all = end
        if SPEC.right:
            seen_by_all = tl.minimum(end, tl.min(rows[0], 0) + rows[5] + 1)
        if SPEC.tree:
            seen_by_all = tl.minimum(seen_by_all, rows[6])
        middle = first + tl.maximum(seen_by_all - first, 0) // SPEC.N * SPEC.N
        state = _steps(q_parts, state, first, middle, table_row, pool, kv_head, rows, slopes, rules, False, False, SPEC)
    state = _steps(q_parts, state, middle, end, table_row, pool, kv_head, rows, slopes, rules, True, False, SPEC)
    acc0, acc1 = state[0], state[1]
    if SPEC.mixed:
        is_nan = tl.sum((acc0 != acc0).to(tl.int32)) + tl.sum((acc1 != acc1).to(tl.int32))
        if is_nan > 0:
            state = _no_keys(SPEC)
            state = _steps(q_parts, state, first, end, table_row, pool, kv_head, rows, slopes, rules, True, True, SPEC)
    acc0, acc1, m, l = _with_value_scale(state, pool[3], SPEC)
    if SPEC.calibrated and not SPEC.softcap:
        m = tl.where(m == float("-inf"), m, m + bias * LOG2E)
    return acc0, acc1, m, l


@triton.jit
def _no_keys(SPEC: tl.constexpr):
    """Return the state of a tile before its first key: acc0, acc1, m, l, `lift`, and which rows are spoiled."""
    m = tl.full([SPEC.M], float("-inf"), tl.float32)
    l = tl.full([SPEC.M], 0.0, tl.float32)
    acc0 = tl.full([SPEC.M, SPEC.V0], 0.0, tl.float32)
    acc1 = tl.full([SPEC.M, SPEC.second], 0.0, tl.float32)
    return acc0, acc1, m, l, tl.full([], 100, tl.int32), tl.full([SPEC.M], 0, tl.int32)


@triton.jit
def _with_value_scale(state, v_scale, SPEC: tl.constexpr):
    """Return acc0, acc1, m and l of a state: spoiled rows NaN, and without the powers of two of weights."""
    acc0, acc1, m, l, lift, spoiled = state
    acc0 = tl.where(spoiled[:, None] != 0, float("nan"), acc0)
    acc1 = tl.where(spoiled[:, None] != 0, float("nan"), acc1)
    value_scale = SPEC.factor * 1.0
    if SPEC.v_scale == 1:
        value_scale = value_scale * tl.load(v_scale)
    if SPEC.narrow and SPEC.v_scale == 2:
        value_scale = value_scale * power(-lift)
    return acc0 * value_scale, acc1 * value_scale, m - SPEC.lift, l


@triton.jit
def _present(t, frame, end, before, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """Return bool [N]: whether the key at each position of `t` is there, and some new token may see it.

    before: the last position before every window.
    """
    if MASKED:
        present = t < tl.where(frame >= 0, end, 0)
    else:
        present = tl.full([SPEC.N], 0, tl.int32) <= frame
    if SPEC.window:
        present = present & (t > before)
    return present


@triton.jit
def _scales(scale, frame, slot, frame_stride, slot_stride, present):
    """Return the scales of the keys or values that are `present`, [N]; 0 for the others."""
    at = frame.to(tl.int64) * frame_stride + slot.to(tl.int64) * slot_stride
    return tl.load(scale + at, mask=present, other=0.0)


@triton.jit
def _steps(
    q_parts, state, first, end, table_row, pool, kv_head, rows, slopes, rules,
    MASKED: tl.constexpr, APART: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Return the state after the keys first..end.

    MASKED: rows see different keys, or `end` lies within a tile; otherwise each row sees all keys that are present.
    APART:  a value that is not finite spoils the rows that see it, and no others.
    """
    acc0, acc1, m, l, lift, spoiled = state
    q0, q1 = q_parts[0], q_parts[1]
    (
        k, v, k_scale, v_scale, k_frame, k_slot, k_head, v_frame, v_slot, v_head,
        ks_frame, ks_slot, ks_head, vs_frame, vs_slot, vs_head, _,
    ) = pool  # fmt: skip
    scale, softcap, window, _, _, _, _, _ = rules
    wide = kv_head.to(tl.int64)
    k, v = k + wide * k_head, v + wide * v_head
    if SPEC.k_scale == 2:
        k_scale = k_scale + wide * ks_head
    if SPEC.v_scale == 2:
        v_scale = v_scale + wide * vs_head
    if SPEC.k_scale == 1:
        scale = scale * tl.load(k_scale)
    scale = scale * SPEC.factor
    if not (SPEC.softcap or SPEC.alibi):
        scale = scale * LOG2E
    if SPEC.narrow:
        scale = (scale * q_parts[2])[:, None]
    n = tl.arange(0, SPEC.N)
    OVERLAPPED: tl.constexpr = SPEC.overlapped and not MASKED
    zero = tl.full([SPEC.M, SPEC.N], 0.0, tl.float32)
    if SPEC.whole_pages:
        ahead = tl.load(table_row + first // SPEC.S, mask=first < end, other=-1)
    else:
        ahead = tl.load(table_row + (first + n) // SPEC.S, mask=first + n < end, other=-1)
    if SPEC.k_scale == 2 or SPEC.v_scale == 2:
        present, slot = _present(first + n, ahead, end, rows[3] - window, MASKED, SPEC), (first + n) % SPEC.S
        if SPEC.k_scale == 2:
            of_key = _scales(k_scale, ahead, slot, ks_frame, ks_slot, present)
        if SPEC.v_scale == 2:
            of_value = _scales(v_scale, ahead, slot, vs_frame, vs_slot, present)
    if OVERLAPPED:  # scores of the first tile; in the loop, those of the next tile
        page, slot = ahead.to(tl.int64) * k_frame, ((first + n) % SPEC.S).to(tl.int64)
        k0, _ = parts(k, page, slot, k_slot, ahead + 0 * n >= 0, SPEC.K0, SPEC.K1, SPEC.D, SPEC.kind, SPEC)
        s_ahead = product(q0, tl.trans(k0), zero, SPEC)
    for start in range(first, end, SPEC.N):
        frame, t = ahead, start + n
        if SPEC.whole_pages:
            ahead = tl.load(table_row + (start + SPEC.N) // SPEC.S, mask=start + SPEC.N < end, other=-1)
        else:
            ahead = tl.load(table_row + (t + SPEC.N) // SPEC.S, mask=t + SPEC.N < end, other=-1)
        slot = (start % SPEC.S + n if SPEC.whole_pages else t % SPEC.S).to(tl.int64)
        present = _present(t, frame, end, rows[3] - window, MASKED, SPEC)
        frame = frame.to(tl.int64)

        if OVERLAPPED:
            s = s_ahead
            page, after = ahead.to(tl.int64) * k_frame, ((t + SPEC.N) % SPEC.S).to(tl.int64)
            k0, _ = parts(k, page, after, k_slot, ahead + 0 * n >= 0, SPEC.K0, SPEC.K1, SPEC.D, SPEC.kind, SPEC)
            s_ahead = product(q0, tl.trans(k0), zero, SPEC)
        else:
            k0, k1 = parts(k, frame * k_frame, slot, k_slot, present, SPEC.K0, SPEC.K1, SPEC.D, SPEC.kind, SPEC)
            s = product(q0, tl.trans(k0), zero, SPEC)
            if SPEC.kind == "int5" or SPEC.K1 > 0:
                s = product(q1, tl.trans(k1), s, SPEC)
        if SPEC.k_scale == 2:
            s = s * number(of_key).to(tl.float32)[None, :]
        s = _scored(s, t, rows[0], slopes, scale, q_parts[3], softcap, SPEC)
        if MASKED:
            sees = _seen(start, t, present, rows, rules, SPEC)
            s = tl.where(sees, s, float("-inf"))
        else:  # a sum joins the product with the scale; a choice would be an instruction of its own
            s = s + tl.where(present, 0.0, float("-inf"))[None, :]

        top = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        fade = tl.exp2(m - safe)
        p = tl.exp2(s - (safe - SPEC.lift)[:, None])
        m = top
        l = l * fade + tl.sum(p, 1)
        by = present.to(tl.float32)
        if SPEC.v_scale == 2:
            by = number(of_value).to(tl.float32)
        if SPEC.v_in_k:
            v0, v1 = k0, k0
        else:
            v0, v1 = parts(v, frame * v_frame, slot, v_slot, present, SPEC.V0, SPEC.V1, SPEC.Dv, SPEC.v_kind, SPEC)
        if APART:
            lost = tl.where(_finite(by), 0, 1)
            by = tl.where(_finite(by), by, 0.0)
            if SPEC.v_kind != "int8" and SPEC.v_kind != "code4":
                lost = lost | tl.max(tl.where(_finite(v0), 0, 1), 1) | tl.max(tl.where(_finite(v1), 0, 1), 1)
                v0, v1 = tl.where(_finite(v0), v0, 0.0).to(v0.dtype), tl.where(_finite(v1), v1, 0.0).to(v1.dtype)
            spoiled = spoiled | tl.max(tl.where(sees & (lost != 0)[None, :], 1, 0), 1)
        if SPEC.v_scale == 2:
            if SPEC.narrow:
                # the largest finite scale times 2^lift is less than 2^14; `lift` never grows
                next = tl.minimum(lift, 13 - exponent_of(tl.max(tl.where(_finite(by), by, 0.0), 0)))
                fade = fade * tl.where(next - lift < -126, 0.0, power(tl.maximum(next - lift, -126)))
                lift = next
                by = by * power(next)
            p = p * by[None, :]
        acc0 = acc0 * fade[:, None]
        acc1 = acc1 * fade[:, None]
        p = rounded(p, SPEC.operand)
        acc0 = product(p, v0, acc0, SPEC)
        if not SPEC.v_in_k and (SPEC.rotated or SPEC.V1 > 0):
            acc1 = product(p, v1, acc1, SPEC)
        if SPEC.k_scale == 2 or SPEC.v_scale == 2:
            present, slot = _present(t + SPEC.N, ahead, end, rows[3] - window, MASKED, SPEC), (t + SPEC.N) % SPEC.S
            if SPEC.k_scale == 2:
                of_key = _scales(k_scale, ahead, slot, ks_frame, ks_slot, present)
            if SPEC.v_scale == 2:
                of_value = _scales(v_scale, ahead, slot, vs_frame, vs_slot, present)
    return acc0, acc1, m, l, lift, spoiled


@triton.jit
def normalised(acc0, acc1, m, l, SPEC: tl.constexpr):
    """Return the state as output and base-2 LSE; rows that saw no key give 0 and -inf.

    A rotated output is rotated back, and is one part of 2 * V0 columns.
    """
    l = tl.where(l == 0, 1.0, l)  # if l is 0, m is -inf and acc is 0
    weight, lse = 1.0 / l, m + tl.log2(l)
    acc0, acc1 = acc0 * weight[:, None], acc1 * weight[:, None]
    if SPEC.rotated:
        acc0 = _hadamard(_whole(acc0, acc1), SPEC.Dv) * _signs(tl.arange(0, 2 * SPEC.V0))[None, :]
    return acc0, acc1, lse


@triton.jit
def _with_sink(acc0, acc1, lse, sinks, head, ok):
    """Return output and base-2 LSE merged with the sink: its logit takes part in the sum, and its value is 0."""
    sink = tl.load(sinks + head, mask=ok, other=0.0) * LOG2E
    top = tl.maximum(lse, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    sink_weight = tl.where(sink == float("inf"), 1.0, tl.exp2(sink - safe))  # inf - inf would be NaN
    whole = safe + tl.log2(tl.exp2(lse - safe) + sink_weight)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, whole))[:, None]
    return acc0 * weight, acc1 * weight, whole


@triton.jit
def finish(out, lse, acc0, acc1, lse2, token, head, ok, sinks, strides, SPEC: tl.constexpr):
    """Store output and LSE of rows over all of their keys, with the sinks; the stored LSE is natural."""
    _, _, out_token, out_head, lse_token = strides
    if SPEC.sinks:
        acc0, acc1, lse2 = _with_sink(acc0, acc1, lse2, sinks, head, ok)
    store_parts(out, token * out_token + head.to(tl.int64) * out_head, ok, acc0, acc1, SPEC)
    tl.store(lse + token * lse_token + head, lse2 * LN2, mask=ok)
