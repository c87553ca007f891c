"""Workspace: memory for the results of a decode step, allocated once for all steps of its size.

    x ─▶ qkv ─▶ attended ─▶ gated ─▶ .. ─▶ logits         all layers share these tensors

A CUDA graph needs tensors that stay where they are. On a CPU, memory that is new in each step costs a page fault for
each 4 KiB: the logits of 64 sequences and 152k words are 9,500 pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.engine.checkpoint.config import ModelConfig, RopeConfig


class Angles(NamedTuple):
    """The angles of one kind of rope, and two steps on the way to them.

    Shapes: all [T, D / 2]; cos and sin of the decoder's dtype, the others float32
    """

    cos: Tensor
    sin: Tensor
    angle: Tensor
    wide: Tensor


class Workspace(NamedTuple):
    """The memory of a step of T tokens, each of which gives logits.

    Shapes: x [T, hidden]; qkv [T, (H + 2 K) D], or (2 H + 2 K) D with an output gate; attended [T, H, D];
            gated [T, intermediate]; logits float32 [T, V]
    """

    x: Tensor
    qkv: Tensor
    attended: Tensor
    gated: Tensor
    logits: Tensor
    angles: dict[RopeConfig, Angles]

    @classmethod
    def of(cls, config: ModelConfig, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Workspace:
        """Allocate the memory of a step of `num_tokens` tokens, filled with zeros."""

        def zeros(*sizes: int, of: torch.dtype = dtype) -> Tensor:
            return torch.zeros(num_tokens, *sizes, dtype=of, device=device)

        c, half = config, config.head_dim // 2
        wide = torch.float32
        return cls(
            x=zeros(c.hidden_size),
            qkv=zeros(c.qkv_rows),
            attended=zeros(c.num_heads, c.head_dim),
            gated=zeros(c.intermediate_size),
            logits=zeros(c.vocab_size, of=wide),
            angles={
                r: Angles(zeros(half), zeros(half), zeros(half, of=wide), zeros(half, of=wide)) for r in {*c.ropes}
            },
        )

    def first(self, num_tokens: int) -> Workspace:
        """Return the memory of a step of at most as many tokens: views of this one."""
        few = {rope: Angles(*(tensor[:num_tokens] for tensor in each)) for rope, each in self.angles.items()}
        x, qkv, attended, gated, logits = (tensor[:num_tokens] for tensor in self[:5])
        return Workspace(x, qkv, attended, gated, logits, few)
