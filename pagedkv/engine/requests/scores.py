"""Scores: the log-probabilities of the tokens of prompts, from the rows of one step. Knows chunks; no cache, no model.

    tokens of the prompt    t0  t1  t2  t3 │ t4  t5  t6         a chunk of four, then one of three
    rows that are read       0   1   2   3 │  4   5             row i gives the log-probability of token i + 1
    prompt_logprobs          None, of t1 .. t4 │ .. t6

The logits of MOST_LOGITS numbers exist at once, whatever the chunk and the vocabulary are: 64 MiB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from pagedkv.engine.sampling.sampler import TokenLogprobs, given
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from pagedkv.engine.requests.request import Request
    from pagedkv.engine.requests.sequence import Chunk

MOST_LOGITS: Final = 2**24
"""Logits that exist at once; at least one row of them does."""


class _Part(NamedTuple):
    """The rows of the batch that one request reads, the token behind each, and the log-probabilities found so far."""

    request: Request
    rows: range
    token_ids: list[int]
    found: list[TokenLogprobs]


class Scores:
    """The log-probabilities that a step gives, and the requests that end with it because they take no token."""

    def __init__(self, parts: list[_Part], ending: list[Request], rows_at_once: int) -> None:
        self._parts, self._ending, self._most = parts, ending, rows_at_once

    @classmethod
    def of(cls, chunks: Sequence[Chunk], ends: Sequence[int], vocab_size: int) -> Scores:
        """Return the scores of a step. ends: the end of each chunk in the batch"""
        parts: list[_Part] = []
        ending: list[Request] = []
        for chunk, end in zip(chunks, ends, strict=True):
            request = chunk.sequence.completion.request
            if not request.is_scored:
                begin = len(chunk.sequence.tokens) - chunk.remaining  # the position of the chunk's first token
                first = max(begin, len(request.prompt_logprobs) - 1)
                last = min(begin + chunk.num_tokens, len(request.prompt_ids) - 1)
                at = end - chunk.num_tokens - begin
                behind = request.prompt_ids[first + 1 : last + 1]
                parts.append(_Part(request, range(at + first, at + last), behind, []))
            if chunk.is_last and not request.params.max_tokens:
                ending.append(request)
        return cls(parts, ending, max(1, MOST_LOGITS // vocab_size))

    def read(self, logits_of: Callable[[Sequence[int]], Tensor]) -> None:
        """Take the log-probabilities from the logits, some rows at a time. A request with damaged logits ends."""
        for request, rows, token_ids, found in self._parts:
            while len(found) < len(rows):
                some = slice(len(found), len(found) + self._most)
                logits = logits_of(rows[some])
                try:
                    found += given(logits, token_ids[some], request.params.prompt_logprobs or 0)
                except InvalidRequest as error:
                    request.fail(str(error))
                    break

    def deliver(self) -> None:
        """Give the requests what was found, after the commit. End the requests that take no token."""
        for request, _, _, found in self._parts:
            request.prompt_logprobs += found
        for request in self._ending:
            for completion in request.completions:
                completion.end("length")
