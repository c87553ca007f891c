"""Prompt lookup: draft the tokens that followed the same tokens earlier. It needs no second model and no frames.

    .. the cat sat on the mat . then the cat │          the last 2 tokens were seen before;
           ───────▶ sat on the mat                      the drafts are the tokens that followed them then

(Saxena, Prompt Lookup Decoding, 2023.) It pays where the output repeats its input: summaries, edits of code, answers
from a document. A table from each run of `shortest` to `longest` tokens to its last end in the text finds the
continuation: a step adds an entry for each new token and length, and looks once for each length. So a step costs the
same after 100 and after 100,000 tokens, at about 100 bytes a token and length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagedkv.core.arguments import whole
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from pagedkv.engine.requests.sequence import SequenceState


@dataclass
class PromptLookup:
    """A drafter that copies what followed the last tokens when they were seen before.

    num_tokens: drafts in a step. longest, shortest: runs of so many last tokens are looked up, the longest first.
    """

    num_tokens: int = 8
    longest: int = 4
    shortest: int = 2
    vocab_size: int | None = field(default=None, repr=False, init=False)
    _seen: dict[SequenceState, _Runs] = field(default_factory=dict, repr=False, init=False)

    def __post_init__(self) -> None:
        for name in ("num_tokens", "longest", "shortest"):
            whole(getattr(self, name), f"PromptLookup.{name}", 1)
        if self.shortest > self.longest:
            raise InvalidRequest(
                f"PromptLookup.shortest is {self.shortest} and longest is {self.longest}; give shortest <= longest"
            )

    def propose(self, sequences: list[SequenceState], most: list[int]) -> list[list[int]]:
        """Return up to `most[i]` drafts for each sequence."""
        return [self._drafts(sequence, count) for sequence, count in zip(sequences, most, strict=True)]

    def _drafts(self, sequence: SequenceState, count: int) -> list[int]:
        runs = self._seen.get(sequence)
        if runs is None:
            runs = self._seen[sequence] = _Runs(self.shortest, self.longest)
        tokens, begin = sequence.tokens, runs.find(sequence.tokens)
        # text that repeats itself up to its end goes round once more
        return [] if begin is None else [tokens[begin + n % (len(tokens) - begin)] for n in range(count)]

    def forget(self, sequence: SequenceState) -> None:
        """Drop the table of a sequence."""
        self._seen.pop(sequence, None)

    def recover(self) -> None:
        """Drop all tables."""
        self._seen.clear()


class _Runs:
    """A table from runs of tokens to the place behind their last occurrence that a token follows."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._behind: dict[tuple[int, ...], int] = {}
        self._num_seen = 0

    def find(self, tokens: list[int]) -> int | None:
        """Take in the tokens that are new, and return where the last run of `tokens` went on before, if anywhere."""
        for end in range(self._num_seen + 1, len(tokens)):
            for length in self._lengths:
                if length <= end:
                    self._behind[tuple(tokens[end - length : end])] = end
        self._num_seen = max(self._num_seen, len(tokens) - 1)
        runs = (tuple(tokens[-length:]) for length in self._lengths)
        return next((self._behind[run] for run in runs if run in self._behind), None)
