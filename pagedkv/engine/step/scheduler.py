"""The scheduler: which sequences compute how many tokens in the next step, and which sequence is preempted.

    waiting ──admit──▶ running ──finish──▶ gone     admit: the first in order, while the watermark's frames stay free
       ▲                  │                         preempt: the last in order, when a plan is out of frames or a more
       └──── preempt ─────┘                             urgent sequence waits that can then be admitted

The order is that of priority, then of arrival, and both queues are in order. A preempted sequence gives all frames
back; when it runs again, the prefix cache still has most of its pages. The first sequence in order fits the pool alone
(`Engine.submit` checks this), and only a more urgent one preempts it. So each step computes something, and each
sequence finishes unless more urgent ones come without end. A tenant's quota may be too small for a sequence: it ends
with an error.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from pagedkv.core.observe.receipts import Receipt
from pagedkv.core.recovery import assign_together
from pagedkv.engine.requests import beams
from pagedkv.engine.requests.sequence import Chunk, SequenceState
from pagedkv.engine.step.fetches import Fetches
from pagedkv.errors import OutOfFrames, QuotaExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagedkv.cache import PagedKVCache, PlannedBatch
    from pagedkv.engine.drafts.speculation import Speculation
    from pagedkv.engine.requests.beams import Turn
    from pagedkv.engine.requests.limits import Limits
    from pagedkv.engine.requests.request import Request

    Plan = Callable[..., PlannedBatch]


_LOG: Final = logging.getLogger("pagedkv.engine")

WORTH: Final = 24
"""Tokens. Prompts wait until another one has computed their common prefix if they save as many together: one more step
takes as long as 18 tokens do, on two cores with AVX-512 (steps of 216 and 432 tokens, a llama of 8 layers of 512)."""


class Scheduler:
    """Two queues over one cache, and the only part of the model that opens, forks and releases address spaces."""

    def __init__(
        self, cache: PagedKVCache, limits: Limits, plan: Plan | None = None, *, speculation: Speculation | None = None
    ) -> None:
        """Begin without sequences. plan: as ModelRunner.plan; None for `cache.plan`. speculation: adds drafts."""
        self.cache: PagedKVCache = cache
        self.fetches: Fetches = Fetches(cache)
        self.limits: Limits = limits
        self.speculation: Speculation | None = speculation
        self._most_decoding = 1 if speculation is None else speculation.most_decoding
        self._plan: Plan = plan or cache.plan
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.preemptions: int = 0
        self.receipts: Counter[str] = Counter()
        """Prompts by the reason of their receipt."""
        self.retained: Counter[str] = Counter()
        """Ended outputs that asked for `retain_s`, by the answer of the cache."""
        # Frames available when the head of the queue was refused: it is tried again only when there are more.
        self._available_at_refusal = -1
        self._computing: dict[int, SequenceState] = {}  # running sequences that compute a prompt, by asid
        self.searching: set[Request] = set()
        """The requests with beams that may have sequences."""

    def add(self, sequence: SequenceState) -> None:
        """Put `sequence` into the waiting queue, behind all that are as urgent."""
        if sequence.completion.request.search is not None:
            self.searching.add(sequence.completion.request)
        place = _place(self.waiting, sequence)
        self.waiting.insert(place, sequence)
        if place == 0:  # another sequence was refused
            self._available_at_refusal = -1

    def next_step(self) -> tuple[list[Chunk], PlannedBatch | None]:
        """Choose the chunks of the next step and plan them; preempt sequences until the plan fits.

        Returns: the chunks and their plan; ([], None) if no sequence can compute anything.
        """
        if self.searching:
            self.searching = {request for request in self.searching if not request.finished}
        if self.retained:
            self.cache.advise(None, "release", now=time.monotonic())
        if self.cache.tiers:
            self.fetches.ask(self.waiting)
        chunks = self._choose(admit=True)
        if not chunks and self.fetches.wait(self.waiting):
            chunks = self._choose(admit=True)
        if self.speculation is not None:
            chunks = self.speculation.extend(chunks, self.limits.max_batch_tokens)
        while chunks:
            try:
                return chunks, self._planned(chunks)
            except OutOfFrames as error:
                if any(chunk.drafts for chunk in chunks):  # a guess is worth no other sequence's frames
                    chunks = [chunk.without_drafts() for chunk in chunks]
                    continue
                if error.pool != "states" and self.fetches.take_back():  # nor are pages that no sequence reads yet
                    continue
                if not self._make_room(error):
                    return [], None
                chunks = self._choose(admit=False)
        return [], None

    def _planned(self, chunks: list[Chunk]) -> PlannedBatch:
        """Plan the step of `chunks`. The recurrent state behind the tokens that are no drafts is saved, too."""
        spaces = [chunk.sequence.space for chunk in chunks if chunk.sequence.space is not None]
        counts = [chunk.num_tokens for chunk in chunks]
        if self.cache.states is None or not any(chunk.drafts for chunk in chunks):
            return self._plan(spaces, counts)
        return self._plan(spaces, counts, certain=[chunk.num_tokens - len(chunk.drafts) for chunk in chunks])

    def _make_room(self, error: OutOfFrames) -> bool:
        """Take the frames of the last running sequence in order. Raises: `error`

        Returns: False if a tier that hangs has the frames that are lacking, so that only time helps.
        """
        # At a quota, only the tenant's own sequences can give frames back.
        tenant = error.tenant if isinstance(error, QuotaExceeded) else None
        holders = [s for s in self.running if tenant in (None, s.completion.request.tenant)]
        if len(holders) > len(self._gang(holders[-1])):
            self.preempt(holders[-1])
        elif self.cache.tiers.num_fetches and error.pool != "states":
            return False
        elif tenant is None:
            raise error
        else:  # the quota is too small for this request alone
            holders[0].completion.request.fail(str(error))
            for member in self._gang(holders[0]):
                self.remove(member)
        return True

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """Let `child` continue from the tokens of `parent`, sharing its frames, and run beside it."""
        assert parent.space is not None
        child.space = parent.space.fork()
        place, request = self.running.index(parent) + 1, parent.completion.request
        while place < len(self.running) and self.running[place].completion.request is request:
            place += 1
        self.running.insert(place, child)

    def follow(self, turn: Turn) -> None:
        """Let the live beams of a turn take the places and the frames of the members of their gang."""
        spaces = [member.space for member in turn.members if member.space is not None]
        members = beams.members_of(turn, self.cache.reorder(spaces, turn.parents))
        first, gone = self.running.index(turn.members[0]), set(turn.members)
        self.running[first:] = [*members, *(s for s in self.running[first:] if s not in gone)]

    def remove(self, sequence: SequenceState) -> None:
        """Take `sequence` out of its queue and give back its frames."""
        self._available_at_refusal = -1  # `sequence` may be the refused one, or free the frames that it needs
        if self.speculation is not None:
            self.speculation.drafter.forget(sequence)
        if sequence.fetch is not None:
            sequence.fetch.cancel()
            sequence.fetch = None
        if sequence.space is not None:
            self._retain(sequence)
            sequence.space.release()  # first: if it raises, nothing was changed
            sequence.space = None
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def _retain(self, sequence: SequenceState) -> None:
        """Retain the pages of a sequence that has ended, if its request asks for that."""
        seconds = sequence.completion.request.retain_s
        if seconds > 0 and sequence.completion.finish_reason in ("stop", "length"):
            now = time.monotonic()
            self.retained[self.cache.advise(sequence.space, "retain", until=now + seconds, now=now)] += 1

    def preempt(self, sequence: SequenceState) -> None:
        """Let `sequence` wait, and take its frames. Call it for the last in order. Beams are preempted together."""
        self._available_at_refusal = -1
        gang, place = self._gang(sequence), _place(self.waiting, sequence, is_older=True)
        self.preemptions += 1
        for member in gang:
            self.remove(member)
        if sequence.completion.request.search is not None:
            sequence = beams.make_trunk(gang[0])
        self.waiting.insert(place, sequence)

    def _gang(self, sequence: SequenceState) -> list[SequenceState]:
        """Return the sequences that are preempted with `sequence`."""
        request = sequence.completion.request
        return [sequence] if request.search is None else [s for s in self.running if s.completion.request is request]

    def restart(self, sequences: Sequence[SequenceState]) -> None:
        """Let `sequences` wait, and forget all others: after an interrupt, which may have left the queues half changed.

        The frames of the sequences that ran are given back. A call that was interrupted can be repeated.
        """
        for sequence in (*self.running, *self.waiting):
            if sequence.space is not None and not sequence.space.is_stale:
                sequence.space.release()
        self.cache.tiers.release_holds()
        ordered = sorted(sequences, key=_priority)
        queues = (self, "waiting", deque(ordered)), (self, "running", list[SequenceState]())
        searching = {s.completion.request for s in sequences if s.completion.request.search is not None}
        assign_together((*queues, (self, "_available_at_refusal", -1), (self, "searching", searching)))

    def _choose(self, *, admit: bool) -> list[Chunk]:
        """Return the chunks of the next step within the limits. admit: let sequences that wait run, if they can."""
        if admit and self.waiting:
            self._admit_waiting()
        budget, longest = self.limits.max_batch_tokens, self.limits.chunk
        chunks: list[Chunk] = []
        # Of equally urgent sequences those that decode first: a reader waits for their text.
        running = [(sequence, sequence.remaining) for sequence in self.running]
        most = beams.most_tokens(running) if self.searching else {}
        if max([remaining for _, remaining in running], default=0) > 1:  # else they are in order
            running.sort(key=lambda pair: (_priority(pair[0]), pair[1] > self._most_decoding))
        for sequence, remaining in running:
            num_tokens = min(remaining, longest, budget)
            if most:
                num_tokens = min(num_tokens, most.get(sequence, num_tokens))
            if num_tokens:
                chunks.append(Chunk(sequence, num_tokens, remaining))
                budget -= num_tokens
        return beams.whole_gangs(chunks, most) if most else chunks

    def _admit_waiting(self) -> None:
        """Admit waiting sequences in order: those more urgent than a running one, then as many as a step has room for.

        Sequences whose pages are on their way are passed over. So are those whose next pages a running one computes, if
        together they save WORTH tokens.
        """
        budget = self.limits.max_batch_tokens
        self._computing = {}
        for sequence in self.running:
            budget -= self._run(sequence)
        candidates, held = iter(tuple(self.waiting)), dict[SequenceState, tuple[SequenceState, int]]()
        saved: Counter[SequenceState] = Counter()
        while first := self.fetches.first_ready(candidates):
            if budget <= 0 and _priority(first) >= _priority(self.running[-1]):
                break
            if found := self._awaited(first):
                leader, end, tokens = found
                held[first] = leader, end
                saved[leader] += tokens
                continue
            if not self._admit(first):
                return
            self._start(first)
            budget -= self._run(first)
        for sequence, (leader, end) in held.items():
            if saved[leader] >= WORTH:
                sequence.awaited = leader, end
            elif budget > 0:
                if not self._admit(sequence):
                    return
                self._start(sequence)
                budget -= self._run(sequence)

    def _start(self, sequence: SequenceState) -> None:
        """Move a waiting sequence, which was admitted, to the running ones."""
        self.waiting.remove(sequence)
        self.fetches.release(sequence)
        sequence.fetch = sequence.awaited = None
        self.running.insert(_place(self.running, sequence), sequence)

    def _run(self, sequence: SequenceState) -> int:
        """Note a running sequence by its asid if it computes a prompt. Return the most tokens of its next chunk."""
        remaining = sequence.remaining
        if remaining > 1 and sequence.space is not None:
            self._computing[sequence.space.asid] = sequence
        return min(remaining, self.limits.chunk)

    def _awaited(self, sequence: SequenceState) -> tuple[SequenceState, int, int] | None:
        """Return the running sequence, no less urgent, that computes the next pages of a waiting one; None without one.

        Returns: the running sequence, the length of their common prefix, and the tokens that the other saves by waiting
        """
        if not self._computing or sequence.most_known is not None:
            return None
        if sequence.awaited is not None:  # it waits already
            leader, end = sequence.awaited
            space = leader.space
            if space is not None and self._computing.get(space.asid) is leader and space.ready < end:
                return leader, end, WORTH
        request = sequence.completion.request
        found = self.cache.awaited(sequence.tokens, tenant=request.tenant, salt=request.salt)
        its = self._computing.get(found.asid) if found is not None else None
        if found is None or its is None or _priority(its) > _priority(sequence):
            return self._awaited_state(sequence) if self.cache.states is not None else None
        return its, found.tokens, found.tokens - found.known

    def _awaited_state(self, sequence: SequenceState) -> tuple[SequenceState, int, int] | None:
        """Return the running sequence that computes the state behind the known pages of a waiting one, as `_awaited`.

        The first prompt of a crowd keeps its states where its own end is. The second one, which finds its pages, keeps
        one where the two part, and the others wait for that.
        """
        request = sequence.completion.request
        known = self.cache.lookup(sequence.tokens, tenant=request.tenant, salt=request.salt)
        known -= known % self.cache.spec.block_size  # states are kept at ends of pages
        for its in self._computing.values():
            space, other = its.space, its.completion.request
            if space is None or not space.ready < known or (other.tenant, other.salt) != (request.tenant, request.salt):
                continue
            is_same = its.tokens[:known] == sequence.tokens[:known] and _priority(its) <= _priority(sequence)
            if is_same and known in space.stops(known + 1):
                return its, known, known - space.ready
        return None

    def _admit(self, sequence: SequenceState) -> bool:
        """Open an address space for `sequence` if its frames and those promised to running sequences fit the pool.

        Less urgent sequences are preempted if that makes room. With no sequence running, admit the first of those that
        wait in any case: the ones before another have pages on their way, and need the frames that these load into.
        Returns: whether it was admitted
        """
        cache, request = self.cache, sequence.completion.request
        if self.running and cache.available <= self._available_at_refusal:
            return False
        space = sequence.space = cache.open(
            sequence.tokens, tenant=request.tenant, salt=request.salt, most=sequence.most_known
        )
        while (self.running or sequence is not self.waiting[0]) and any(self._lacks(sequence)):
            victim = self._victim(sequence)
            if victim is None:
                sequence.space = None
                space.release()
                self._available_at_refusal = cache.available
                return False
            self.preempt(victim)
        self._available_at_refusal = -1
        told = sequence.receivers if request.search is None else request.completions
        new = [completion for completion in told if not completion.admitted_at]
        receipt = self._receipt(sequence, space.ready) if new and sequence.most_known is None else None
        for completion in new:
            completion.cached_tokens, completion.admitted_at = space.ready, time.perf_counter()
            completion.receipt = receipt
        return True

    def _receipt(self, sequence: SequenceState, found: int) -> Receipt:
        """Return the receipt of a prompt of which `found` tokens were found."""
        prompt, fetch, size = sequence.completion.request.prompt_ids, sequence.fetch, self.cache.block_size
        if found >= (len(prompt) - 1) // size * size > 0:
            receipt = Receipt("hit", len(prompt), found, found)
        else:
            request = sequence.completion.request
            miss = self.cache.why(prompt, tenant=request.tenant, salt=request.salt, private=True)
            has_failed = fetch is not None and fetch.tokens < fetch.asked
            receipt = Receipt.of(miss, len(prompt), tier_failed=has_failed)
        self.receipts[receipt.reason] += 1
        if receipt.reason not in ("hit", "short", "new") and receipt.computed_tokens >= self.limits.logged_miss:
            _LOG.info("computed again: %s", receipt)
        return receipt

    def _victim(self, sequence: SequenceState) -> SequenceState | None:
        """Return the last less urgent sequence that has what `sequence` lacks; None if all together have too little."""
        less_urgent = [s for s in self.running if _priority(s) > _priority(sequence)]
        if not less_urgent or any(self._lacks(sequence, less_urgent)):
            return None
        places, frames, _ = self._lacks(sequence)
        if not (places or frames):
            less_urgent = [s for s in less_urgent if s.completion.request.tenant == sequence.completion.request.tenant]
        return less_urgent[-1] if less_urgent else None

    def _lacks(self, sequence: SequenceState, gone: Sequence[SequenceState] = ()) -> tuple[bool, bool, bool]:
        """Return whether `sequence`, whose space is open, lacks a place, frames of the pool, and frames of its quota.

        gone: less urgent sequences that would give back all their frames. Shared frames count as given back.
        """
        cache, tenant = self.cache, sequence.completion.request.tenant
        stay = [s for s in (*self.running, sequence) if s not in gone]
        frames = [(s, self._frames_needed(s)) for s in stay]
        # Between two steps the frames behind a window are gone.
        frames += [(s, -cache.frames_for(_length(s), 1)) for s in gone]
        own = sum(count for s, count in frames if s.completion.request.tenant == tenant)
        if gone:
            quota, held = cache.usages().get(tenant), cache.tiers.num_held(tenant)
            most = None if quota is None or quota.hard is None else quota.hard - quota.used + quota.evictable + held
            exceeds = most is not None and own > most
        else:
            exceeds = not cache.admits(own, tenant=tenant)
        places, most_places = sum(s.num_receivers for s in stay), self.limits.max_sequences
        if cache.states is not None:  # a sequence has two states, and takes a third for drafts and for what it keeps
            most_places = max(1, min(most_places, len(cache.states.pool.frames) // 3))
        needed = sum(count for _, count in frames)
        return places > most_places, needed > cache.available - cache.reserve, exceeds

    def _frames_needed(self, sequence: SequenceState) -> int:
        """Count the frames that the remaining tokens of `sequence` will map, and one tail for each sample to fork."""
        frames_for, at_once = self.cache.frames_for, self.limits.chunk
        unmapped = frames_for(len(sequence.tokens), at_once) - frames_for(_length(sequence), at_once)
        return unmapped + sequence.num_receivers - 1


def _length(sequence: SequenceState) -> int:
    """Return the number of tokens that have KV."""
    return 0 if sequence.space is None else len(sequence.space)


def _priority(sequence: SequenceState) -> int:
    return sequence.completion.request.priority


def _place(queue: Sequence[SequenceState], sequence: SequenceState, *, is_older: bool = False) -> int:
    """Return the place of `sequence` in a queue: behind all that are as urgent, or before them if it `is_older`."""
    priority, place = _priority(sequence), len(queue)
    while place and _priority(queue[place - 1]) >= priority + (not is_older):
        place -= 1
    return place
