"""Draws: the next token of each sequence of a step. Knows rows of logits and whose they are; no cache, no text.

A family is a sequence whose logits were computed, and the samples that are forked from it after this step: all of them
draw from the same row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pagedkv.model.sampling.sampler import BadLogits, SamplingRow, sample

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.model.loop.gangs import Turn
    from pagedkv.model.loop.sequence import SequenceState


class Found(NamedTuple):
    """The result of a step's logits.

    families: empty for a member of a gang. tokens: of the members of all families, in order.
    more:     the tokens behind these that drafts gave. turns: of beam searches.
    """

    families: list[list[SequenceState]]
    tokens: list[int]
    more: dict[SequenceState, list[int]]
    turns: list[Turn]


def _rows_of(logits: Tensor, numbers: list[int]) -> Tensor:
    """Return rows of the logits; the logits themselves if that is all of them, in order."""
    if numbers == list(range(len(logits))):
        return logits
    return logits[torch.tensor(numbers, device=logits.device)]


def draw(families: list[list[SequenceState]], logits: Tensor, *, is_guess: bool = False) -> list[int]:
    """Draw the next token of each member of each family, in this order. Row n of the logits is that of family n.

    A member whose logits are no numbers ends, and gets -1.
    is_guess: whether the logits follow a draft: then such a member gets -1 and does not end
    """
    members = [(member, n) for n, family in enumerate(families) for member in family]
    tokens = [-1] * len(members)
    drawing = list(range(len(members)))
    while drawing:
        rows = [_sampling_row(members[i][0]) for i in drawing]
        try:
            drawn = sample(_rows_of(logits, [members[i][1] for i in drawing]), rows)
        except BadLogits as error:
            for row in error.rows if not is_guess else ():
                members[drawing[row]][0].completion.end("error", str(error))
            drawing = [i for row, i in enumerate(drawing) if row not in error.rows]
            continue
        for i, token in zip(drawing, drawn.tolist(), strict=True):
            members[i][0].num_drawn += 1
            tokens[i] = token
        break
    return tokens


def _sampling_row(member: SequenceState) -> SamplingRow:
    # An interrupted step lost a token that was already drawn: draw the same one again, as the seed demands.
    if member.num_drawn != member.num_output:
        member.rewind()
    return SamplingRow(member.completion.request.params, member.generator, member.tokens)
