"""write_kv: store new keys and values in their slots; keys are rotated (RoPE), keys and values quantised.

    x      = k_new[t, h, :], each pair of dims rotated by the angle of positions[t] if there are tables; v_new unchanged
    stored = x, or round(clamp(x / scale, -qmax, qmax)), half to even
    scale  = one for all; or per (token, head), in float16: amax / qmax of the vector, rounded up, or 1 if that is 0
    k8v4, k5v4: x is rotated first; K less its centre and over its divisor before that; V in codes (quant.py)

Grid      (tokens, groups of HEADS kv heads). A slot < 0, or beyond the pool, is skipped.
Program   reads its vectors once and writes them once. It reads a rotated vector twice, the second time from cache, to
          have each element beside the other one of its pair.
Bytes     2 * (D + Dv) * K elements per token, read and written; the time is that of memory or of the launch.
Tuned     not on any GPU yet.

fp8 is computed from float32 by arithmetic on its bits, not by a cast: sm_80 and gfx942 have no cast to these types, and
so the rounding is the same on each GPU. With g = 2^(e + 23 - mantissa), x + g - g rounds x, of exponent e, to the grid
of the smaller type, half to even.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pagedkv.kernels import quant
from pagedkv.kernels.layout import scale_kind, scale_strides
from pagedkv.kernels.triton.elements import _hadamard, _halves, _signs, number, rounded
from pagedkv.kernels.triton.specialisation import _kind_of, as_stored

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.kernels.args import WriteCall

LEVELS, MIDS = tl.constexpr(tuple(map(float, quant.LEVELS))), tl.constexpr(quant.MIDS)
UNIT = tl.constexpr(quant.UNIT)


@triton.jit
def _as_float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return float32 `x`, within the type's range, as the byte of a float with MANTISSA bits: e4m3 or e5m2."""
    bits = x.to(tl.uint32, bitcast=True)
    # a subnormal has the exponent of the least normal number
    exponent = tl.maximum(((bits >> 23) & 0xFF).to(tl.int32) - 127, 1 - BIAS)
    grid = ((exponent + 23 - MANTISSA + 127) << 23).to(tl.float32, bitcast=True)
    r = (tl.abs(x) + grid) - grid
    normal = (r.to(tl.int32, bitcast=True) >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    least: tl.constexpr = 2.0 ** (BIAS - 1 + MANTISSA)
    # the bits of a subnormal count multiples of the least subnormal; so do the bits of the least normal numbers
    small = exponent == 1 - BIAS
    byte = tl.where(small, tl.where(small, r * least, 0.0).to(tl.int32), normal)
    byte = tl.where(x == x, byte, 0x7F)
    return (byte | ((bits >> 24) & 0x80).to(tl.int32)).to(tl.uint8)


@triton.jit
def vector(x, row, ok, c, DIM: tl.constexpr, angles, ROPE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return float32 [HEADS, C]: columns `c` of the new vectors at `row`; dims below 2 * HALF rotated if ROPE."""
    mask = ok[:, None] & (c < DIM)[None, :]
    value = number(tl.load(x + row[:, None] + c[None, :], mask=mask, other=0.0)).to(tl.float32)
    if ROPE:
        cos, sin = angles
        if INTERLEAVED:
            other, i, is_first = c ^ 1, c // 2, c % 2 == 0
        else:
            other, i, is_first = tl.where(c < HALF, c + HALF, c - HALF), c % HALF, c < HALF
        in_rope = c < 2 * HALF
        partner = tl.load(x + row[:, None] + other[None, :], mask=mask & in_rope[None, :], other=0.0)
        partner = number(partner).to(tl.float32)
        cosine = tl.load(cos + i, mask=in_rope, other=1.0)[None, :]
        sine = tl.load(sin + i, mask=in_rope, other=0.0)[None, :]
        rotated = tl.where(is_first[None, :], value * cosine - partner * sine, value * cosine + partner * sine)
        value = tl.where(in_rope[None, :], rotated, value)
    return value


@triton.jit
def _stored_as(x, scale, KIND: tl.constexpr, QMAX: tl.constexpr, pool):
    """Return float32 `x` as elements of the pool; int5 as integers, offset by 16 and not yet packed."""
    if KIND == "":
        x = rounded(x, pool.dtype.element_ty)
    else:
        x = tl.div_rn(x, scale)
        LOW: tl.constexpr = -16.0 if KIND == "int5" else -QMAX
        x = tl.where(x == x, tl.minimum(tl.maximum(x, LOW), QMAX), x)
        if KIND == "e4m3":
            x = _as_float8(x, 3, 7)
        elif KIND == "e5m2":
            x = _as_float8(x, 2, 15)
        else:
            whole = tl.where(x == x, (x + 12582912.0) - 12582912.0, 0.0)  # to an integer, half to even
            if KIND == "int5":
                x = (whole + 16.0).to(tl.int32)
            else:
                x = whole.to(tl.int32).to(tl.int8).to(tl.uint8, bitcast=True)
    return x


@triton.jit
def _coded(x, scale):
    """Return the codes of float32 x [HEADS, C] at scales [HEADS], int32, and their levels, float32."""
    above, level = tl.full(x.shape, 0, tl.int32), tl.full(x.shape, LEVELS[8], tl.float32)
    for i in tl.static_range(7):
        is_above = tl.abs(x) > (scale * MIDS[i])[:, None]
        above += is_above.to(tl.int32)
        level = tl.where(is_above, LEVELS[9 + i], level)
    return tl.where(x > 0, 8 + above, 7 - above), tl.where(x > 0, level, -level)


@triton.jit
def _scale_of_codes(x, DIM: tl.constexpr):
    """Return the scale with which the codes of vectors x [HEADS, C] fit best: float32 [HEADS], not yet rounded."""
    _, level = _coded(x, tl.sqrt_rn(tl.sum(x * x, 1) / DIM) / UNIT)
    level = tl.where((tl.arange(0, x.shape[1]) < DIM)[None, :], level, 0.0)
    return tl.div_rn(tl.sum(x * level, 1), tl.sum(level * level, 1))


@triton.jit
def _store_vectors(
    x, row, ok, head, pool, page, slot, stride, scale, scale_at, scale_head, angles, calibration,
    S: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, QMAX: tl.constexpr,
    SCALE: tl.constexpr, ROPE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Store the vectors of HEADS heads of one token at `pool` + `page` + `slot` * `stride`, and their scales."""
    c = tl.arange(0, WIDTH)
    x = vector(x, row, ok, c, DIM, angles, ROPE, HALF, INTERLEAVED)
    if calibration is not None:
        mask, at = ok[:, None] & (c < DIM)[None, :], calibration + head[:, None] * (2 * DIM) + c[None, :]
        x = tl.div_rn(x - tl.load(at, mask=mask, other=0.0), tl.load(at + DIM, mask=mask, other=1.0))
    if ROTATED:
        x = _hadamard(x * _signs(c)[None, :], DIM)
    factor = tl.full([1], 1.0, tl.float32)
    if SCALE == 1:
        factor = factor * tl.load(scale)
    elif SCALE == 2:
        if KIND == "code4":
            factor = _scale_of_codes(x, DIM)
        else:
            largest, broken = tl.max(tl.abs(x), 1), tl.max((x != x).to(tl.int32), 1)
            factor = tl.div_rn(largest, tl.full(largest.shape, QMAX, tl.float32))
            factor = tl.where(broken != 0, float("nan"), tl.where(factor == 0, 1.0, factor))
        factor = tl.where(factor > 65504.0, 65504.0, factor)
        half = factor.to(tl.float16)
        if KIND != "code4":  # up, so that no element is clamped
            is_less = number(half).to(tl.float32) < factor
            half = (half.to(tl.int16, bitcast=True) + is_less.to(tl.int16)).to(tl.float16, bitcast=True)
        tl.store(scale + scale_at + head * scale_head, half, mask=ok)
        factor = number(half).to(tl.float32)
    to, limit = page + slot * stride, DIM
    if KIND == "code4":
        value, _ = _coded(x, factor)
    else:
        value = _stored_as(x, tl.broadcast_to(factor[:, None], x.shape), KIND, QMAX, pool)
    if KIND == "int5":  # the planes of the page: nibbles, then fifth bits
        byte = tl.arange(0, WIDTH // 8)
        fifth = tl.reshape((value >> 4) << (c % 8)[None, :], [x.shape[0], WIDTH // 8, 8])
        at = (page + S * (DIM // 2) + slot * (DIM // 8))[:, None] + byte[None, :]
        tl.store(pool + at, tl.sum(fifth, 2).to(tl.uint8), mask=ok[:, None] & (byte < DIM // 8)[None, :])
        to = page + slot * (DIM // 2)
    if KIND == "int5" or KIND == "code4":
        even, odd = _halves(value & 15)
        value, c, limit = (even | odd << 4).to(tl.uint8), tl.arange(0, WIDTH // 2), DIM // 2
    tl.store(pool + to[:, None] + c[None, :], value, mask=ok[:, None] & (c < limit)[None, :])


@triton.jit
def _write_kernel(
    k_new, v_new, k, v, k_scale, v_scale, calibration, slots, positions, cos, sin, K, num_slots,
    kn_token, kn_head, vn_token, vn_head, k_frame, k_slot, k_head, v_frame, v_slot, v_head,
    ks_frame, ks_slot, ks_head, vs_frame, vs_slot, vs_head, slots_stride, positions_stride, cos_stride, sin_stride,
    S: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr,
    HEADS: tl.constexpr, KIND: tl.constexpr, V_KIND: tl.constexpr, QMAX: tl.constexpr,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    ROPE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One program: key and value of HEADS kv heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * slots_stride)
    if (slot < 0) | (slot >= num_slots):
        return
    frame, at = slot // S, slot % S
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    ok = head < K
    if ROPE:
        position = tl.load(positions + token * positions_stride)
        cos += position * cos_stride
        sin += position * sin_stride
    angles = (cos, sin)
    _store_vectors(
        k_new, token * kn_token + head * kn_head, ok, head, k, frame * k_frame + head * k_head, at, k_slot,
        k_scale, frame * ks_frame + at * ks_slot, ks_head, angles, calibration,
        S, D, KW, KIND, QMAX, K_SCALE, ROPE, HALF, INTERLEAVED, V_KIND == "code4",
    )  # fmt: skip
    _store_vectors(
        v_new, token * vn_token + head * vn_head, ok, head, v, frame * v_frame + head * v_head, at, v_slot,
        v_scale, frame * vs_frame + at * vs_slot, vs_head, angles, None,
        S, Dv, VW, V_KIND, QMAX, V_SCALE, False, 1, False, V_KIND == "code4",
    )  # fmt: skip


def write_kv(call: WriteCall) -> None:
    """Store K, rotated if the call has angles, and V of each new token at its slot.

    Modifies: call.k and call.v at the slots, and scales per (token, head).
    """
    T, K, D = call.k_new.shape
    Dv, kinds = call.v_new.shape[2], (_kind_of(call.k), _kind_of(call.v, True))
    if not T or not K:
        return
    heads = min(8, triton.next_power_of_2(K))
    scales = (call.k_scale, call.v_scale)
    half = 1 if call.cos is None else call.cos.shape[1]
    _write_kernel[T, triton.cdiv(K, heads)](
        call.k_new, call.v_new, as_stored(call.k), as_stored(call.v), *scales, call.calibration,
        call.slots, call.positions, call.cos, call.sin, K, call.k.shape[0] * call.k.shape[1],
        *call.k_new.stride()[:2], *call.v_new.stride()[:2], *call.k.stride()[:3], *call.v.stride()[:3],
        *(stride for scale in scales for stride in scale_strides(scale)),
        *map(_stride, (call.slots, call.positions, call.cos, call.sin)),
        S=call.k.shape[1], D=D, Dv=Dv, KW=triton.next_power_of_2(D), VW=triton.next_power_of_2(Dv),
        HEADS=heads, KIND=kinds[0], V_KIND=kinds[1], QMAX=quant.QMAX.get(call.k.dtype, 0.0),
        K_SCALE=scale_kind(call.k_scale), V_SCALE=scale_kind(call.v_scale),
        ROPE=call.cos is not None and half > 0, HALF=max(half, 1), INTERLEAVED=call.interleaved, num_warps=4,
    )  # fmt: skip


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)
