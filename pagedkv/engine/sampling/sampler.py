"""The sampler: the next token of each request, and its log-probability. Knows logits and sampling parameters.

For a row of logits z, in this order and by these definitions (those of transformers):

    rules        those of `logits.py`: bias, penalties, a processor, masks
    temperature  z / T;  T = 0: take the largest z, and skip the rest
    top_k        keep z_i >= the k-th largest            (all ties of the k-th stay)
    top_p        keep i while the likelier tokens hold less than top_p of the sum of what top_k kept
                                                         (Holtzman et al., 2019)
    min_p        keep p_i >= min_p * max p               (Nguyen et al., 2024)
    draw         the first i with p_0 + .. + p_i > u * total, u uniform in [0, 1) from the request's own generator
    log-probs    z_i - log sum e^z of the row as the model gave it, before the rules and the temperature: the default
                 of vLLM's logprobs_mode. At temperature 1, without rules, min_p and top_k, the draw makes this sum

Each filter keeps a prefix of the tokens sorted by probability, always with the first token. A request draws one u per
token, on the CPU, from its own generator, and computes its row from its own logits. So its tokens depend on its seed
and not on the other requests of the batch.

`_filtered` is the definition, in float64, by a sort of the vocabulary; GPUs use it. On a CPU `sample` sorts only the
tokens that top_k and top_p may keep. There sums over the vocabulary are of float32 weights.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from pagedkv.errors import InvalidRequest, described

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pagedkv.engine.sampling.logits import LogitsRules
    from pagedkv.engine.sampling.params import SamplingParams

_COLD: Final = 1e-6
"""Below this temperature, weights are computed in float64."""

_HOTTEST: Final = 1e30
"""Above this temperature all tokens are equally likely, and float32 would divide -inf by inf."""

_BLOCK: Final = 1024
"""The most tokens of a block. Its weights are summed first, and its maximum is taken first if that pays."""
_LEAST_BLOCK: Final = 16
"""The fewest tokens of a block: a vocabulary that is cut into smaller ones is padded, or has none."""
_LEAST_IN_BLOCKS: Final = 1 << 21
"""Logits below which one thread of numpy finds the maxima sooner than torch's threads, block by block."""

_FIRST_WEIGHT: Final = 2.0**-7
_LAST_WEIGHT: Final = 2.0**-40
"""Weights, relative to the largest, above which top_p looks at a token: the first, and the last before all tokens."""

_ROWS_AT_ONCE: Final = 16
"""Rows whose log-probabilities are computed at once: memory for as many rows is taken."""

_LEAST_LOGPROB: Final = -9999.0
"""The log-probability of a given token that the model excludes: JSON has no -inf."""

_ROUNDING: Final = 1e-5
"""More than the rounding of a sum of weights in float32, relative to the sum."""


_DAMAGED: Final = (
    "the logits hold NaN, +inf or only -inf: checkpoint or cache is damaged, or the dtype overflows; try dtype "
    "float32, or PAGEDKV_DEBUG=3"
)
_NO_TOKEN: Final = (
    "no token is left to draw: allowed_ids, the grammar, min_tokens or the logits processor forbid all of them "
    "together; allow more"
)
_OVERFLOW: Final = (
    "penalties or the logits processor made a logit NaN or +inf; raise repetition_penalty, or mend the processor"
)
"""The errors of a row: of the model's logits, and of those that its rules made."""


class SamplingRow(NamedTuple):
    """The sampling parameters and the state of one row of the logits.

    generator: advanced by one draw, unless the row is greedy.
    rules: the rules that `params` ask for, of this sequence.
    """

    params: SamplingParams
    generator: torch.Generator
    rules: LogitsRules | None = None


