"""Facts about the tensors of a call that more than one backend needs.

This file knows shapes and strides, and no kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

FARTHEST: Final = 1 << 30
"""No sequence is so long: a wider window hides no key, and a longer chunk holds all keys. Sums of two fit 32 bits."""


def bounds(window: int | None, right: int | None) -> tuple[int, int]:
    """Return `window` and `right` of a call as numbers of 32 bits: 0 for no window, FARTHEST for no right side."""
    return min(window or 0, FARTHEST), FARTHEST if right is None else min(right, FARTHEST)


def scale_kind(scale: Tensor | None) -> int:
    """Return 0 if there is no scale, 1 for one scale of all elements, 2 for one scale per (token, head)."""
    return 0 if scale is None else 1 if scale.dim() == 0 else 2


def scale_strides(scale: Tensor | None) -> tuple[int, int, int]:
    """Return the strides of frames, slots and heads, in elements.

    They are 0 for one scale of all elements, and for none.
    """
    if scale is None or not scale.dim():
        return (0, 0, 0)
    frame, slot, head = scale.stride()
    return (frame, slot, head)


def is_v_in_k(k: Tensor, v: Tensor) -> bool:
    """Return True if each row of V is the first part of the row of K, in the same memory (MLA): then a kernel reads it
    once."""
    return k.data_ptr() == v.data_ptr() and v.shape[3] <= k.shape[3] and k.stride()[:3] == v.stride()[:3]


def is_one_scale(k_scale: Tensor | None, v_scale: Tensor | None) -> bool:
    """Return True if K and V have the same scales in the same memory, or none."""
    if k_scale is None or v_scale is None:
        return k_scale is v_scale
    return k_scale.data_ptr() == v_scale.data_ptr() and k_scale.stride() == v_scale.stride()
