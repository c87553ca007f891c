"""Rotary position embeddings: inverse frequencies, cos/sin tables, and the rotation. Knows positions and heads, no model.

Dimensions i and i + D/2 of a head are a complex number; the token at position p turns it by the angle p * w_i (Su et al., RoFormer, 2021):

    w_i  = theta^(-2i / D)                         i = 0 .. D/2 - 1, wavelength 2 pi / w_i
    q'_i = q_i cos(p w_i) - q_(i+D/2) sin(p w_i)   and   q'_(i+D/2) = q_(i+D/2) cos(p w_i) + q_i sin(p w_i)

A longer context than the one trained on (`original_length`) comes from slowing the turns down, by `factor`:

    linear   w_i / factor: positions are squeezed (kaiokendev, 2023; Chen et al., 2023)
    llama3   slow pairs (wavelength > original / low_freq_factor) as linear, fast ones (< original / high_freq_factor) as they are,
             in between a blend linear in original / wavelength (Llama 3.1, 2024)
    yarn     a blend linear in i between the pairs that make beta_fast and beta_slow turns in `original_length`,
             and cos and sin times an attention factor (Peng et al., YaRN, 2023)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """The angle, in radians, by which each pair turns per position.

    Shapes: returns float32 [D / 2]
    """
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain / rope.factor  # linear; default has factor 1


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    turns = rope.original_length * plain / (2 * math.pi)  # original / wavelength
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(plain / rope.factor, plain, keep.clamp(0, 1))


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    def pair_that_turns(times: float) -> float:  # w_i original / (2 pi) = times, solved for i
        return head_dim * math.log(rope.original_length / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (
        (high - low) or 0.001
    )  # 0 where fast, 1 where slow
    return torch.lerp(plain, plain / rope.factor, ramp.clamp(0, 1))


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1, except for yarn, where scores would get flatter over the longer context.

    YaRN: sqrt(1/t) = 0.1 ln(factor) + 1. DeepSeek put a weight before the logarithm and divide two of these: mscale and mscale_all_dim.
    """
    if rope.kind != "yarn" or rope.attention_factor is not None:
        return 1.0 if rope.attention_factor is None else rope.attention_factor

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return grown(rope.mscale) / grown(rope.mscale_all_dim)
    return grown(1.0)


class Rotary:
    """The rotary embedding of the layers that share one `RopeConfig`.

    Tables are made for the positions of a step, not for all positions: [T, D] a step, and no longest context.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._factor = attention_factor(rope)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of every angle, computed in float32 and rounded to `dtype`.

        Shapes: positions int64 [T]; returns two of dtype [T, 1, D / 2]
        """
        angles = positions.float()[:, None, None] * self._frequencies
        return (angles.cos() * self._factor).to(dtype), (angles.sin() * self._factor).to(dtype)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each head of each token by its position.

    Shapes: x [T, H, D]; tables as `Rotary.tables` made them; returns [T, H, D]
    """
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
