"""Gangs: the sequences of a beam search. They share frames, and take their next token in the same step.

    waiting          running
    trunk ──admit──▶ trunk ─fork─▶ beam beam beam ─reorder─▶ beam beam beam ─▶ .. ─▶ done
      ▲                              each lacks its own       all lack one token:
      └───────── preempt ────────    tokens: they catch up    one step for all
                                     and wait for the last

A trunk is one sequence with the prompt and the tokens that all live beams have in common: at the start, and again after
a preemption or an interrupt. A gang is preempted as a whole, so it never holds frames while it cannot go on.

This file knows sequences and the state of a search (ways/beams.py); it must not know log-probabilities or queues.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.core import AddressSpace
    from pagedkv.model.loop.sequence import Chunk, SequenceState
    from pagedkv.model.request import Request
    from pagedkv.model.ways.beams import Beams


class Turn(NamedTuple):
    """The members of a gang, in the order of its live beams, and the state to which they go on.

    parents: the member that each new live beam continues
    """

    members: list[SequenceState]
    state: Beams
    parents: list[int]


def make_trunk(sequence: SequenceState) -> SequenceState:
    """Give `sequence` the tokens of the trunk of its search, and return it."""
    request = sequence.completion.request
    assert request.search is not None
    sequence.tokens[:] = [*request.prompt_ids, *request.search.common]
    return sequence


def most_tokens(running: list[tuple[SequenceState, int]]) -> dict[SequenceState, int]:
    """Return the most tokens that each member of a gang may compute: its last one when all others are there, too.

    running: all running sequences, and how many tokens each lacks
    """
    gangs: dict[Request, list[tuple[SequenceState, int]]] = {}
    for sequence, remaining in running:
        if sequence.completion.request.search is not None:
            gangs.setdefault(sequence.completion.request, []).append((sequence, remaining))
    most: dict[SequenceState, int] = {}
    for gang in gangs.values():
        held = len(gang) > 1 and any(remaining > 1 for _, remaining in gang)
        most |= {sequence: remaining - held for sequence, remaining in gang}
    return most


def whole_gangs(chunks: list[Chunk], most: dict[SequenceState, int]) -> list[Chunk]:
    """Drop the chunks of a gang that would draw a token while a member is missing from the step.

    most: the result of `most_tokens`
    """
    taking = {chunk.sequence for chunk in chunks if chunk.sequence in most and chunk.is_last}
    lacking = {s.completion.request for s in most if s not in taking}
    return [
        chunk for chunk in chunks if not (chunk.sequence in taking and chunk.sequence.completion.request in lacking)
    ]


def turns(chunks: list[Chunk], logits: Tensor) -> list[Turn]:
    """Return one turn for each gang whose members all computed their last token.

    A gang with NaN logits gets no turn: its search ends with an error.
    Shapes: logits float32 [N, V]: row n is that of the n-th chunk that is its sequence's last
    """
    gangs: dict[Request, tuple[list[SequenceState], list[int]]] = {}
    for row, chunk in enumerate(chunk for chunk in chunks if chunk.is_last):
        if chunk.sequence.completion.request.search is not None:
            members, rows = gangs.setdefault(chunk.sequence.completion.request, ([], []))
            members.append(chunk.sequence)
            rows.append(row)
    found: list[Turn] = []
    for request, (members, rows) in gangs.items():
        search, mine = request.search, logits[rows]
        assert search is not None
        if len(members) < len(search.state.live):
            found.append(Turn(members, search.state, [0] * len(search.state.live)))  # the trunk branches
        elif mine.amax(-1).isfinite().all():
            state = search.advance(mine)
            found.append(Turn(members, state, [beam.parent for beam in state.live]))
        else:
            request.fail("the logits of a beam hold NaN, +inf or only -inf")
    return found


def members_of(turn: Turn, spaces: list[AddressSpace]) -> list[SequenceState]:
    """Return the sequences of the live beams of a turn. spaces: the spaces of the old members, reordered."""
    first = turn.members[0]
    prompt = first.completion.request.prompt_ids
    return [
        replace(first, tokens=[*prompt, *beam.tokens], space=space)
        for beam, space in zip(turn.state.live, spaces, strict=True)
    ]