class TokenLogprobs(NamedTuple):
    """The log-probability of a token that was drawn, and of the likeliest tokens at its place.

    top: pairs of token id and log-probability, likeliest first; of equals, the smaller id. A token of probability 0
        is not there.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class _Sampled(NamedTuple):
    """The next tokens of all rows.

    tokens:   int64 [B], on the device of the logits; -1 for a row with an error
    errors:   by row, why no token can be drawn
    logprobs: by row, for rows that asked for them and have a token
    """

    tokens: Tensor
    errors: dict[int, str]
    logprobs: dict[int, TokenLogprobs]


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> _Sampled:
    """Choose the next token of each request.

    A row has an error if its largest logit is not finite, or its rules fail: any token would be wrong. Its generator
    does not move.
    Shapes:   logits float32 [B, V], on any device
    Modifies: the generators of the rows that are not greedy
    """
    largest, likeliest = _largest(logits)
    errors = dict.fromkeys(_not_finite(largest), _DAMAGED)
    ruled = _ruled(logits, rows, errors)
    tokens = likeliest.clone()
    if ruled:
        largest = largest.clone()
        for b, z in ruled.items():
            largest[b], tokens[b] = (found[0] for found in _largest(z[None]))
        for b in _not_finite(largest):
            errors.setdefault(b, _NO_TOKEN if largest[b] == -math.inf else _OVERFLOW)
    if errors:
        tokens[list(errors)] = -1
    drawing = [b for b, row in enumerate(rows) if not row.params.greedy and b not in errors]
    totals: dict[int, float] = {}
    if drawing:
        tokens[drawing], totals = _drawn(logits, ruled, largest, {b: rows[b] for b in drawing})
    counts = {b: row.params.logprobs for b, row in enumerate(rows) if row.params.logprobs is not None}
    asked = [b for b in counts if b not in errors]
    log_sums = {b: float(largest[b]) + math.log(totals[b]) for b in asked if b in totals}
    log_sums |= _log_sums(logits, likeliest, [b for b in asked if b not in log_sums])
    chosen = logits[asked, tokens[asked]].tolist() if asked else []
    logprobs = {
        b: TokenLogprobs(z - log_sums[b], _top(logits[b], log_sums[b], counts[b]))
        for b, z in zip(asked, chosen, strict=True)
    }
    return _Sampled(tokens, errors, logprobs)


def given(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return the log-probability of a given token at each row, and of the `count` likeliest ones.

    Shapes: logits float32 [N, V]; N token ids below V. Raises: InvalidRequest if a largest logit is not finite
    """
    largest, likeliest = _largest(logits)
    if _not_finite(largest):
        raise InvalidRequest(_DAMAGED)
    log_sums = _log_sums(logits, likeliest, list(range(len(logits))))
    there = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    return [
        TokenLogprobs(max(z - log_sums[n], _LEAST_LOGPROB), _top(logits[n], log_sums[n], count))
        for n, z in enumerate(there)
    ]


def _not_finite(largest: Tensor) -> list[int]:
    """Return the rows whose largest logit is NaN, +inf or -inf."""
    return [b for b, z in enumerate(largest.tolist()) if not math.isfinite(z)]


