"""Speculative decoding: compute guesses of the next tokens with the last token, and keep those that come true.

    tokens       .. x0 │ d1  d2  d3     x0: the last token, whose KV is not computed yet; d: drafts of a drafter
    one pass         r0  r1  r2  r3     the logits after each
    draw             t0  t1  t2         from r0; if t0 = d1 from r1; if t1 = d2 from r2; ..; here t2 is not d3
    commit       .. x0   d1  d2 │       counts = 3: the KV of d3 is rolled back, with the frames that held nothing else
    deliver          t0  t1  t2         so a pass gives 1 to 1 + k tokens

Each token is drawn as the plain way draws it: from the logits after the tokens before it, with the next number of the
request's own generator. A draft only decides whether these logits are there already. So the output is that of the plain
way, token for token, for greedy requests and for any seed.

Rejection sampling (Leviathan et al., 2023) keeps the distribution but not the tokens: a seed would give other text with
drafts than without. It would accept a draft of a drafter that draws by chance more often, and a certain one as often.

A draft is no promise: it takes only frames that are there (the scheduler drops drafts before it preempts), at most as
many tokens as the request may still have, and it is forgotten by an interrupt. A sequence without drafts is decoded in
the plain way beside the others. The cost of a step: k + 1 instead of 1 token and row of logits for each sequence.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch

from pagedkv.engine.requests.draws import Drawn, draw
from pagedkv.errors import InvalidRequest, described

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pagedkv.engine.checkpoint.config import ModelConfig
    from pagedkv.engine.requests.sequence import Chunk, SequenceState


class Drafter(Protocol):
    """A source of drafts. Its state is about sequences that run; it can be lost at any time.

    If `propose` raises or returns bad drafts, the engine calls `recover`, then `propose` for each sequence alone. The
    request of a sequence for which that fails ends with an error. A KeyboardInterrupt or a SystemExit breaks the step
    off and ends no request. `forget` and `recover` must not raise.

    num_tokens: the most drafts of a sequence in a step
    vocab_size: drafts are below it; None if they are copied from the text
    """

    num_tokens: int
    vocab_size: int | None

    def propose(self, sequences: list[SequenceState], most: list[int]) -> Sequence[Sequence[int]]:
        """Return at most `most[i]` drafts of the tokens that follow each sequence; none where nothing is known."""

    def forget(self, sequence: SequenceState) -> None:
        """Give back what is kept about a sequence that stops to run."""

    def recover(self) -> None:
        """Give back what is kept about all sequences, after an interrupt at any instruction."""


class Speculation:
    """The drafts of a step: chosen before it is planned, verified after its logits are there.

    drafter:    the source of the drafts
    num_passes: draws from computed logits: one for each sequence and step that gave it a token
    num_drafts, num_accepted: drafts computed, and those that came true; none behind the end of an output came true
    num_gained: tokens that sequences got behind such drafts, beyond the one of each pass
    most_decoding: the most tokens that a sequence which decodes lacks. With recurrent states, drafts that came true
        before a wrong one are computed again: the state behind them was not saved. See `certain` of PagedKVCache.plan
    """

    def __init__(self, drafter: Drafter, config: ModelConfig) -> None:
        """config: that of the model that verifies. Raises: InvalidRequest if the drafter has another vocabulary"""
        if drafter.vocab_size not in (None, config.vocab_size):
            raise InvalidRequest(
                f"the draft model has {drafter.vocab_size} tokens in its vocabulary, the model has "
                f"{config.vocab_size}; drafts are token ids, so give a draft model with the same tokenizer"
            )
        self.drafter: Drafter = drafter
        self.num_passes: int = 0
        self.num_drafts: int = 0
        self.num_accepted: int = 0
        self.num_gained: int = 0
        self._max_tokens, self._vocab_size = config.max_position_embeddings, config.vocab_size
        self.most_decoding: int = 1 + (drafter.num_tokens if config.linear else 0)

    @property
    def acceptance(self) -> float:
        """Share of the drafts that came true: 0.0 to 1.0."""
        return self.num_accepted / self.num_drafts if self.num_drafts else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a pass gave to a sequence, in the mean: 1.0 without any accepted draft."""
        return 1 + self.num_gained / self.num_passes if self.num_passes else 1.0

    def extend(self, chunks: list[Chunk], budget: int) -> list[Chunk]:
        """Return the chunks of a step with drafts behind those of decoding sequences, `budget` tokens in all.

        A request ends with an error if the drafter fails for it.
        """
        budget -= sum(chunk.num_tokens for chunk in chunks)
        places: list[int] = []
        most: list[int] = []
        for place, chunk in enumerate(chunks):
            is_search = chunk.sequence.completion.request.search is not None
            is_decoding = chunk.remaining <= self.most_decoding and chunk.is_last
            if is_decoding and chunk.sequence.num_output and not is_search:
                allowed = min(budget, self.drafter.num_tokens, self._useful(chunk.sequence))
                if allowed > 0:
                    places.append(place)
                    most.append(allowed)
                    budget -= allowed
        if places:
            drafts = self._proposed([chunks[place].sequence for place in places], most)
            for place, drafted in zip(places, drafts, strict=True):
                chunks[place] = chunks[place].with_drafts(drafted)
        return chunks

    def _proposed(self, sequences: list[SequenceState], most: list[int]) -> list[Sequence[int]]:
        """Return the drafts of each sequence; none for one whose request ends because the drafter fails for it."""
        try:
            drafts = list(self.drafter.propose(sequences, most))
            for drafted, count in zip(drafts, most, strict=True):
                self._check(drafted, count)
            return drafts
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            failure = described(error)
        self.drafter.recover()
        if len(sequences) == 1:
            sequences[0].completion.request.fail(f"the drafter failed: {failure}")
            return [()]
        return [
            () if sequence.completion.finish_reason else self._proposed([sequence], [count])[0]
            for sequence, count in zip(sequences, most, strict=True)
        ]

    def _check(self, drafted: Sequence[int], most: int) -> None:
        """Raise InvalidRequest if the model cannot compute the drafts of a sequence."""
        if len(drafted) > most:
            raise InvalidRequest(f"propose returned {len(drafted)} drafts for a sequence that may have {most}")
        if len(drafted) and not 0 <= min(drafted) <= max(drafted) < self._vocab_size:
            raise InvalidRequest(f"propose returned {drafted!r}; drafts must be from 0 to {self._vocab_size - 1}")

    def _useful(self, sequence: SequenceState) -> int:
        """Count the tokens that a sequence may have behind the one that its next pass gives in any case."""
        request = sequence.completion.request
        return min(len(request.prompt_ids) + request.params.max_tokens, self._max_tokens) - len(sequence.tokens) - 1

    @staticmethod
    def rows(ends: list[int], chunks: list[Chunk]) -> list[int]:
        """Return the tokens of the batch whose logits are needed: the last own token of each chunk and its drafts.

        ends: the end of each chunk in the batch
        """
        return [
            row
            for end, chunk in zip(ends, chunks, strict=True)
            if chunk.is_last
            for row in range(end - 1 - len(chunk.drafts), end)
        ]

    @staticmethod
    def own_rows(chunks: list[Chunk]) -> list[int]:
        """Return the rows of the logits that follow the last own token of each chunk that is its sequence's last."""
        return list(accumulate((1 + len(chunk.drafts) for chunk in chunks if chunk.is_last), initial=0))[:-1]

    def verify(
        self, chunks: list[Chunk], families: list[list[SequenceState]], drawn: list[Drawn], logits: Tensor
    ) -> dict[SequenceState, list[Drawn]]:
        """Return the tokens that each sequence gets behind its drafts that came true: one for each, in order.

        drawn: for `families`, from the own rows
        Shapes: logits float32 [N, V], those of `rows`
        """
        last = [chunk for chunk in chunks if chunk.is_last]
        parents = accumulate(map(len, families), initial=0)  # the place of each parent's token
        more: dict[SequenceState, list[Drawn]] = {chunk.sequence: [] for chunk in last if chunk.drafts}
        alive = [  # chunks with a draft that came true, and the row of their first draft
            (chunk, begin + 1)
            for chunk, begin, parent in zip(last, self.own_rows(chunks), parents, strict=False)
            if chunk.drafts and chunk.drafts[0] == drawn[parent].token
        ]
        self.num_drafts += sum(len(chunk.drafts) for chunk in last)
        self.num_passes += sum(map(bool, families))  # that of a beam is empty
        lengths = [(chunk.sequence.tokens, len(chunk.sequence.tokens)) for chunk, *_ in alive]
        try:
            while alive:
                alive = self._round(alive, more, logits)
        finally:  # `deliver` appends them for good
            for ids, length in lengths:
                del ids[length:]
        return more

    def count(self, num_guesses: int, num_taken: int) -> None:
        """Count the drafts of a chunk. num_guesses: those that came true. num_taken: tokens taken that followed them.

        If fewer are taken, the output has ended with a draft, and those behind it are worth nothing.
        """
        self.num_accepted += min(num_guesses, num_taken + 1)
        self.num_gained += num_taken

    @staticmethod
    def _round(
        alive: list[tuple[Chunk, int]], more: dict[SequenceState, list[Drawn]], logits: Tensor
    ) -> list[tuple[Chunk, int]]:
        """Append the draft that came true to each sequence, draw the token behind it, and return who goes on.

        alive: chunks, and the row of the logits behind the draft
        """
        for chunk, _ in alive:
            chunk.sequence.tokens.append(chunk.drafts[len(more[chunk.sequence])])
        after = logits[torch.tensor([row for _, row in alive], device=logits.device)]
        drawn = draw([[chunk.sequence] for chunk, _ in alive], after, is_guess=True)
        going: list[tuple[Chunk, int]] = []
        for (chunk, row), one in zip(alive, drawn, strict=True):
            if one.token >= 0:
                more[chunk.sequence].append(one)
                if chunk.drafts[len(more[chunk.sequence]) :][:1] == (one.token,):
                    going.append((chunk, row + 1))
        return going
