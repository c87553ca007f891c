"""Stored elements: the names that KVSpec uses for torch's dtypes, and the conversion of a float to a stored element and
back.

    stored = round(clamp(x / scale, -qmax, qmax))
    value = stored * scale
    scale = amax / qmax, or 1 where that is 0

int8 and int4 round half to even. They have no NaN, so NaN is stored as 0. fp8 rounds as torch's cast does, and
saturates because the value is clamped first. int4 keeps two elements in a byte: element 2i in the low nibble, 2i + 1 in
the high nibble, each plus 8. This file does not know pages, slots or attention.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pagedkv.spec import COMPUTE_DTYPES, KINDS

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int4": torch.uint8,
}
"""The torch dtype of a pool whose KVSpec.stored_dtype has this name."""

NAMES: Final = {dtype: name for name, dtype in DTYPES.items()} | {torch.float64: "float64"}
"""The name of each torch dtype. Only a query can be float64, for oracles."""

FLOATS: Final = COMPUTE_DTYPES
"""The names of the dtypes that the compiled kernels compute with."""

QMAX: Final = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0, torch.uint8: 7.0}
"""The largest magnitude of a quantised element."""


def kind_of(x: Tensor) -> int:
    """Return the number that kernels know the dtype of `x` by."""
    return KINDS[NAMES[x.dtype]]


def head_dim(stored: Tensor) -> int:
    """Return the elements in the last dim of a pool tensor: twice its length where two are packed in a byte."""
    return stored.shape[-1] * (2 if stored.dtype == torch.uint8 else 1)


def token_head_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale of each vector along the last dim of `x` [..., D]: amax / qmax, or 1 where that is 0.

    float32 [...].
    """
    scale = x.float().abs().amax(-1) / QMAX[dtype]
    return torch.where(scale == 0, 1.0, scale)


def encode(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Return `x` [..., D] as elements of `dtype`; `scale` float32 broadcasts over [...], None is 1.

    int4 halves the last dim.
    """
    if dtype not in QMAX:
        return x.to(dtype)
    x = x.float() if scale is None else x.float() / scale[..., None]
    x = x.clamp(-QMAX[dtype], QMAX[dtype])
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return x.to(dtype)
    x = x.round().nan_to_num(0.0)
    if dtype == torch.int8:
        return x.to(dtype)
    nibbles = (x + 8).to(torch.uint8)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def decode(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the values of `stored` [..., D] in `dtype` (float32 or float64)."""
    if stored.dtype == torch.uint8:
        stored = torch.stack((stored & 15, stored >> 4), -1).flatten(-2).to(torch.int8) - 8
    values = stored.to(dtype)
    return values if scale is None else values * scale[..., None].to(dtype)
