"""A sequence and its chunks: one completion while it is computed. Knows tokens and an address space; no queue.

tokens    prompt │ output ...................... │ drafts
          computed: space.ready  │ remaining     │ guesses: computed with the rest, kept as far as they come true
                                 └──── chunk ────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pagedkv.engine.sampling.sampler import skip

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pagedkv.core import AddressSpace
    from pagedkv.engine.checkpoint.tokenizer import TextStream
    from pagedkv.engine.requests.request import Completion, StopStrings
    from pagedkv.engine.sampling.logits import LogitsRules
    from pagedkv.tiers.fetch import Fetch


@dataclass(eq=False)
class SequenceState:
    """One completion while it is computed: its tokens, and the address space with the KV of those already computed.

    tokens:    prompt and output so far
    rules:     the rules that edit this sequence's logits, or None
    space:     None while the sequence waits
    fetch:     the pages that come up from tiers below the pool while it waits; None if they were not asked for
    awaited:   while it waits, the running sequence that computes its next pages, and the length that it then finds
    num_drawn: the number of tokens drawn from `generator` so far
    """

    completion: Completion
    tokens: list[int]
    generator: torch.Generator
    stream: TextStream
    stops: StopStrings
    rules: LogitsRules | None = None
    space: AddressSpace | None = None
    fetch: Fetch | None = None
    awaited: tuple[SequenceState, int] | None = None
    num_drawn: int = 0

    def rewind(self) -> None:
        """Restart the generator and skip the draws of the output so far."""
        self.generator = self.completion.generator()
        self.num_drawn = self.num_output
        skip(self.generator, self.num_drawn)

    @property
    def num_output(self) -> int:
        """The number of tokens behind the prompt."""
        return len(self.tokens) - len(self.completion.request.prompt_ids)

    @property
    def remaining(self) -> int:
        """The number of tokens still to compute. The logits of the last one give the next token.

        With recurrent states, these are the tokens behind the last state. The KV of some of them may be there.
        """
        return len(self.tokens) - (self.space.ready if self.space is not None else 0)

    @property
    def most_known(self) -> int | None:
        """The most tokens that may be taken from the prefix cache; None for all that it has.

        The log-probability of a token of the prompt needs the logits of the token before it: that one is computed.
        """
        request = self.completion.request
        return None if request.is_scored else len(request.prompt_logprobs) - 1

    @property
    def receivers(self) -> list[Completion]:
        """The completions whose next token is drawn from this sequence's logits.

        The first sample of a request computes the prompt for all samples, so its first logits serve all that have no
        token yet. Otherwise a sequence serves its own completion only.
        """
        request = self.completion.request
        if request.search is not None or self.completion.index or self.completion.token_ids:
            return [self.completion]
        return [c for c in request.completions if not c.token_ids and not c.finish_reason]

    @property
    def num_receivers(self) -> int:
        """The number of sequences that go on from this sequence's logits."""
        search = self.completion.request.search
        return search.num_beams if search is not None and self.is_trunk else len(self.receivers)

    @property
    def is_trunk(self) -> bool:
        """Whether it stands for all live beams of a search."""
        search = self.completion.request.search
        return search is not None and self.num_output == len(search.common)


class Chunk(NamedTuple):
    """The part of one sequence that a step computes: the first of its remaining tokens, and drafts behind the last one.

    num_tokens: tokens to compute, drafts included
    remaining:  `sequence.remaining` when the chunk was chosen; a commit changes the sequence's own
    drafts:     guesses of the next tokens; given to a chunk that is the last only
    """

    sequence: SequenceState
    num_tokens: int
    remaining: int
    drafts: tuple[int, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the chunk."""
        first = len(self.sequence.tokens) - self.remaining
        own = self.sequence.tokens[first : first + self.num_tokens]
        return [*own, *self.drafts] if self.drafts else own

    @property
    def is_last(self) -> bool:
        """Whether the chunk holds the sequence's last token, so that its logits give the next token."""
        return self.num_tokens >= self.remaining

    def with_drafts(self, drafts: Sequence[int]) -> Chunk:
        """Return the chunk with `drafts` behind it."""
        return self._replace(num_tokens=self.num_tokens + len(drafts), drafts=tuple(drafts))

    def without_drafts(self) -> Chunk:
        """Return the chunk without its drafts."""
        return self._replace(num_tokens=self.num_tokens - len(self.drafts), drafts=())
