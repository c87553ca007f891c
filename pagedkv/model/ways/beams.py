"""Beam search: keep the `num_beams` likeliest outputs of each length, not only the one of the likeliest tokens.

    live      a  b  c                 num_beams outputs of n tokens, and the sum of the log-probabilities of each
    extend    a0 a1 .. b0 b1 .. c0    each by each token of the vocabulary
    best      b7  a2  a5  c1  ..      sorted; more than num_beams, so that enough of them go on
    live      b7  a5  c1              the best that go on: a2 ended
    ended     a2                      an end token, or max_tokens; at most num_beams, by sum / length ** length_penalty

(This is the search of transformers' generate, and gives its outputs token for token.) It is done when no live output
can become better than the ended ones: see `_is_done`.

The memory: a live output is a page table. b7, a5 and c1 go on with the page tables of b, a and c by
`PagedKVCache.reorder([a, b, c], [1, 0, 2])`. It forks a table that is named twice and releases one that is not named.
So beams share the frames of the prompt and of all tokens that they have in common, and no key or value moves.

This file knows log-probabilities; pages, sequences and steps are in loop/gangs.py. `Search.state` is the truth about a
search: an immutable value that one assignment replaces. After an interrupt all else is made from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from pagedkv.sampling.params import SamplingParams


class Beam(NamedTuple):
    """An output.

    score:  a live beam's sum of log-probabilities; an ended beam's sum divided by length ** length_penalty
    parent: the live beam of the step before that it continues
    """

    tokens: tuple[int, ...]
    score: float
    parent: int = 0


class Beams(NamedTuple):
    """The state of a search: live and ended beams, the best first."""

    live: tuple[Beam, ...] = (Beam((), 0.0),)
    ended: tuple[Beam, ...] = ()
    is_done: bool = False


class Search:
    """A search, and the rules by which it goes on.

    ends: tokens that end an output. max_tokens: the most tokens of an output.
    early_stopping: see SamplingParams.
    """

    def __init__(
        self,
        num_beams: int,
        *,
        ends: frozenset[int],
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
    ) -> None:
        self.num_beams: int = num_beams
        self.state: Beams = Beams()
        self.ends: frozenset[int] = ends
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping

    @classmethod
    def of(cls, params: SamplingParams, eos_ids: Iterable[int], max_tokens: int) -> Search:
        """Return the search that `params` ask for. max_tokens: the most output tokens."""
        ends = frozenset((*params.stop_ids, *(() if params.ignore_eos else eos_ids)))
        return cls(
            params.num_beams,
            ends=ends,
            max_tokens=max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )

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
            Beam((*state.live[place // vocabulary].tokens, place % vocabulary), score, place // vocabulary)
            for score, place in zip(found.values.tolist(), found.indices.tolist(), strict=True)
        ]
        penalised = (found.values / length**self._length_penalty).tolist()
        is_last = length >= self._max_tokens
        live = [beam for beam in best if not (is_last or beam.tokens[-1] in self.ends)]
        ended = [
            beam._replace(score=score)
            for beam, score in zip(best[: self.num_beams], penalised, strict=False)
            if is_last or beam.tokens[-1] in self.ends
        ]
        if self._early_stopping is True and len(state.ended) == self.num_beams:
            ended = []
        kept = sorted((*state.ended, *ended), key=lambda beam: -beam.score)[: self.num_beams]
        live = live[: self.num_beams]
        return Beams(tuple(live), tuple(kept), is_last or self._is_done(live[0], kept))

    def _is_done(self, best: Beam, ended: list[Beam]) -> bool:
        """Return whether the search ends: the best live beam, as good as it may become, is no better than all ended.

        A log-probability is negative, so a sum only falls; but the mean of more tokens may rise. With early_stopping
        "never" the mean is taken over as many tokens as an output may have, otherwise over those of now.
        """
        if len(ended) < self.num_beams:
            return False
        longest = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if longest else len(best.tokens)
        hoped = torch.tensor(best.score) / length**self._length_penalty
        return self._early_stopping is True or bool(hoped <= min(beam.score for beam in ended))
