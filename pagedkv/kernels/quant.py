"""Stored elements: the names that KVSpec uses for torch's dtypes, the rotation of vectors, and the conversion of floats
to stored elements and back.

    fp8, int8, int5     stored = round(clamp(x / scale, low, qmax))     value = stored * scale
                        scale = amax / qmax, rounded up to a float16, at most 65504; or 1 where that is 0
    code4               stored = the index of a level                   value = LEVELS[stored] * scale

Scales are float16, and rounded before they are used: up, so that no element is clamped, or of codes to the nearest.
Integers round half to even. They have no NaN, so NaN is stored as 0, and its scale is NaN. fp8 rounds as torch's cast
does, and saturates because the value is clamped first.

K and V of a layer whose values are codes are rotated, so that a large channel spreads over all: each is multiplied by
fixed signs, and runs of n elements (the largest power of two that divides their number) by a Hadamard matrix over
sqrt(n). A calibration c, d of K's channels comes before: rotate((k - c) / d). A score is then

    q . k = rotate(q d) . rotate((k - c) / d) + q . c

LEVELS are those of a Gaussian with the least squared error (Lloyd), as integers of 8 bits. The first scale is the root
of the mean square over that of the levels. The second is the one that fits the codes best; it chooses the codes again.
This file does not know pages, slots or attention, but for the two planes of an int5 page (`planes`).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pagedkv.spec import COMPUTE_DTYPES, ELEMENTS, NUMBERS

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int5": torch.uint8,
    "code4": torch.uint8,
}
"""The torch dtype of the elements that KVSpec names."""

NAMES: Final = {dtype: name for name, dtype in DTYPES.items() if dtype != torch.uint8} | {torch.float64: "float64"}
"""The name of each torch dtype. Only a query can be float64, for oracles."""

FLOATS: Final = COMPUTE_DTYPES
"""The names of the dtypes that the compiled kernels compute with."""

QMAX: Final = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0, torch.uint8: 15.0}
"""The largest magnitude of a quantised element; of keys, if it is uint8."""

LEVELS: Final = (-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127)
MIDS: Final = (12.0, 24.5, 37.5, 51.0, 66.5, 85.5, 111.5)
"""The values of the sixteen codes of a value, and the middles between their magnitudes."""

UNIT: Final = 46.476
"""The root of the mean square of a Gaussian for which LEVELS are the best levels."""

_LARGEST: Final = 65504.0  # the largest float16


def _element_of(x: Tensor, is_value: bool = False) -> str:
    """Return the name of the elements of `x`: K of a layer, or V if `is_value`."""
    return ("code4" if is_value else "int5") if x.dtype == torch.uint8 else NAMES[x.dtype]


def number_of(x: Tensor, is_value: bool = False) -> int:
    """Return the number that kernels know the elements of `x` by."""
    return NUMBERS[_element_of(x, is_value)]


def kind_name(k: Tensor, v: Tensor) -> str | None:
    """Return the kind of a layer, by its name in KVSpec; None if K and V do not go together."""
    elements = _element_of(k), _element_of(v, True)
    return next((name for name, pair in ELEMENTS.items() if pair == elements), None)


def is_rotated(v: Tensor) -> bool:
    """Return whether K and V of a layer with these values are rotated."""
    return v.dtype == torch.uint8


def head_dim(x: Tensor, *, is_value: bool = False) -> int:
    """Return the elements of a vector in a pool tensor: 8 in 5 bytes of int5 keys, 2 in a byte of codes."""
    in_bytes = (1, 1) if x.dtype != torch.uint8 else (2, 1) if is_value else (8, 5)
    return x.shape[-1] * in_bytes[0] // in_bytes[1]


def planes(k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low 4 bits [F, S, K, D / 2] and the fifth bits [F, S, K, D / 8] of int5 keys, as views of `k`."""
    F, S, K, row = k.shape
    D, (frame, _, head, _) = head_dim(k), k.stride()
    first = k.storage_offset()
    low = k.as_strided((F, S, K, D // 2), (frame, D // 2, head, 1), first)
    return low, k.as_strided((F, S, K, row - D // 2), (frame, D // 8, head, 1), first + S * D // 2)


def _signs(n: int, device: torch.device) -> Tensor:
    """The fixed signs of n elements: float32 [n], from bit 31 of a hash of the index."""
    h = torch.arange(n, device=device) * 0x9E3779B1 & 0xFFFFFFFF
    h = (h ^ h >> 15) * 0x85EBCA6B & 0xFFFFFFFF
    return 1.0 - 2.0 * (h >> 31).float()


def _hadamard(x: Tensor) -> Tensor:
    """Return runs of x [..., D] times a Hadamard matrix over its root: sums of pairs at distance 1, 2, 4, ..."""
    D = x.shape[-1]
    n = D & -D
    y, step = x, 1
    while step < n:
        pairs = y.reshape(*y.shape[:-1], D // (2 * step), 2, step)
        y = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
        step *= 2
    return y * torch.tensor(n**-0.5, dtype=x.dtype, device=x.device)


def rotate(x: Tensor, *, back: bool = False) -> Tensor:
    """Return the vectors of x [..., D] rotated, in its float dtype; with `back`, those that rotate to x."""
    signs = _signs(x.shape[-1], x.device).to(x.dtype)
    return _hadamard(x) * signs if back else _hadamard(x * signs)


def store(pool: Tensor, scale: Tensor | None, at: tuple[Tensor, Tensor], x: Tensor, *, is_value: bool) -> None:
    """Store the vectors x [n, K, D] in K, or V, of a layer; rotated layers get rotated ones.

    Shapes:   pool [F, S, K, row], scale as in KVLayer; at: n frames, n slots in them
    Modifies: pool, and scales per (token, head), at `at`
    """
    if is_value and pool.dtype == torch.uint8:
        assert scale is not None
        pool[at], scale[at] = _codes_of(x.float())
        return
    if scale is not None and scale.dim() == 3:
        scale[at] = _scale_of(x, pool.dtype)
        scale = scale[at]
    if pool.dtype not in QMAX:
        pool[at] = x.to(pool.dtype)
        return
    x = x.float() if scale is None else x.float() / scale.float()[..., None]
    x = x.clamp(-16.0 if pool.dtype == torch.uint8 else -QMAX[pool.dtype], QMAX[pool.dtype])
    if pool.dtype == torch.uint8:
        whole = (x.round().nan_to_num(0.0) + 16).to(torch.uint8)
        low, fifth = planes(pool)
        eight = (whole >> 4).reshape(*whole.shape[:-1], whole.shape[-1] // 8, 8) << _bits(whole)
        low[at], fifth[at] = _pairs(whole & 15), eight.sum(-1, dtype=torch.uint8)
    elif pool.dtype == torch.int8:
        pool[at] = x.round().nan_to_num(0.0).to(torch.int8)
    else:  # indexing fp8 is not available on every device; bytes are
        pool.view(torch.uint8)[at] = x.to(pool.dtype).view(torch.uint8)


def load(
    pool: Tensor, scale: Tensor | None, at: tuple[Tensor, Tensor], dtype: torch.dtype, *, is_value: bool
) -> Tensor:
    """Return the vectors [n, K, D] at `at` of K, or V, of a layer in `dtype` (float32 or float64), as they are stored.

    Shapes: as in `store`
    """
    if pool.dtype == torch.uint8 and is_value:
        values = torch.tensor(LEVELS, dtype=dtype, device=pool.device)[_nibbles(pool[at]).long()]
    elif pool.dtype == torch.uint8:
        low, fifth = (plane[at] for plane in planes(pool))
        bits = (fifth[..., None] >> _bits(fifth) & 1).flatten(-2)
        values = (_nibbles(low) | bits << 4).to(dtype) - 16
    elif pool.element_size() == 1:
        values = pool.view(torch.uint8)[at].view(pool.dtype).to(dtype)
    else:
        values = pool[at].to(dtype)
    if scale is None:
        return values
    return values * (scale[at][..., None] if scale.dim() else scale).to(dtype)


def _scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each vector along the last dim of `x` [..., D]: float16 [...]."""
    exact = (x.float().abs().amax(-1) / QMAX[dtype]).clamp(max=_LARGEST)
    exact = torch.where(exact == 0, 1.0, exact)
    scale = exact.half()
    return torch.where(scale.float() < exact, (scale.view(torch.int16) + 1).view(torch.float16), scale)


def _codes_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of the vectors of `x` [..., Dv], uint8 [..., Dv / 2], and their scales, float16 [...]."""
    scale = x.square().mean(-1).sqrt() / UNIT
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=x.device)[_nearest(x, scale).long()]
    scale = ((x * levels).sum(-1) / levels.square().sum(-1)).clamp(max=_LARGEST).half()
    return _pairs(_nearest(x, scale.float())), scale


def _nearest(x: Tensor, scale: Tensor) -> Tensor:
    """The code of each element: uint8, the shape of x. A middle belongs to the smaller magnitude."""
    above = sum((x.abs() > (scale * mid)[..., None]).to(torch.uint8) for mid in MIDS)
    return torch.where(x > 0, 8 + above, 7 - above).to(torch.uint8)


def _bits(x: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=x.device)


def _pairs(x: Tensor) -> Tensor:
    """Two numbers of 4 bits in a byte: element 2i in the low bits, 2i + 1 in the high ones."""
    return x[..., 0::2] | x[..., 1::2] << 4


def _nibbles(x: Tensor) -> Tensor:
    return torch.stack((x & 15, x >> 4), -1).flatten(-2)
