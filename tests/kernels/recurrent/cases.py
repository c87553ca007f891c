"""Steps over recurrent states for the tests: ragged rows, states in a strided pool, saves, poisoned frames.

pool  [N, *shape]    a view into wider frames, as those of StateStorage; frames that a step writes hold NaN
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pagedkv.kernels.recurrent import ConvInputs, DeltaInputs, conv_state, delta_state

if TYPE_CHECKING:
    from torch import Tensor

SPARE = 5
"""Frames that no row names, in between those that rows name."""


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Step:
    """A step of rows with so many tokens. from_zeros, kept_not: rows with state_in -1, rows with state_out -1.

    saves: row -> offsets. The frames are drawn from a permutation, so that none is named twice.
    """

    counts: tuple[int, ...]
    from_zeros: tuple[int, ...] = ()
    kept_not: tuple[int, ...] = ()
    saves: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        B = len(self.counts)
        offsets = [offset for row in range(B) for offset in self.saves.get(row, ())]
        ends = [0]
        for row in range(B):
            ends.append(ends[-1] + len(self.saves.get(row, ())))
        self.num_frames = 2 * B + len(offsets) + SPARE
        lots = torch.randperm(self.num_frames, dtype=torch.int32)
        self.state_in, self.state_out = lots[:B].clone(), lots[B : 2 * B].clone()
        self.save_frames = lots[2 * B : 2 * B + len(offsets)].clone()
        self.save_offsets, self.save_indptr = ints(*offsets), ints(*ends)
        self.state_in[list(self.from_zeros)] = -1
        self.state_out[list(self.kept_not)] = -1
        self.indptr = ints(0, *torch.tensor(self.counts).cumsum(0).tolist())

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    def pool(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, spread: int = 64) -> Tensor:
        """Return a strided pool of states with values of size 1 in all frames but those that the step writes."""
        size = torch.Size(shape).numel()
        wide = torch.full((self.num_frames, size + spread), torch.nan, dtype=dtype)
        pool = wide[:, :size].view(self.num_frames, *shape)
        pool.normal_()
        for frames in (self.state_out, self.save_frames):
            pool[frames[frames >= 0].long()] = torch.nan
        return pool

    def copied(self, pool: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy with the strides of `pool`; in another dtype, without them."""
        if dtype:
            return pool.to(dtype)
        wide = torch.full((len(pool), pool.stride(0)), torch.nan, dtype=pool.dtype)
        return wide[:, : pool[0].numel()].view(pool.shape).copy_(pool)

    def written(self) -> list[int]:
        """Return the frames that the step writes."""
        return [frame for frame in (*self.state_out.tolist(), *self.save_frames.tolist()) if frame >= 0]


RAGGED = Step(
    (0, 1, 7, 64, 65, 200, 0, 3), from_zeros=(2, 4, 6), kept_not=(0, 3, 6),
    saves={2: (3,), 3: (16, 48), 4: (1, 64), 5: (33, 64, 77, 199)},
)  # fmt: skip
DECODE = Step((1, 1, 0, 1, 1, 1), from_zeros=(3,), kept_not=(2, 4))
ENDS = Step((0, 20, 32, 0, 1), saves={1: (20,), 2: (16, 32), 4: (1,)}, from_zeros=(3,), kept_not=(2,))
"""Rows without tokens whose state is kept, and saves at the end of a row."""
DRAFTS = Step((5, 5, 2, 16), saves={0: (1,), 1: (1,), 3: (15,)}, from_zeros=(1,))


def delta(step: Step, heads: tuple[int, int] = (2, 1), dims: tuple[int, int] = (64, 64), dtype=torch.float32):
    """Return (pool, inputs) of a delta rule. heads: those of v, and of q and k. dims: K and V."""
    (H, Hk), (K, V), T = heads, dims, step.num_tokens
    rows = torch.randn(T, (2 * Hk * K + H * V)).to(dtype)  # q, k and v are views of one projection, as in models
    q, k, v = rows.split([Hk * K, Hk * K, H * V], 1)
    decay = -torch.nn.functional.softplus(torch.randn(T, H)) * torch.rand(H)
    inputs = DeltaInputs(q.view(T, Hk, K), k.view(T, Hk, K), v.view(T, H, V), decay, torch.rand(T, H))
    return step.pool(delta_state(H, K, V)), inputs


def conv(step: Step, channels: int = 96, width: int = 4, dtype=torch.float32, activation: str = "silu"):
    """Return (pool, inputs) of a convolution."""
    x = torch.randn(step.num_tokens, channels + 32).to(dtype)[:, :channels]
    weight = torch.randn(channels, width).to(dtype)
    return step.pool(conv_state(channels, width), dtype), ConvInputs(x, weight, activation)
