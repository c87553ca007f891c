"""Attention of one sequence in plain torch, in the order in which flash_attn and flashinfer document its parts."""

from __future__ import annotations

import torch
from torch import Tensor

ABSURD = 2147480000
"""A page number that no pool has, for entries past the last page."""


class Pool:
    """Pages of random sequences: NaN where no token is, and pages in random order."""

    def __init__(
        self, lengths: list[int], spare: int, dtype: torch.dtype = torch.float32, size: int = 8,
        heads: tuple[int, int] = (2, 16),
    ) -> None:  # fmt: skip
        self.keys, self.values = ([torch.randn(n, *heads).to(dtype) for n in lengths] for _ in range(2))
        pages = [-(-(n + spare) // size) for n in lengths]
        order = torch.randperm(sum(pages) + 2)[: sum(pages)].split(pages)
        self.table = torch.full((len(lengths), max(pages) + 1), ABSURD, dtype=torch.int32)
        self.k, self.v = (torch.full((sum(pages) + 2, size, *heads), torch.nan, dtype=dtype) for _ in range(2))
        for b, mine in enumerate(order):
            self.table[b, : len(mine)] = mine
            for t in range(lengths[b]):
                self.k[mine[t // size], t % size] = self.keys[b][t]
                self.v[mine[t // size], t % size] = self.values[b][t]
        self.lengths = torch.tensor(lengths, dtype=torch.int32)


def close(out: Tensor, want: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [L, H, Dv] and the natural LSE [L, H], in float64.

    The last query is aligned with the last key. window: positions before and after; -1: all. mask: bool [L, N].
    """
    L, N, group = len(q), len(k), q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("lhd,nhd->hln", q.double(), keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    at, to = torch.arange(L)[:, None] + N - L, torch.arange(N)[None]
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (at - to).abs()
    seen = torch.ones(L, N, dtype=torch.bool) if mask is None else mask.clone()
    if causal:
        seen &= to <= at
    left, right = window
    if left >= 0:
        seen &= to >= at - left
    if right >= 0:
        seen &= to <= at + right
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, L, 1)], -1)
        values = torch.cat([values, torch.zeros(1, *values.shape[1:])])
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hln,nhd->lhd", weights, values), lse.T