def _ruled(logits: Tensor, rows: Sequence[SamplingRow], errors: dict[int, str]) -> dict[int, Tensor]:
    """Return the edited logits of the rows that have rules and no error yet. Modifies: errors"""
    ruled: dict[int, Tensor] = {}
    for b, row in enumerate(rows):
        if row.rules is not None and b not in errors:
            try:
                ruled[b] = row.rules.apply(logits[b])
            except (KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:  # the grammar's library is in Rust: a panic is no Exception
                errors[b] = str(error) if isinstance(error, InvalidRequest) else f"its rules failed: {described(error)}"
    return ruled


def _drawn(
    logits: Tensor, ruled: dict[int, Tensor], largest: Tensor, rows: dict[int, SamplingRow]
) -> tuple[Tensor, dict[int, float]]:
    """Draw a token for each of `rows`.

    Returns: int64 [len(rows)]; the sum of e^(z - largest) by row, where the draw has made it from the model's logits
    """
    params = [row.params for row in rows.values()]
    uniform = [_uniform(row.generator) for row in rows.values()]
    if logits.device.type != "cpu":
        z = logits[list(rows)]
        for n, b in enumerate(rows):
            if b in ruled:
                z[n] = ruled[b]
        return _draw(_filtered(z, params), torch.cat(uniform).to(logits.device)), {}
    tokens = torch.empty(len(rows), dtype=torch.int64)
    totals: dict[int, float] = {}
    for n, (b, of_row, u) in enumerate(zip(rows, params, uniform, strict=True)):
        z, total = ruled.get(b, logits[b]), None
        if of_row.temperature < _COLD:
            tokens[n] = _draw(_filtered(z[None], [of_row]), u)[0]
        elif 0 < of_row.top_k < len(z) or of_row.top_p < 1:
            tokens[n], total = _draw_from_likeliest(z, float(largest[b]), of_row, float(u))
        else:
            tokens[n], total = _draw_from_all(z, float(largest[b]), of_row, float(u))
        if total is not None and of_row.temperature == 1 and b not in ruled:
            totals[b] = total
    return tokens, totals


def _log_sums(logits: Tensor, likeliest: Tensor, rows: list[int]) -> dict[int, float]:
    """Return log sum e^z of each of `rows`, for rows whose draw has made no such sum.

    A draw at another temperature than 1 needs another exponential of each logit, and a greedy row needs none: so these
    rows are read once more. The sum is read off at the likeliest token, where log_softmax is least rounded. torch's
    log_softmax is faster on a CPU than exp and sum after a maximum that is known.
    Shapes: logits [B, V], likeliest [B]: the token with the largest logit of each row
    """
    found: dict[int, float] = {}
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[first : first + _ROWS_AT_ONCE]
        z = logits if len(some) == len(logits) else logits[some]
        at = likeliest[some, None]
        log_sums = z.gather(1, at).double() - z.log_softmax(-1).gather(1, at)
        found.update(zip(some, log_sums.flatten().tolist(), strict=True))
    return found


def _top(logits: Tensor, log_sum: float, count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` likeliest tokens of a row and their log-probabilities, without tokens of probability 0."""
    if not count:
        return ()
    ids = _of_top_k(logits, min(count, len(logits)))
    ids = ids[logits[ids].argsort(descending=True, stable=True)[:count]]
    # The same difference of Python's floats as for the token itself: lm-eval asks whether they are equal.
    pairs = ((token, z - log_sum) for token, z in zip(ids.tolist(), logits[ids].tolist(), strict=True))
    return tuple(pair for pair in pairs if pair[1] > -math.inf)


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row and its place, the first of equals; NaN if there is one.

    On a CPU torch's maximum with places takes four to ten times as long as numpy's, and as a maximum of blocks without.
    """
    if logits.device.type != "cpu":
        return logits.max(dim=-1)
    block = math.gcd(logits.shape[1], _BLOCK)
    if logits.numel() < _LEAST_IN_BLOCKS or block < _LEAST_BLOCK or not logits.is_contiguous():
        place = torch.from_numpy(logits.numpy().argmax(-1))
        return logits.gather(1, place[:, None])[:, 0], place
    blocks = logits.view(len(logits), -1, block)
    where = blocks.amax(-1).argmax(-1)
    largest, place = blocks[torch.arange(len(logits)), where].max(dim=-1)
    return largest, where * block + place


def _of_top_k(logits: Tensor, k: int) -> Tensor:
    """Return the ids of the tokens of one row whose logits are at least the k-th largest, in their order.

    k blocks have a maximum that is at least the k-th largest maximum, so the k-th largest logit is not below that. Only
    such blocks are looked at.
    """
    block = math.gcd(len(logits), _BLOCK)
    if len(logits) // block <= k or not logits.is_contiguous():
        return (logits >= logits.topk(k).values[-1]).nonzero()[:, 0]
    blocks = logits.view(-1, block)
    most = blocks.amax(-1)
    least = most.topk(k).values[-1]
    which = (most >= least).nonzero()[:, 0]
    found = blocks[which]
    row, column = (found >= least).nonzero(as_tuple=True)
    values = found[row, column]
    kept = values >= values.topk(k).values[-1]
    return (which[row] * block + column)[kept]


def _weights(logits: Tensor, largest: float, params: SamplingParams) -> Tensor:
    """Return e^((z - largest) / T) of one row, float32 [V]: 1 for the likeliest token."""
    return (logits - largest).div_(min(params.temperature, _HOTTEST)).exp_()


def _draw_from_all(logits: Tensor, largest: float, params: SamplingParams, uniform: float) -> tuple[int, float | None]:
    """Draw from one row without top_k and top_p: first a block of tokens by the blocks' sums, then a token in it.

    Returns: the token; the sum of all weights, None if min_p has left some out
    """
    weights = _weights(logits, largest, params)
    if params.min_p:
        weights = weights.where(weights >= params.min_p, 0.0)
    width = math.gcd(len(weights), _BLOCK)
    if width < _LEAST_BLOCK:
        width, weights = _BLOCK, torch.nn.functional.pad(weights, (0, -len(weights) % _BLOCK))
    blocks = weights.view(-1, width)
    running = blocks.sum(dim=1).cumsum(0, dtype=torch.float64)
    target = uniform * float(running[-1])  # below the total even when rounded, see `_draw`
    block = int(torch.searchsorted(running, target, right=True))
    before = float(running[block - 1]) if block else 0.0
    inside = blocks[block].cumsum(0, dtype=torch.float64)
    at = int(torch.searchsorted(inside, target - before, right=True))
    # Rounded sums may leave the target behind the block's last token.
    token = block * width + min(at, int(blocks[block].nonzero()[-1]))
    return token, None if params.min_p else float(running[-1])


def _draw_from_likeliest(
    logits: Tensor, largest: float, params: SamplingParams, uniform: float
) -> tuple[int, float | None]:
    """Draw from one row with top_k or top_p: only tokens that these may keep are sorted.

    Returns: the token; the sum of all weights, None with top_k, which needs no such sum
    """
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
    return int(ids[torch.searchsorted(running, uniform * float(running[-1]), right=True)]), total


def skip(generator: torch.Generator, num_tokens: int) -> None:
    """Advance `generator` by the draws of `num_tokens` tokens."""
    for _ in range(num_tokens):
        _uniform(generator)


def _uniform(generator: torch.Generator) -> Tensor:
    return torch.rand(1, dtype=torch.float64, generator=generator)


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
