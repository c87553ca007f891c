"""Beam search: keep the `num_beams` likeliest outputs of each length, not only the one of the likeliest tokens.

    live      a  b  c                 num_beams outputs of n tokens, and the sum of the log-probabilities of each
    extend    a0 a1 .. b0 b1 .. c0    each by each token of the vocabulary
    best      b7  a2  a5  c1  ..      sorted; more than num_beams, so that enough of them go on
    live      b7  a5  c1              the best that go on: a2 ended
    ended     a2                      an end token, or max_tokens; at most num_beams, by sum / length ** length_penalty

(This is the search of transformers' generate, and gives its outputs token for token.) It is done when no live output
can become better than the ended ones: see `_is_done`.

A live output is a page table. b7, a5 and c1 go on with the tables of b, a and c by `reorder([a, b, c], [1, 0, 2])` of
the cache (`reorder_spaces` in core/tables/page_tables.py), so beams share the frames of all tokens that they have in
common. The sequences of a search are its gang:

    waiting          running
    trunk ──admit──▶ trunk ─fork─▶ beam beam beam ─reorder─▶ beam beam beam ─▶ .. ─▶ done
      ▲                              each lacks its own       all lack one token:
      └───────── preempt ────────    tokens: they catch up    one step for all
                                     and wait for the last

A trunk is one sequence with the prompt and the tokens that all live beams have in common: at the start, and again after
a preemption or an interrupt. A gang is preempted as a whole, so it never holds frames while it cannot go on.
`BeamSearch.state` is the truth about a search, an immutable value that one assignment replaces. Knows no queue.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from pagedkv.core import AddressSpace
    from pagedkv.engine.requests.request import Request
    from pagedkv.engine.requests.sequence import Chunk, SequenceState
    from pagedkv.engine.sampling.params import SamplingParams


class _Beam(NamedTuple):
    """An output.

    score:  a live beam's sum of log-probabilities; an ended beam's sum divided by length ** length_penalty
    parent: the live beam of the step before that it continues
    """

    tokens: tuple[int, ...]
    score: float
    parent: int = 0


class Beams(NamedTuple):
    """The state of a search: live and ended beams, the best first."""

    live: tuple[_Beam, ...] = (_Beam((), 0.0),)
    ended: tuple[_Beam, ...] = ()
    is_done: bool = False


class BeamSearch:
    """The search that `params` ask for, and the rules by which it goes on.

    ends: tokens that end an output: the stop ids, and `eos_ids`. max_tokens: the most tokens of an output.
    """

    def __init__(self, params: SamplingParams, eos_ids: Iterable[int], max_tokens: int) -> None:
        self.num_beams: int = params.num_beams
        self.state: Beams = Beams()
        self.ends: frozenset[int] = frozenset((*params.stop_ids, *(() if params.ignore_eos else eos_ids)))
        self._params, self._max_tokens = params, max_tokens

    @property
    def common(self) -> tuple[int, ...]:
        """The tokens that all live beams begin with."""
        columns = zip(*(beam.tokens for beam in self.state.live), strict=True)
        shared = 0
        for column in columns:
            if len(set(column)) > 1:
                break
            shared += 1
        return self.state.live[0].tokens[:shared]

    def advance(self, logits: Tensor) -> Beams:
        """Return the state after one more token. `state` stays as it is.

        Shapes: logits float32 [live beams, V], all finite or -inf
        """
        state, vocabulary = self.state, logits.shape[1]
        length = len(state.live[0].tokens) + 1
        sums = logits.log_softmax(-1) + logits.new_tensor([beam.score for beam in state.live])[:, None]
        # Each end token can end every beam once, so keep enough candidates that num_beams beams continue.
        most = min(max(2, 1 + len(self.ends)) * self.num_beams, sums.numel())
        found = sums.flatten().topk(most)
        best = [
            _Beam((*state.live[place // vocabulary].tokens, place % vocabulary), score, place // vocabulary)
            for score, place in zip(found.values.tolist(), found.indices.tolist(), strict=True)
        ]
        penalised = (found.values / length**self._params.length_penalty).tolist()
        is_last = length >= self._max_tokens
        live = [beam for beam in best if not (is_last or beam.tokens[-1] in self.ends)]
        ended = [
            beam._replace(score=score)
            for beam, score in zip(best[: self.num_beams], penalised, strict=False)
            if is_last or beam.tokens[-1] in self.ends
        ]
        if self._params.early_stopping is True and len(state.ended) == self.num_beams:
            ended = []
        kept = sorted((*state.ended, *ended), key=lambda beam: -beam.score)[: self.num_beams]
        live = live[: self.num_beams]
        return Beams(tuple(live), tuple(kept), is_last or self._is_done(live[0], kept))

    def _is_done(self, best: _Beam, ended: list[_Beam]) -> bool:
        """Return whether the search ends: the best live beam, as good as it may become, is no better than all ended.

        A log-probability is negative, so a sum only falls; but the mean of more tokens may rise. With early_stopping
        "never" the mean is taken over as many tokens as an output may have, otherwise over those of now.
        """
        if len(ended) < self.num_beams:
            return False
        penalty, stopping = self._params.length_penalty, self._params.early_stopping
        length = self._max_tokens if stopping == "never" and penalty > 0 else len(best.tokens)
        hoped = torch.tensor(best.score) / length**penalty
        return stopping is True or bool(hoped <= min(beam.score for beam in ended))


def search_of(request: Request) -> BeamSearch | None:
    """Return the search of a request; None without beams."""
    return request.search if isinstance(request.search, BeamSearch) else None


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
        search, mine = search_of(request), logits[rows]
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
