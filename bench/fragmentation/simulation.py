"""The simulation serves the requests of a workload with one allocator, step by step.

A step: the first request in the queue is admitted while the allocator takes it; beams are reordered; every sequence
stores a token; sequences that have their output finish. If a sequence finds no memory, the request that began last is
preempted: its memory is given back, it goes to the head of the queue, and what it had stored is computed again. So the
oldest request always ends. All sequences of a request come and go together.

The simulation holds no rule of an allocator. It knows the lengths of outputs, and the allocators do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import numpy as np

from pagedkv.bench.fragmentation.account import Account, Allocator, Demand
from pagedkv.bench.fragmentation.workloads import Request

LOGITS: Final = 64
SHARPNESS: Final = 2.5
"""The model of a beam search draws LOGITS logits for each beam from a normal distribution of this deviation."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The account after a step, and the load: sequences that run, requests that wait."""

    account: Account
    sequences: int
    waiting: int


@dataclass(slots=True)
class Tally:
    """The counts of a run.

    moments:     after each step that was observed.
    recomputed:  tokens that were stored a second time after a preemption.
    stored:      tokens that were stored.
    forks, eager: forks, and the tokens that copying everything at each fork would have copied.
    dropped:     requests that do not fit even alone.
    """

    moments: list[Moment] = field(default_factory=list)
    steps: int = 0
    finished: int = 0
    preemptions: int = 0
    recomputed: int = 0
    stored: int = 0
    forks: int = 0
    eager: int = 0
    dropped: int = 0

    def loaded(self) -> list[Moment]:
        """Return the moments in which requests wait, without the first third of them; all moments if none waits."""
        busy = [moment for moment in self.moments if moment.waiting]
        return busy[len(busy) // 3 :] or self.moments


@dataclass(slots=True)
class _Running:
    """A request that holds memory. done: tokens that each of its sequences has stored after the prompt."""

    request: Request
    members: list[int]
    done: int
    random: np.random.Generator
    scores: np.ndarray


class Simulation:
    """One run of an allocator. observe_every: steps from one account to the next."""

    def __init__(self, requests: Sequence[Request], allocator: Allocator, observe_every: int = 1) -> None:
        self._waiting = deque((request, 0) for request in requests)  # and the tokens of its output stored before
        self._running: list[_Running] = []
        self._names = count()
        self._is_closed = False
        self._allocator = allocator
        self._observe_every = observe_every
        self.tally = Tally()

    def run(self) -> Tally:
        """Serve all requests."""
        tally = self.tally
        while self._waiting or self._running:
            self._admit()
            for running in self._running:
                if running.request.beams > 1 and running.done:
                    self._reorder(running)
            self._grow()
            if tally.steps % self._observe_every == 0 and self._running:
                tally.moments.append(self._moment())
            self._finish()
            tally.steps += 1
        return tally

    # -- admission -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and not self._is_closed:
            request, done = self._waiting[0]
            width = max(request.samples, request.beams)
            done = 0 if width > 1 else done  # samples and beams begin again at the prompt
            members = self._placed(request, done, width)
            if not members:
                if self._running:
                    return
                self._waiting.popleft()
                self.tally.dropped += 1
                continue
            self._waiting.popleft()
            self.tally.stored += request.prompt + done
            random = np.random.default_rng(request.seed)
            self._running.append(_Running(request, members, done, random, np.zeros(width)))

    def _placed(self, request: Request, done: int, width: int) -> list[int]:
        """Return the sequences of an admitted request, forked from its prompt; [] if the allocator refuses."""
        members = [next(self._names)]
        if not self._allocator.admit(members[0], request.prompt + done, request.final):
            return []
        for _ in range(width - 1):
            child = next(self._names)
            if not self._allocator.fork(members[0], child):
                for member in members:
                    self._allocator.free(member)
                return []
            members.append(child)
        self.tally.forks += width - 1
        self.tally.eager += (width - 1) * request.prompt
        return members

    # -- a step --------------------------------------------------------------------------------------------------------

    def _reorder(self, running: _Running) -> None:
        """Choose the parents of the next beams. A parent chosen again overwrites a beam that was not chosen."""
        parents = next_beams(running.random, running.scores)
        lost = [member for i, member in enumerate(running.members) if i not in parents]
        seen: set[int] = set()
        members = []
        for parent in parents.tolist():
            member = running.members[parent]
            if parent in seen:
                source, member = member, lost.pop()
                self._allocator.overwrite(member, source)
                self.tally.forks += 1
                self.tally.eager += running.request.prompt + running.done
            seen.add(parent)
            members.append(member)
        running.members = members

    def _grow(self) -> None:
        left = self._allocator.grow([Demand(member) for running in self._running for member in running.members])
        while left:
            victim = self._running[-1]
            self._preempt(victim)
            gone = set(victim.members)
            left = [demand for demand in left if demand.sequence not in gone]
            if left:
                left = self._allocator.grow(left)
        for running in self._running:
            running.done += 1
            self.tally.stored += len(running.members)

    def _preempt(self, victim: _Running) -> None:
        self._running.remove(victim)
        for member in victim.members:
            self._allocator.free(member)
        if not self._running:
            self.tally.dropped += 1
            self._is_closed = False  # no running request is left whose end would let in another
            return
        self.tally.preemptions += 1
        self._is_closed = self._allocator.is_blind
        self.tally.recomputed += victim.request.prompt + len(victim.members) * victim.done
        self._waiting.appendleft((victim.request, victim.done))

    def _finish(self) -> None:
        ended = [running for running in self._running if running.done >= running.request.output]
        for running in ended:
            for member in running.members:
                self._allocator.free(member)
        self._running = [running for running in self._running if running.done < running.request.output]
        self.tally.finished += len(ended)
        self._is_closed &= not ended

    # -- observation ---------------------------------------------------------------------------------------------------

    def _moment(self) -> Moment:
        remaining = {
            member: running.request.output - running.done for running in self._running for member in running.members
        }
        account = self._allocator.account(remaining)
        return Moment(account, len(remaining), len(self._waiting))


def next_beams(random: np.random.Generator, scores: np.ndarray) -> np.ndarray:
    """Return the parent of each of the next beams, best first, and replace `scores` by theirs.

    The log-probabilities of a beam's next tokens are those of a made-up model: a softmax of normal logits.
    """
    width = len(scores)
    logits = random.normal(0, SHARPNESS, (width, LOGITS))
    log_probabilities = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    candidates = (scores[:, None] + log_probabilities).ravel()
    best = np.argsort(-candidates)[:width]
    scores[:] = candidates[best]
    return best // LOGITS
