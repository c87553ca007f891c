"""Events of the lives of requests: when each was queued, admitted, computed, preempted and finished.

    queued ─▶ admitted ─▶ chunk .. chunk ─▶ token, chunk, token .. ─▶ finished   (also of a request that only waited)
                 ▲            └── preempted ──┘   └ rolled_back: drafts that did not come true
                 └─────────────────┘              └ rejected by a validator: the output begins anew
                                                  └ forked: the first token of a further sample
                                                  └ searched: beams begin; all tokens come at the end

The engine calls `Events.queue` for each request that it takes in and `Events.step` at the end of each step. Without
Events it reads no clock. All events are made from the chunks of the step, the drafts that came true and the
completions, so no other part of the loop knows of them. A step that is interrupted leaves none.

A decode step appends one plain tuple for each sequence, as that is most of what is recorded: `Events.events` makes the
chunk and the token of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagedkv.model.loop.draws import Guess
    from pagedkv.model.loop.sequence import Chunk, SequenceState
    from pagedkv.model.request import Completion, Request
    from pagedkv.model.scheduler import Scheduler


class Event(NamedTuple):
    """One event.

    kind:     "step", or one of the kinds in the file head
    at:       seconds of time.perf_counter(); of a step and a chunk, their begin
    until:    the end of a step or a chunk; elsewhere `at`
    request:  number of the request, from 0 in the order in which the engine took them in; -1 for a step
    sample:   index of the completion in its request
    value:    queued: prompt tokens. admitted: tokens found in the prefix cache. step, chunk: tokens computed.
              token: its id. rolled_back: drafts. preempted, forked, searched, rejected, finished: tokens of the output
    detail:   the finish_reason of "finished", the reason of "rejected"
    logprob:  log-probability of a token, if its request asked for it; beams and rejected outputs have none
    """

    kind: str
    at: float
    until: float
    request: int = -1
    sample: int = 0
    value: int = 0
    detail: str = ""
    logprob: float | None = None


@dataclass(slots=True)
class _Life:
    """A completion that was queued or forked and has not ended.

    sample: its index, which the choice of the best of several samples may change. num_tokens: in events so far.
    """

    request: int
    sample: int = 0
    num_tokens: int = 0
    num_rejected: int = 0
    is_running: bool = False
    is_searching: bool = False


@dataclass
class Events:
    """A record of all events, in the order in which the engine learned of them."""

    _events: list[Event] = field(default_factory=list)
    _new: list[Event | tuple[float, float, int, int, int, float | None]] = field(default_factory=list)
    _lives: dict[Completion, _Life] = field(default_factory=dict)
    _numbers: dict[Request, tuple[int, list[Completion]]] = field(default_factory=dict)
    """The number of each request, and its completions: of candidates, some are gone when the others are chosen."""
    _count: int = 0
    _preemptions: int = 0

    @property
    def events(self) -> list[Event]:
        """The events so far: the same list, which grows, at each call."""
        new, self._new = self._new, []
        for one in new:
            if isinstance(one, Event):
                self._events.append(one)
            else:
                began, now, request, sample, token, logprob = one
                self._events.append(Event("chunk", began, now, request, sample, 1))
                self._events.append(Event("token", now, now, request, sample, token, logprob=logprob))
        return self._events

    def queue(self, request: Request) -> None:
        """Record that the engine took in a request."""
        self._begin(request.completions[0])

    def step(
        self,
        began: float,
        chunks: Sequence[Chunk],
        scheduler: Scheduler,
        accepted: Mapping[SequenceState, Sequence[Guess]],
    ) -> None:
        """Record a step that ends now. accepted: the drafts that came true. Modifies: events"""
        now = time.perf_counter()
        if self._preemptions != scheduler.preemptions:
            self._note_preempted(began, scheduler)
        if chunks:
            self._new.append(Event("step", began, now, -1, 0, sum([chunk.num_tokens for chunk in chunks])))
        life_of, note = self._lives.get, self._new.append
        for chunk in chunks:
            completion = chunk.sequence.completion
            life, tokens = life_of(completion), completion.token_ids
            if (
                life is not None
                and life.is_running
                and chunk.num_tokens == 1
                and 0 < life.num_tokens == len(tokens) - 1  # no first token, which may fork, and no rejection
            ):
                life.num_tokens += 1
                logprob = completion.logprobs[-1].logprob if completion.logprobs else None
                note((began, now, life.request, life.sample, tokens[-1], logprob))
            else:
                self._note_chunk(chunk, began, now, len(accepted.get(chunk.sequence, ())))
        self.end(now)

    def end(self, now: float) -> None:
        """Record the ends of completions, also of those that never ran."""
        for completion in [completion for completion in self._lives if completion.finish_reason]:
            life = self._lives.pop(completion)
            count, reason = len(completion.token_ids), completion.finish_reason
            self._new.append(Event("finished", now, now, life.request, life.sample, count, reason))
            if completion.request.finished:
                self._numbers.pop(completion.request, None)

    def _note_preempted(self, began: float, scheduler: Scheduler) -> None:
        """Record the sequences that ran and wait again."""
        self._preemptions = scheduler.preemptions
        for sequence in scheduler.waiting:
            life = self._lives.get(sequence.completion)
            if life is not None and life.is_running:
                life.is_running = False
                self._new.append(Event("preempted", began, began, life.request, life.sample, life.num_tokens))

    def _note_chunk(self, chunk: Chunk, began: float, now: float, num_accepted: int) -> None:
        """Record the tokens that a step computed for a sequence, and those that it got."""
        completion = chunk.sequence.completion
        life = self._lives.get(completion) or self._begin(completion)
        if not life.is_running:
            life.is_running = True
            found = len(completion.request.prompt_ids) + life.num_tokens - chunk.remaining
            self._new.append(Event("admitted", began, began, life.request, life.sample, found))
        self._new.append(Event("chunk", began, now, life.request, life.sample, chunk.num_tokens))
        if not chunk.is_last:
            return
        if completion.request.search is not None and not life.is_searching:
            life.is_searching = True
            self._new.append(Event("searched", now, now, life.request, life.sample))
        is_first = not (life.num_tokens or life.num_rejected)
        self._note_tokens(completion, life, now)
        if rejected := len(chunk.drafts) - num_accepted:
            self._new.append(Event("rolled_back", now, now, life.request, life.sample, rejected))
        if is_first and not life.sample:
            for index, sample in enumerate(self._numbers[completion.request][1]):
                if sample.token_ids and sample not in self._lives:
                    self._lives[sample] = forked = _Life(life.request, index, is_running=True)
                    self._new.append(Event("forked", now, now, life.request, index))
                    self._note_tokens(sample, forked, now)

    def _begin(self, completion: Completion) -> _Life:
        """Record that a completion was queued, and return its life."""
        request = completion.request
        if request not in self._numbers:
            self._numbers[request] = self._count, list(request.completions)
            self._count += 1
        life = self._lives[completion] = _Life(self._numbers[request][0], completion.index)
        queued, at = len(request.prompt_ids), request.submitted_at
        self._new.append(Event("queued", at, at, life.request, completion.index, queued))
        return life

    def _note_tokens(self, completion: Completion, life: _Life, now: float) -> None:
        """Record the tokens that a completion got in the step."""
        number, index = life.request, life.sample
        for rejected in completion.rejections[life.num_rejected : completion.request.params.max_retries]:
            unrecorded = rejected.token_ids[life.num_tokens :]
            self._new += [Event("token", now, now, number, index, token) for token in unrecorded]
            self._new.append(Event("rejected", now, now, number, index, len(rejected.token_ids), rejected.reason))
            life.num_rejected, life.num_tokens = life.num_rejected + 1, 0
        new, logprobs = completion.token_ids[life.num_tokens :], completion.logprobs[life.num_tokens :]
        life.num_tokens += len(new)
        for token, found in zip_longest(new, logprobs):
            logprob = None if found is None else found.logprob
            self._new.append(Event("token", now, now, number, index, token, logprob=logprob))
