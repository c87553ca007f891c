"""Prompt lookup: draft the tokens that followed the same tokens earlier. It needs no second model and no frames.

    .. the cat sat on the mat . then the cat │          the last 2 tokens were seen before;
           ───────▶ sat on the mat                      the drafts are the tokens that followed them then

(Saxena, Prompt Lookup Decoding, 2023.) It pays where the output repeats its input: summaries, edits of code, answers
from a document. A table from each run of `shortest` to `longest` tokens to its last end in the text finds the
continuation: a step adds an entry for each new token and length, and looks once for each length. So a step costs the
same after 100 and after 100,000 tokens, at about 100 bytes a token and length.

With `width` above 1 the drafts are a tree (ways/trees.py) of several continuations:

    .. a red lamp .. a blue hat .. has a │          behind "has a" or, fewer tokens, "a": blue hat .., then red lamp ..

Continuations of longer runs come first, and of equal runs the latest. Each gets an equal part of the drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagedkv.core.arguments import whole
from pagedkv.errors import InvalidRequest
from pagedkv.model.ways.trees import Tree, merged

if TYPE_CHECKING:
    from pagedkv.model.loop.sequence import SequenceState


@dataclass
class PromptLookup:
    """A drafter that copies what followed the last tokens when they were seen before.

    num_tokens: drafts in a step. longest, shortest: runs of so many last tokens are looked up, the longest first.
    width: continuations in a step.
    """

    num_tokens: int = 8
    longest: int = 4
    shortest: int = 2
    width: int = 1
    vocab_size: int | None = field(default=None, repr=False, init=False)
    _seen: dict[SequenceState, _Runs] = field(default_factory=dict, repr=False, init=False)

    def __post_init__(self) -> None:
        for name in ("num_tokens", "longest", "shortest", "width"):
            whole(getattr(self, name), f"PromptLookup.{name}", 1)
        if self.shortest > self.longest:
            raise InvalidRequest(
                f"PromptLookup.shortest is {self.shortest} and longest is {self.longest}; give shortest <= longest"
            )

    def propose(self, sequences: list[SequenceState], most: list[int]) -> list[list[int] | Tree]:
        """Return up to `most[i]` drafts for each sequence."""
        return [self._drafts(sequence, count) for sequence, count in zip(sequences, most, strict=True)]

    def _drafts(self, sequence: SequenceState, count: int) -> list[int] | Tree:
        runs = self._seen.get(sequence)
        if runs is None:
            runs = self._seen[sequence] = _Runs(self.shortest, self.longest, self.width)
        tokens = sequence.tokens
        places = runs.find(tokens)
        if self.width == 1 or len(places) < 2:
            return _continuation(tokens, places[0], count) if places else []
        each = -(-count // len(places))
        return merged([_continuation(tokens, begin, each) for begin in places], count)

    def forget(self, sequence: SequenceState) -> None:
        """Drop the table of a sequence."""
        self._seen.pop(sequence, None)

    def recover(self) -> None:
        """Drop all tables."""
        self._seen.clear()


def _continuation(tokens: list[int], begin: int, count: int) -> list[int]:
    """Return `count` tokens from `begin` on; text that repeats itself up to its end goes round once more."""
    drafts = tokens[begin : begin + count]
    while len(drafts) < count:
        drafts += tokens[begin : begin + count - len(drafts)]
    return drafts


class _Runs:
    """A table from runs of tokens to the place behind their last occurrence that a token follows.

    most: places to find. For more than one, `_earlier` has the place behind the occurrence before each, by length.
    """

    def __init__(self, shortest: int, longest: int, most: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._most = most
        self._behind: dict[tuple[int, ...], int] = {}
        self._earlier: dict[tuple[int, int], int] = {}
        self._num_seen = 0

    def find(self, tokens: list[int]) -> list[int]:
        """Take in the tokens that are new, and return where the last run of `tokens` went on before."""
        for end in range(self._num_seen + 1, len(tokens)):
            for length in self._lengths:
                if length <= end:
                    run = tuple(tokens[end - length : end])
                    if self._most > 1 and run in self._behind:
                        self._earlier[length, end] = self._behind[run]
                    self._behind[run] = end
        self._num_seen = max(self._num_seen, len(tokens) - 1)
        places: dict[int, None] = {}
        for length in self._lengths:
            place = self._behind.get(tuple(tokens[-length:]))
            while place is not None and len(places) < self._most:
                places[place] = None
                place = self._earlier.get((length, place))
        return list(places)
