"""Draws: the next token of each sequence of a step.
This file knows rows of logits and the sequence of each row; it must not know the cache or text.

A family is a sequence whose logits were computed, and the samples that are forked from it after this step: all of them
draw from the same row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pagedkv.engine.sampling.sampler import SamplingRow, TokenLogprobs, sample

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.engine.requests.sequence import SequenceState


class Drawn(NamedTuple):
    """A token, -1 if there is none, and its log-probabilities if the request asked for them."""

    token: int
    logprobs: TokenLogprobs | None = None


def _rows_of(logits: Tensor, numbers: list[int]) -> Tensor:
    """Return rows of the logits; the logits themselves if that is all of them, in order."""
    if numbers == list(range(len(logits))):
        return logits
    return logits[torch.tensor(numbers, device=logits.device)]


def draw(families: list[list[SequenceState]], logits: Tensor, *, is_guess: bool = False) -> list[Drawn]:
    """Draw the next token of each member of each family, in this order. Row n of the logits is that of family n.

    A member that cannot have a token ends, and gets the token -1.
    is_guess: whether the logits follow a draft: then such a member gets -1 and does not end
    """
    members = [(member, n) for n, family in enumerate(families) for member in family]
    if not members:
        return []
    rows = [_sampling_row(member) for member, _ in members]
    tokens, errors, logprobs = sample(_rows_of(logits, [n for _, n in members]), rows)
    for row, (member, _) in enumerate(members):
        if row not in errors:
            member.num_drawn += 1
        elif not is_guess:
            member.completion.end("error", errors[row])
    return [Drawn(token, logprobs.get(row)) for row, token in enumerate(tokens.tolist())]


def _sampling_row(member: SequenceState) -> SamplingRow:
    # An interrupted step lost a token that was already drawn: draw the same one again, as the seed demands.
    if member.num_drawn != member.num_output:
        member.rewind()
    return SamplingRow(member.completion.request.params, member.generator, member.rules)
