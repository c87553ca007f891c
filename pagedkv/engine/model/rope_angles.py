"""Rotary position embeddings: inverse frequencies, and cos and sin of positions. Knows positions, no model.

They are applied by `norm_rotate` of kernels/linear, or by write_kv and its `rope`.

Dimensions i and i + D/2 of a head form a complex number. The token at position p turns it by the angle p * w_i
(Su et al., RoFormer, 2021):

    w_i  = theta^(-2i / D)                         i = 0 .. D/2 - 1, wavelength 2 pi / w_i
    q'_i = q_i cos(p w_i) - q_(i+D/2) sin(p w_i)   and   q'_(i+D/2) = q_(i+D/2) cos(p w_i) + q_i sin(p w_i)

With `rotated`, only pairs in the first `rotated` dimensions of a head turn, D in the formula is `rotated`, and their
pairs are i and i + rotated / 2. checkpoint/weights.py moves them to where the operations expect them: q k^T stays as it
is if the dimensions of both are in another order. The other pairs turn by 0.

A context longer than the trained one (`original_length`) needs slower turns, by `factor`:

    linear   w_i / factor for all pairs (kaiokendev, 2023; Chen et al., 2023)
    llama3   w_i / factor for slow pairs (wavelength > original / low_freq_factor), w_i for fast pairs
             (wavelength < original / high_freq_factor), between them a blend linear in original / wavelength
             (Llama 3.1, 2024)
    yarn     w_i / factor for slow pairs, w_i for fast pairs, a blend linear in i between the pairs that make
             beta_slow and beta_fast turns in `original_length`; cos and sin times an attention factor
             (Peng et al., YaRN, 2023)
    longrope w_i / (a factor for each pair), and cos and sin times an attention factor. The checkpoint has two lists of
             factors: the short one for contexts up to `original_length`, the long one for others. An engine has one of
             them for all sequences, as pages are shared (Ding et al., LongRoPE, 2024)
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.engine.checkpoint.config import RopeConfig
    from pagedkv.engine.model.workspace import Angles


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the angle, in radians, by which each pair turns per position.

    Shapes: returns float32 [D / 2]
    """
    if rope.rotated:
        turning = _inverse_frequencies(replace(rope, rotated=0), rope.rotated)
        return F.pad(turning, (0, (head_dim - rope.rotated) // 2))
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "longrope":
        return plain / torch.tensor(rope.long_factors if rope.is_long else rope.short_factors, dtype=torch.float32)
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain / rope.factor  # linear; default has factor 1


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Blend `plain` with `plain` / factor by wavelength: float32 [D / 2]."""
    turns = rope.original_length * plain / (2 * math.pi)  # original / wavelength
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(plain / rope.factor, plain, keep.clamp(0, 1))


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Blend `plain` with `plain` / factor by pair number: float32 [D / 2]."""

    def pair_that_turns(times: float) -> float:
        """Solve w_i original / (2 pi) = times for i."""
        return head_dim * math.log(rope.original_length / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # 0 for fast pairs, 1 for slow pairs
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    return torch.lerp(plain, plain / rope.factor, ramp.clamp(0, 1))


def _attention_factor(rope: RopeConfig) -> float:
    """Return the factor of cos and sin. It is 1, except for yarn and longrope: it keeps scores from getting flatter.

    YaRN: sqrt(1/t) = 0.1 ln(factor) + 1. DeepSeek weight the logarithm, and divide the value for mscale by the value
    for mscale_all_dim. LongRoPE: sqrt(1 + ln(factor) / ln(original length)), for both lists.
    """
    if rope.kind not in ("yarn", "longrope") or rope.attention_factor is not None:
        return 1.0 if rope.attention_factor is None else rope.attention_factor
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_length)) if rope.factor > 1 else 1.0

    def grown(weight: float) -> float:
        """Return 0.1 weight ln(factor) + 1; 1 if `factor` does not lengthen the context."""
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return grown(rope.mscale) / grown(rope.mscale_all_dim)
    return grown(1.0)


class Rotary:
    """The rotary embedding of the layers that share one `RopeConfig`.

    Angles are computed for the positions of each step, not for all positions: the context has no limit here.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = _inverse_frequencies(rope, head_dim).to(device)
        factor = torch.full((head_dim // 2,), _attention_factor(rope), device=device)
        factor[(rope.rotated or head_dim) // 2 :] = 1.0
        self._factor = None if bool((factor == 1).all()) else factor

    def turned(self, x: Tensor, by: Tensor) -> Tensor:
        """Return heads that were turned by their positions, turned by some more positions; by fewer, if below 0.

        Shapes: x [T, H, D]; by int64 [T]; returns [T, H, D] of x's dtype
        """
        angles = by.float()[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def angles(self, positions: Tensor, dtype: torch.dtype, memory: Angles | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin of each angle, computed in float32 and rounded to `dtype`; in `memory`, if that is given.

        Shapes: positions int64 [T]; returns two tensors of `dtype` [T, D / 2]
        """
        if memory is None:
            angles = positions.float()[:, None] * self._frequencies
            cos, sin = (self._scaled(angles.cos()), self._scaled(angles.sin()))
            return cos.to(dtype), sin.to(dtype)
        memory.angle.copy_(positions[:, None]).mul_(self._frequencies)
        for function, result in ((torch.cos, memory.cos), (torch.sin, memory.sin)):
            function(memory.angle, out=memory.wide)
            result.copy_(self._scaled(memory.wide))
        return memory.cos, memory.sin

    def _scaled(self, x: Tensor) -> Tensor:
        """Multiply by the attention factor, in place."""
        return x if self._factor is None else x.mul_(self._factor)
