"""The scheduler: which sequences compute how many tokens in the next step, and which sequence is preempted.

    waiting ──admit──▶ running ──finish──▶ gone     admit: the oldest first, while the watermark's frames stay free
       ▲                  │                         preempt: the newest first, when a plan is out of frames; its KV is
       └──── preempt ─────┘                             computed again later, or found in the prefix cache

Both queues are in order of arrival, and each running sequence is older than each waiting one. The oldest sequence is
never preempted and fits the pool alone (`Engine.submit` checks this). So each step computes something, and each
sequence finishes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedkv.core.arguments import whole
from pagedkv.core.recovery import assign_together
from pagedkv.errors import OutOfFrames, QuotaExceeded
from pagedkv.model.loop import gangs
from pagedkv.model.loop.sequence import Chunk, SequenceState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagedkv.cache import PagedKVCache, PlannedBatch
    from pagedkv.core import AddressSpace
    from pagedkv.model.loop.gangs import Turn
    from pagedkv.model.request import Request
    from pagedkv.model.ways.speculation import Speculation

    Plan = Callable[[list[AddressSpace], list[int]], PlannedBatch]


@dataclass(frozen=True)
class Limits:
    """The most that one step may do.

    max_batch_tokens: new tokens in a step, summed over all sequences. max_sequences: sequences running at once.
    prefill_chunk:    tokens of one prompt in a step; None for no limit but max_batch_tokens.
    max_waiting:      requests that wait for their first step; `Engine.submit` refuses more. None for no limit.
    """

    max_batch_tokens: int = 2048
    max_sequences: int = 256
    prefill_chunk: int | None = None
    max_waiting: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_sequences", "prefill_chunk", "max_waiting"):
            value = getattr(self, name)
            if value is not None or name in ("max_batch_tokens", "max_sequences"):
                whole(value, f"Limits.{name}", 1)


class Scheduler:
    """Two queues over one cache, and the only part of the model that opens, forks and releases address spaces."""

    def __init__(
        self, cache: PagedKVCache, limits: Limits, plan: Plan | None = None, speculation: Speculation | None = None
    ) -> None:
        """Begin without sequences. plan: plans the steps; None for `cache.plan`. speculation: adds drafts to them."""
        self.cache: PagedKVCache = cache
        self.limits: Limits = limits
        self.speculation: Speculation | None = speculation
        self._plan: Plan = plan or cache.plan
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.preemptions: int = 0
        # Frames available when the head of the queue was refused: it is tried again only when there are more.
        self._available_at_refusal = -1
        self.searching: set[Request] = set()
        """The requests with beams that may have sequences."""

    def add(self, sequence: SequenceState) -> None:
        """Append `sequence` to the waiting queue."""
        if sequence.completion.request.search is not None:
            self.searching.add(sequence.completion.request)
        self.waiting.append(sequence)

    def next_step(self) -> tuple[list[Chunk], PlannedBatch | None]:
        """Choose the chunks of the next step and plan them; preempt sequences until the plan fits.

        Returns: the chunks and their plan; ([], None) if no sequence can compute anything.
        """
        if self.searching:
            self.searching = {request for request in self.searching if not request.finished}
        chunks = self._choose(admit=True)
        if self.speculation is not None:
            chunks = self.speculation.extend(chunks, self.limits.max_batch_tokens)
        while chunks:
            spaces = [chunk.sequence.space for chunk in chunks if chunk.sequence.space is not None]
            try:
                return chunks, self._plan(spaces, [chunk.num_tokens for chunk in chunks])
            except OutOfFrames as error:
                if any(chunk.drafts for chunk in chunks):  # a guess is worth no other sequence's frames
                    chunks = [chunk.without_drafts() for chunk in chunks]
                    continue
                # At a quota, only the tenant's own sequences can give frames back.
                tenant = error.tenant if isinstance(error, QuotaExceeded) else None
                candidates = [s for s in self.running if tenant is None or s.completion.request.tenant == tenant]
                is_alone = len(candidates) == 1 or len(candidates) == len(self._gang(candidates[-1]))
                if is_alone and tenant is not None:  # the quota is too small for this request alone
                    self._end(candidates[0], str(error))
                    chunks = self._choose(admit=False)
                    continue
                if is_alone:
                    raise
                self.preempt(candidates[-1])
                chunks = self._choose(admit=False)
        return [], None

    def _end(self, sequence: SequenceState, error: str) -> None:
        """End the request of `sequence` with an error, and take it out of its queue."""
        for completion in sequence.completion.request.completions:
            completion.end("error", error)
        for member in self._gang(sequence):
            self.remove(member)

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """Let `child` continue from the tokens of `parent`, sharing its frames, and run beside it."""
        assert parent.space is not None
        child.space = parent.space.fork()
        self.running.insert(self.running.index(parent) + child.completion.index, child)

    def follow(self, turn: Turn) -> None:
        """Let the live beams of a turn take the places and the frames of the members of their gang."""
        spaces = [member.space for member in turn.members if member.space is not None]
        members = gangs.members_of(turn, self.cache.reorder(spaces, turn.parents))
        first, last = self.running.index(turn.members[0]), self.running.index(turn.members[-1])
        self.running[first : last + 1] = members

    def remove(self, sequence: SequenceState) -> None:
        """Take `sequence` out of its queue and give back its frames."""
        self._available_at_refusal = -1  # `sequence` may be the refused one, or free the frames that it needs
        if sequence.space is None:
            self.waiting.remove(sequence)
            return
        if self.speculation is not None:
            self.speculation.drafter.forget(sequence)
        sequence.space.release()  # first: if it raises, nothing was changed
        sequence.space = None
        self.running.remove(sequence)

    def preempt(self, sequence: SequenceState) -> None:
        """Give back the frames of `sequence` and make it the next to admit. Call it for the newest: order is kept.

        The beams of a search are preempted together.
        """
        for member in (gang := self._gang(sequence)):
            self.remove(member)
        if sequence.completion.request.search is not None:
            sequence = gangs.make_trunk(gang[0])
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _gang(self, sequence: SequenceState) -> list[SequenceState]:
        """Return the sequences that are preempted with `sequence`."""
        request = sequence.completion.request
        return [sequence] if request.search is None else [s for s in self.running if s.completion.request is request]

    def restart(self, sequences: Sequence[SequenceState]) -> None:
        """Let `sequences` wait, and forget all others: after an interrupt, which may have left the queues half changed.

        The frames of the sequences that ran are given back. A call that was interrupted can be repeated.
        """
        for sequence in (*self.running, *self.waiting):
            if sequence.space is not None and not self.cache.manager.is_stale(sequence.space):
                sequence.space.release()
        queues = (self, "waiting", deque(sequences)), (self, "running", list[SequenceState]())
        searching = {s.completion.request for s in sequences if s.completion.request.search is not None}
        assign_together((*queues, (self, "_available_at_refusal", -1), (self, "searching", searching)))

    def sequences_of(self, request: Request) -> list[SequenceState]:
        """Return the sequences of `request`, running or waiting."""
        return [s for s in (*self.running, *self.waiting) if s.completion.request is request]

    def _choose(self, *, admit: bool) -> list[Chunk]:
        """Return the chunks of the next step within the limits: running sequences, then, if `admit`, waiting ones."""
        budget, longest = self.limits.max_batch_tokens, self.limits.prefill_chunk or self.limits.max_batch_tokens
        chunks: list[Chunk] = []
        # Decoding sequences first: a reader waits for their text.
        running = [(sequence, sequence.remaining) for sequence in self.running]
        most = gangs.most_tokens(running) if self.searching else {}
        for sequence, remaining in sorted(running, key=lambda pair: pair[1] > 1):
            num_tokens = min(remaining, longest, budget)
            if most:
                num_tokens = min(num_tokens, most.get(sequence, num_tokens))
            if num_tokens:
                chunks.append(Chunk(sequence, num_tokens, remaining))
                budget -= num_tokens
        if most:
            chunks = gangs.whole_gangs(chunks, most)
        while admit and budget and self.waiting and self._admit(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            remaining = sequence.remaining
            num_tokens = min(remaining, longest, budget)
            chunks.append(Chunk(sequence, num_tokens, remaining))
            budget -= num_tokens
        return chunks

    def _admit(self, sequence: SequenceState) -> bool:
        """Open an address space for `sequence` if its frames and those promised to running sequences fit the pool.

        With no sequence running, admit it in any case. Returns: whether it was admitted.
        """
        cache, everyone = self.cache, (*self.running, sequence)
        num_sequences = sum(s.num_receivers for s in everyone)
        if self.running and num_sequences > self.limits.max_sequences:
            return False
        if self.running and cache.available <= self._available_at_refusal:
            return False
        request = sequence.completion.request
        tenant = request.tenant
        space = cache.open(sequence.tokens, tenant=tenant)
        sequence.space = space
        own = sum(self._frames_needed(s) for s in everyone if s.completion.request.tenant == tenant)
        fits = sum(map(self._frames_needed, everyone)) <= cache.available - cache.reserve
        fits = fits and cache.admits(own, tenant=tenant)
        if self.running and not fits:
            sequence.space = None
            space.release()
            self._available_at_refusal = cache.available
            return False
        self._available_at_refusal = -1
        for completion in sequence.receivers if request.search is None else request.completions:
            if not completion.was_admitted:
                completion.cached_tokens, completion.was_admitted = len(space), True
        return True

    def _frames_needed(self, sequence: SequenceState) -> int:
        """Count the frames that the remaining tokens of `sequence` will map, and one tail for each sample to fork."""
        frames_for, at_once = self.cache.frames_for, self.limits.max_batch_tokens
        computed = len(sequence.tokens) - sequence.remaining
        unmapped = frames_for(len(sequence.tokens), at_once) - frames_for(computed, at_once)
        return unmapped + sequence.num_receivers - 1
