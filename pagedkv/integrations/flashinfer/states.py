"""Attention over parts of the keys, merged. The LSE is in base 2."""

from __future__ import annotations

import math
from typing import Final

from torch import Tensor

import pagedkv

LN2: Final = math.log(2.0)


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention over two disjoint sets of keys, from the attention over each. LSE in base 2.

    Shapes: v_a, v_b [T, H, D]; s_a, s_b float32 [T, H]
    """
    v, s = pagedkv.merge_states(v_a, s_a.float() * LN2, v_b, s_b.float() * LN2)
    return v, s.div_(LN2)
