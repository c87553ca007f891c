"""The outcome of a step: the tokens that each sequence gets from its logits, by its way of decoding.

a decoding sequence     a token                       draws
a prompt of n samples   a token for each              draws, by families
.. with drafts          a token, and one for each     drafts/speculation
                        draft that came true
the beams of a search   the state of the search       requests/beams
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from pagedkv.engine.requests import beams
from pagedkv.engine.requests.draws import Drawn, draw

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.engine.drafts.speculation import Speculation
    from pagedkv.engine.requests.beams import Turn
    from pagedkv.engine.requests.sequence import Chunk, SequenceState
    from pagedkv.engine.step.delivery import Delivery
    from pagedkv.engine.step.scheduler import Scheduler


class _Outcome(NamedTuple):
    """The result of a step's logits.

    families: a list for each sequence that draws; empty for a beam.
    drawn:    the tokens of the members of all families, in order.
    more:     the tokens drawn behind the drafts that came true, one for each.
    turns:    the turns of beam searches.
    """

    families: list[list[SequenceState]]
    drawn: list[Drawn]
    more: dict[SequenceState, list[Drawn]]
    turns: list[Turn]

    def kept(self, chunks: list[Chunk]) -> list[list[int]]:
        """Return the tokens of each chunk whose KV is of use: without drafts that did not come true.

        A request that has ended keeps no token: its logits may be unusable, and no prompt may find such KV.
        """
        kept: list[list[int]] = []
        for chunk in chunks:
            if chunk.sequence.completion.finish_reason:
                kept.append([])
                continue
            num_own = chunk.num_tokens - len(chunk.drafts)
            kept.append(chunk.token_ids[: num_own + len(self.more.get(chunk.sequence, ()))])
        return kept

    def deliver(self, delivery: Delivery, scheduler: Scheduler) -> None:
        """Append its tokens to each sequence, and let beams go on.

        The samples of a family fork before its parent takes its token: the parent may finish and release its frames.
        """
        of_each, now = iter(self.drawn), time.perf_counter()
        for parent, *children in filter(None, self.families):
            of_parent = next(of_each)
            for child in children:
                of_child = next(of_each)
                if not child.completion.finish_reason:
                    scheduler.fork(parent, child)
                    delivery.take(child, of_child, now)
            if not parent.completion.finish_reason:
                delivery.take(parent, of_parent, now)
        for sequence, more in self.more.items():
            num_taken = 0
            for drawn in more:
                if not sequence.completion.finish_reason:
                    delivery.take(sequence, drawn, now)
                    num_taken += 1
            if scheduler.speculation is not None:
                scheduler.speculation.count(len(more), num_taken)
        for turn in self.turns:
            _follow(turn, delivery, scheduler)


def _follow(turn: Turn, delivery: Delivery, scheduler: Scheduler) -> None:
    """Let the beams of a search go on, or end the search."""
    request = turn.members[0].completion.request
    search = beams.search_of(request)
    if search is not None and not request.finished:
        search.state = turn.state  # from here on the search has it, whatever is interrupted
        for completion in request.completions:
            completion.last_token_at = time.perf_counter()
            completion.first_token_at = completion.first_token_at or completion.last_token_at
        if turn.state.is_done:
            delivery.finish_search(request, turn.state)
        else:
            scheduler.follow(turn)


def outcome_of(
    chunks: list[Chunk],
    families: list[list[SequenceState]],
    logits: Tensor,
    *,
    speculation: Speculation | None,
    is_searching: bool,
) -> _Outcome:
    """Return the outcome of a step.

    families: one for each chunk that is its sequence's last. is_searching: whether a chunk may belong to a beam
    Shapes: logits float32 [N, V], the rows of `Speculation.rows`
    """
    own = logits if speculation is None else logits[speculation.own_rows(chunks)]
    turns: list[Turn] = []
    if is_searching:
        turns = beams.turns(chunks, own)
        families = [[] if family[0].completion.request.search else family for family in families]
    drawn = draw(families, own)
    more = {} if speculation is None else speculation.verify(chunks, families, drawn, logits)
    return _Outcome(families, drawn, more, turns)
