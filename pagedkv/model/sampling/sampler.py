"""Sampling: from logits to the next token of each request. Knows logits and sampling parameters; no model, no cache.

For a row of logits z, in this order and by these definitions (those of transformers):

    repetition   z_i = z_i / r if z_i > 0 else z_i * r   for each i in prompt or output (Keskar et al., CTRL, 2019)
    temperature  z / T;  T = 0: take the largest z, and skip the rest
    top_k        keep z_i >= the k-th largest            (all ties of the k-th stay)
    top_p        keep i while the likelier tokens hold less than top_p of the sum of what top_k kept
                                                         (Holtzman et al., 2019)
    min_p        keep p_i >= min_p * max p               (Nguyen et al., 2024)
    draw         the first i with p_0 + .. + p_i > u * total, u uniform in [0, 1) from the request's own generator

Each filter keeps a prefix of the tokens sorted by probability, always with the first token. A request draws one u per
token, on the CPU, from its own generator, and computes its row from its own logits. So its tokens depend on its seed
and not on the other requests of the batch.

`_filtered` is the definition, in float64, by a sort of the vocabulary; `probabilities` and GPUs use it. On a CPU
`sample` sorts only the tokens that top_k and top_p may keep. There sums over the vocabulary are of float32 weights.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pagedkv.model.sampling.params import SamplingParams

_COLD: Final = 1e-6
"""Below this temperature, weights are computed in float64."""

_BLOCK: Final = 1024
"""Tokens of a block whose weights are summed first, and whose maximum is taken first if that pays."""
_LEAST_BLOCK: Final = 16
_LEAST_IN_BLOCKS: Final = 1 << 17
"""Logits below which one maximum takes no longer than maxima of blocks."""

_FIRST_WEIGHT: Final = 2.0**-7
_LAST_WEIGHT: Final = 2.0**-40
"""Weights, relative to the largest, above which top_p looks at a token: the first, and the last before all tokens."""

_ROUNDING: Final = 1e-5
"""More than the rounding of a sum of weights in float32, relative to the sum."""


class SamplingRow(NamedTuple):
    """The sampling parameters and the state of one row of the logits.

    generator: advanced by one draw, unless the row is greedy.
    history: prompt and output so far; read only if there is a repetition penalty.
    """

    params: SamplingParams
    generator: torch.Generator
    history: Sequence[int] | Tensor = ()


class BadLogits(InvalidRequest):
    """Raised for logits from which no token can be drawn. rows: their numbers."""

    def __init__(self, rows: list[int]) -> None:
        self.rows: list[int] = rows
        super().__init__(
            f"the logits of rows {rows} hold NaN, +inf or only -inf: checkpoint or cache is damaged, or the dtype (or "
            "the repetition penalty) overflows; try dtype float32, or PAGEDKV_DEBUG=3"
        )


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Choose the next token of each request.

    Shapes:   logits float32 [B, V], on any device; returns int64 [B] on the same device
    Modifies: the generators of the rows that are not greedy
    Raises:   BadLogits if the largest logit of a row is not finite: any token would be wrong. No generator has moved.
    """
    logits = _penalised(logits, rows)
    largest, tokens = _largest(logits)
    broken = ~largest.isfinite()
    if broken.any():
        raise BadLogits(broken.nonzero().flatten().tolist())
    drawing = [b for b, row in enumerate(rows) if not row.params.greedy]
    if not drawing:
        return tokens
    params, uniform = [rows[b].params for b in drawing], [_uniform(rows[b].generator) for b in drawing]
    if logits.device.type != "cpu":
        tokens[drawing] = _draw(_filtered(logits[drawing], params), torch.cat(uniform).to(logits.device))
        return tokens
    for b, of_row, u in zip(drawing, params, uniform, strict=True):
        if of_row.temperature < _COLD:
            tokens[b] = _draw(_filtered(logits[b : b + 1], [of_row]), u)[0]
        elif 0 < of_row.top_k < logits.shape[1] or of_row.top_p < 1:
            tokens[b] = _draw_from_likeliest(logits[b], float(largest[b]), of_row, float(u))
        else:
            tokens[b] = _draw_from_all(logits[b], float(largest[b]), of_row, float(u))
    return tokens


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row and its place, the first of equals; NaN if there is one.

    torch's maximum of blocks, without places, is six times as fast on a CPU as its maximum with places.
    """
    if logits.device.type != "cpu" or logits.numel() < _LEAST_IN_BLOCKS or not logits.is_contiguous():
        return logits.max(dim=-1)
    if (block := math.gcd(logits.shape[1], _BLOCK)) < _LEAST_BLOCK:
        return logits.max(dim=-1)
    blocks = logits.view(len(logits), -1, block)
    where = blocks.amax(-1).argmax(-1)
    largest, place = blocks[torch.arange(len(logits)), where].max(dim=-1)
    return largest, where * block + place


def _of_top_k(logits: Tensor, k: int) -> Tensor:
    """Return the ids of the tokens of one row whose logits are at least the k-th largest, in their order.

    k blocks have a maximum that is at least the k-th largest maximum, so the k-th largest logit is not below that.
    """
    block = math.gcd(len(logits), _BLOCK)
    if len(logits) // block <= k or not logits.is_contiguous():
        return (logits >= logits.topk(k).values[-1]).nonzero()[:, 0]
    least = logits.view(-1, block).amax(-1).topk(k).values[-1]
    ids = (logits >= least).nonzero()[:, 0]
    return ids[logits[ids] >= logits[ids].topk(k).values[-1]]


def _weights(logits: Tensor, largest: float, params: SamplingParams) -> Tensor:
    """Return e^((z - largest) / T) of one row, float32 [V]: 1 for the likeliest token."""
    return (logits - largest).div_(params.temperature).exp_()


def _draw_from_all(logits: Tensor, largest: float, params: SamplingParams, uniform: float) -> int:
    """Draw from one row without top_k and top_p: first a block of tokens by the blocks' sums, then a token in it."""
    weights = _weights(logits, largest, params)
    if params.min_p:
        weights = weights.where(weights >= params.min_p, 0.0)
    num_blocks = -(-len(weights) // _BLOCK)
    padded = torch.nn.functional.pad(weights, (0, num_blocks * _BLOCK - len(weights))).view(num_blocks, _BLOCK)
    running = padded.sum(dim=1).cumsum(0, dtype=torch.float64)
    target = uniform * float(running[-1])  # below the total even when rounded, see `_draw`
    block = int(torch.searchsorted(running, target, right=True))
    before = float(running[block - 1]) if block else 0.0
    inside = padded[block].cumsum(0, dtype=torch.float64)
    at = int(torch.searchsorted(inside, target - before, right=True))
    # Rounded sums may leave the target behind the block's last token.
    return block * _BLOCK + min(at, int(padded[block].nonzero()[-1]))


def _draw_from_likeliest(logits: Tensor, largest: float, params: SamplingParams, uniform: float) -> int:
    """Draw from one row with top_k or top_p: only tokens that these may keep are sorted."""
    if 0 < params.top_k < len(logits):
        ids = _of_top_k(logits, params.top_k)  # all ties of the k-th stay
        total = None
    else:
        weights, threshold = _weights(logits, largest, params), _FIRST_WEIGHT
        total = float(weights.sum())
        while True:  # the likeliest tokens that hold top_p of the sum, and some more
            ids = (weights >= threshold).nonzero()[:, 0]
            if float(weights[ids].sum()) > (params.top_p + _ROUNDING) * total or len(ids) == len(weights):
                break
            threshold *= _FIRST_WEIGHT if threshold > _LAST_WEIGHT else 0.0
    values, order = logits[ids].sort(descending=True, stable=True)  # of equal logits, the smaller id is likelier
    p = (values.double() - largest).div_(params.temperature).exp_()
    keep = p.cumsum(0) - p < params.top_p * (float(p.sum()) if total is None else total)
    keep &= p >= params.min_p  # the likeliest token has 1
    ids, order = ids[order[keep]].sort()
    running = p[keep][order].cumsum(0)
    return int(ids[torch.searchsorted(running, uniform * float(running[-1]), right=True)])


def skip(generator: torch.Generator, num_tokens: int) -> None:
    """Advance `generator` by the draws of `num_tokens` tokens."""
    for _ in range(num_tokens):
        _uniform(generator)


def _uniform(generator: torch.Generator) -> Tensor:
    return torch.rand(1, dtype=torch.float64, generator=generator)


def probabilities(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return the distribution from which each row's next token is drawn; a greedy row has a single 1.

    Shapes: logits float32 [B, V]; returns float64 [B, V], each row with the sum 1
    """
    logits = _penalised(logits, rows)
    drawn_from = torch.zeros_like(logits, dtype=torch.float64).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
    drawing = [b for b, row in enumerate(rows) if not row.params.greedy]
    if drawing:
        kept = _filtered(logits[drawing], [rows[b].params for b in drawing])
        drawn_from[drawing] = kept / kept.sum(dim=-1, keepdim=True)
    return drawn_from


def _penalised(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply the repetition penalties to a copy of `logits`; return `logits` itself if there is no penalty."""
    penalised = [b for b, row in enumerate(rows) if row.params.repetition_penalty != 1]
    logits = logits.clone() if penalised else logits
    for b in penalised:
        # A token that occurs twice is written twice, with the same value.
        seen = torch.as_tensor(rows[b].history, dtype=torch.int64, device=logits.device)
        r, z = rows[b].params.repetition_penalty, logits[b, seen]
        logits[b, seen] = torch.where(z > 0, z / r, z * r)
    return logits


def _filtered(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply temperature, top_k, top_p and min_p: float64 [B, V], probabilities not normalised, 0 for dropped tokens."""

    def column(values: Sequence[float]) -> Tensor:
        """Return one value per row: float64 [B, 1]."""
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    z = logits.double()
    # Shift before the division: T may be the smallest float.
    z = (z - z.amax(dim=-1, keepdim=True)) / column([p.temperature for p in params])
    z, token = z.sort(dim=-1, descending=True, stable=True)
    vocab = z.shape[-1]
    kth = column([min(p.top_k or vocab, vocab) - 1 for p in params]).long()
    p = z.softmax(dim=-1).where(z >= z.gather(1, kth), 0)
    likelier = p.cumsum(dim=-1) - p
    p = p.where(likelier < column([q.top_p for q in params]) * p.sum(dim=-1, keepdim=True), 0)
    p = p.where(p >= column([q.min_p for q in params]) * p[:, :1], 0)
    return torch.zeros_like(p).scatter_(1, token, p)


def _draw(p: Tensor, uniform: Tensor) -> Tensor:
    """Return, int64 [B], the first token of each row at which the running sum exceeds `uniform` times the row's total.

    Shapes: p float64 [B, V], uniform float64 [B]
    """
    running = p.cumsum(dim=-1)
    target = uniform[:, None] * running[:, -1:]  # below the total even when rounded: u is at most 1 - 2^-53
    return torch.searchsorted(running, target, right=True).flatten()
