"""A draft model: a smaller model with the same vocabulary guesses the next tokens. It has a paged cache of its own.

    sequence      x x x x x x │           6 tokens are known
    shadow        x x x x a b │           its tokens after the step before: a came true, b did not
    cut           x x x x x   │           truncate the space to the tokens that are right and computed
    catch up            x x x ─▶ d1       one pass over the tokens that it lacks
    go on                  d1 ─▶ d2 ─▶ .. a pass for each further draft, over all sequences at once

A shadow is a sequence like any other: tokens, a generator and an address space, here in the draft's cache. It draws
with the same random numbers as its sequence will (a copy of its generator): where both models agree about the likely
tokens, the same number gives both the same token.

The cache of the draft model is worth nothing but time. A shadow that does not fit gives its frames back and drafts
nothing; so does one whose prompt is longer than one pass may be, until the passes of some steps have computed it. After
an interrupt all shadows begin anew.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from pagedkv.core.arguments import whole
from pagedkv.engine.model.decoder import Decoder
from pagedkv.engine.model.pool import new_cache
from pagedkv.engine.model.runner import ModelRunner
from pagedkv.engine.requests.draws import draw
from pagedkv.engine.requests.sequence import Chunk, SequenceState
from pagedkv.errors import InvalidRequest, OutOfFrames

if TYPE_CHECKING:
    from pagedkv.cache import PagedKVCache, PlannedBatch

MOST_IN_A_PASS: Final = 2048
"""New tokens in a pass of the draft model: a longer prompt takes several steps."""

_Pair = tuple[SequenceState, SequenceState]
"""A sequence and its shadow."""


class DraftModel:
    """A drafter that decodes with a model of its own.

    num_tokens: drafts in a step
    """

    def __init__(self, decoder: Decoder, cache: PagedKVCache, *, num_tokens: int = 4) -> None:
        """decoder, cache: the draft model, and a cache made by its config.

        Raises: InvalidRequest if the cache gives back frames behind a window that wrong drafts may have crossed, or the
            model has recurrent states: each wrong draft would take it back to the last one that was kept
        """
        if decoder.config.linear is not None:
            raise InvalidRequest(
                "the draft model has recurrent states, which wrong drafts would spoil; give one of attention alone, or "
                "speculate='prompt-lookup'"
            )
        self.num_tokens: int = whole(num_tokens, "DraftModel.num_tokens", 1)
        for spec in cache.specs:
            if spec.window is not None and spec.keep < num_tokens:
                raise InvalidRequest(
                    f"the cache of the draft model keeps {spec.keep} tokens behind a window of {spec.window}, and "
                    f"{num_tokens} drafts may be wrong; give KVSpec(keep={num_tokens}), or a spec without a window"
                )
        self.vocab_size: int | None = decoder.config.vocab_size
        self.decoder: Decoder = decoder
        self.cache: PagedKVCache = cache
        self._forward = ModelRunner(decoder, cache)
        self._shadows: dict[SequenceState, SequenceState] = {}
        self._was_interrupted = False

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        num_tokens: int = 4,
        dtype: str | None = None,
        weights: str | None = None,
        device: str = "cpu",
        block_size: int = 16,
        **cache_options: Any,
    ) -> DraftModel:
        """Load the draft model from a Hugging Face folder.

        dtype, weights, device, block_size, cache_options: as those of Engine.load
        Raises: CheckpointError, InvalidRequest, KernelUnavailable
        """
        decoder = Decoder.load(Path(folder), dtype=dtype, device=device, weights=weights)
        # Without groups no frame behind a window is given back, so that wrong drafts can be cut off.
        cache = new_cache(decoder, block_size=block_size, grouped=False, **cache_options)
        return cls(decoder, cache, num_tokens=num_tokens)

    def propose(self, sequences: list[SequenceState], most: list[int]) -> list[list[int]]:
        """Return at most `most[i]` drafts for each sequence."""
        self.cache.hand_over()
        if self._was_interrupted:  # a traceback may have kept handles alive until now
            self.cache.recover()
            self._was_interrupted = self.cache.has_plans or self.cache.stats().spaces != len(self._shadows)
        longest = self.decoder.config.max_position_embeddings  # the draft model may end before the other one does
        ends = {s: min(len(s.tokens) + count, longest) for s, count in zip(sequences, most, strict=True)}
        for s in sequences:
            if len(s.tokens) >= longest:  # it will have no more drafts
                self.forget(s)
        drafting = [(s, self._shadow(s)) for s in sequences if len(s.tokens) < longest]
        while drafting:
            drafting = [(s, shadow) for s, shadow in self._advance(drafting) if len(shadow.tokens) < ends[s]]
        return [self._shadows[s].tokens[len(s.tokens) :] if s in self._shadows else [] for s in sequences]

    def _shadow(self, sequence: SequenceState) -> SequenceState:
        """Return the shadow of `sequence` with its tokens, and with the KV of the drafts that came true."""
        shadow, length = self._shadows.get(sequence), len(sequence.tokens)
        if shadow is None:
            tokens, generator, request = list(sequence.tokens), torch.Generator(), sequence.completion.request
            space = self.cache.open(tokens, tenant=request.tenant, salt=request.salt)
            rules = sequence.rules and sequence.rules.fork(tokens)
            shadow = replace(sequence, tokens=tokens, generator=generator, rules=rules, space=space)
            self._shadows[sequence] = shadow
        else:
            assert shadow.space is not None
            first = max(0, min(len(shadow.tokens), length) - self.num_tokens)  # all before it came from the sequence
            computed = min(len(shadow.space), length - 1)  # the last token is computed for its logits
            wrong = (i for i in range(first, computed) if shadow.tokens[i] != sequence.tokens[i])
            shadow.space.truncate(next(wrong, computed))
            shadow.tokens[first:] = sequence.tokens[first:]
            if shadow.rules is not None:
                shadow.rules.truncate(first)
        if not sequence.completion.request.params.greedy:
            if sequence.num_drawn != sequence.num_output:
                sequence.rewind()
            shadow.generator.set_state(sequence.generator.get_state())
        shadow.num_drawn = sequence.num_output
        return shadow

    def _advance(self, drafting: list[_Pair]) -> list[_Pair]:
        """Compute the tokens that the shadows lack, and draw the next one of each. Returns: those that got one."""
        budget, chunks = MOST_IN_A_PASS, list[Chunk]()
        for _, shadow in drafting:
            if budget:
                chunks.append(Chunk(shadow, min(shadow.remaining, budget), shadow.remaining))
                budget -= chunks[-1].num_tokens
        batch = None
        while chunks and batch is None:
            spaces = [chunk.sequence.space for chunk in chunks if chunk.sequence.space is not None]
            try:
                batch = self.cache.plan(spaces, [chunk.num_tokens for chunk in chunks])
            except OutOfFrames:
                self.forget(drafting[len(chunks) - 1][0])
                chunks.pop()
        if batch is None:
            return []
        tokens = self._compute(chunks, batch)
        for chunk, token in zip(chunks, tokens, strict=True):
            if token >= 0:
                chunk.sequence.tokens.append(token)
        return [pair for pair, token in zip(drafting, tokens, strict=False) if token >= 0]

    def _compute(self, chunks: list[Chunk], batch: PlannedBatch) -> list[int]:
        """Run the model over the batch, commit it, and draw a token for each chunk: -1 for one that is not the last."""
        ids = [token for chunk in chunks for token in chunk.token_ids]
        last = [i for i, chunk in enumerate(chunks) if chunk.is_last]
        rows = (batch.plan.cu_seqlens_q[1:][last] - 1).tolist()
        try:
            logits = self._forward(ids, batch, rows)
            self.cache.commit(batch, ids)
        except BaseException:
            if not batch.plan.settled:
                self.cache.abort(batch)
            raise
        tokens = [-1] * len(chunks)
        for i, drawn in zip(last, draw([[chunks[i].sequence] for i in last], logits, is_guess=True), strict=True):
            tokens[i] = drawn.token
        return tokens

    def forget(self, sequence: SequenceState) -> None:
        """Give back the frames of the shadow of `sequence`."""
        shadow = self._shadows.get(sequence)
        if shadow is not None and shadow.space is not None:
            self.cache.hand_over()
            shadow.space.release()
            del self._shadows[sequence]

    def recover(self) -> None:
        """Give back all frames."""
        self._was_interrupted = True
        self.cache.hand_over()
        for shadow in self._shadows.values():
            if shadow.space is not None and not shadow.space.is_stale:
                shadow.space.release()
        self._shadows.clear()
        self.cache.recover()
