"""The scheduler: who takes part in the next step, with how many tokens, and who must give way.

    waiting ──admit──▶ running ──finish──▶ gone        admit:   oldest first, while the watermark's share of frames stays free
       ▲                  │                            preempt: newest first, when a plan is out of frames; it is computed again later,
       └──── preempt ─────┘                                     mostly from the prefix cache

Both queues are in order of arrival, and whoever runs is older than whoever waits. The oldest gives way to nobody and fits the pool alone
(the engine saw to that when it was submitted), so every step computes something and no one waits for ever.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedkv.errors import InvalidRequest, OutOfFrames, QuotaExceeded
from pagedkv.model.request import Completion, Request, StopStrings
from pagedkv.model.sampler import skip

if TYPE_CHECKING:
    import torch

    from pagedkv.cache import PagedKVCache, PlannedBatch
    from pagedkv.core import AddressSpace
    from pagedkv.model.tokenizer import TextStream


@dataclass(frozen=True)
class Limits:
    """How much one step may do.

    max_batch_tokens: new tokens in a step, over all sequences. max_sequences: running at once.
    prefill_chunk:    tokens of one prompt in a step; None for as many as the batch holds.
    """

    max_batch_tokens: int = 2048
    max_sequences: int = 256
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_sequences", "prefill_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"Limits.{name} is {value}; it must be at least 1")


@dataclass(eq=False)
class Sequence:
    """One completion on its way through the engine: its tokens, and the address space that holds the KV of the first of them.

    drawn: for how many tokens something was drawn from the generator. admitted: whether it ever ran.
    """

    completion: Completion
    tokens: list[int]
    generator: torch.Generator
    stream: TextStream
    stops: StopStrings
    space: AddressSpace | None = None
    drawn: int = 0
    admitted: bool = False

    def rewind(self) -> None:
        """Start the generator anew and skip what was drawn for the tokens that are there."""
        params, num_tokens = self.completion.request.params, len(self.completion.token_ids)
        self.generator, self.drawn = params.generator(self.completion.index), num_tokens
        skip(self.generator, num_tokens)

    @property
    def remaining(self) -> int:
        """Tokens whose KV is not yet computed; the last one's logits give the next token."""
        return len(self.tokens) - (len(self.space) if self.space is not None else 0)

    @property
    def heads(self) -> list[Completion]:
        """The completions whose next token comes from this sequence's logits: all samples without one, while only the prompt is there."""
        request = self.completion.request
        first = self.completion.index == 0 and len(self.tokens) == len(request.prompt_ids)
        return (
            [c for c in request.completions if not c.token_ids and not c.finish_reason] if first else [self.completion]
        )


Work = list[tuple[Sequence, int]]


class Scheduler:
    """Two queues over one cache. It opens, forks and releases address spaces; nobody else in the model does."""

    def __init__(self, cache: PagedKVCache, limits: Limits) -> None:
        self.cache: PagedKVCache = cache
        self.limits: Limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions: int = 0
        self._refused_at = (
            -1
        )  # frames available when the head of the queue was refused: not asked again until there are more

    def add(self, sequence: Sequence) -> None:
        """Join the end of the queue."""
        self.waiting.append(sequence)

    def next_step(self) -> tuple[Work, PlannedBatch | None]:
        """Who computes how many tokens now, and the plan for it; preempts until it fits. (nothing, None) when there is nothing to do."""
        work = self._choose(admit=True)
        while work:
            try:
                return work, self.cache.plan(
                    [s.space for s, _ in work if s.space is not None], [count for _, count in work]
                )
            except OutOfFrames as why:  # at a quota only the tenant's own sequences make room
                blamed = [
                    s
                    for s in self.running
                    if not isinstance(why, QuotaExceeded) or s.completion.request.tenant == why.tenant
                ]
                if len(blamed) == 1:
                    raise
                self.preempt(blamed[-1])
                work = self._choose(admit=False)
        return [], None

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` continues where `parent` stands, sharing its frames, and runs beside it."""
        assert parent.space is not None
        child.space, child.admitted = parent.space.fork(), True
        self.running.insert(self.running.index(parent) + child.completion.index, child)

    def remove(self, sequence: Sequence) -> None:
        """It is finished or cancelled: its frames are given back, wherever it was."""
        self._refused_at = -1  # whoever was refused may be gone, or what it was refused for
        if sequence.space is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        sequence.space.release()
        sequence.space = None

    def preempt(self, sequence: Sequence) -> None:
        """It gives its frames back and is the next to be admitted. The newest first: the queues stay in order."""
        self.remove(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def of(self, request: Request) -> list[Sequence]:
        """The sequences of `request`, running or waiting."""
        return [s for s in (*self.running, *self.waiting) if s.completion.request is request]

    def _choose(self, *, admit: bool) -> Work:
        budget, chunk = self.limits.max_batch_tokens, self.limits.prefill_chunk or self.limits.max_batch_tokens
        work: Work = []
        for sequence in sorted(
            self.running, key=lambda s: s.remaining > 1
        ):  # those that decode first: someone is reading
            count = min(sequence.remaining, chunk, budget)
            if count:
                work.append((sequence, count))
                budget -= count
        while admit and budget and self.waiting and self._admit(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            count = min(sequence.remaining, chunk, budget)
            work.append((sequence, count))
            budget -= count
        return work

    def _admit(self, sequence: Sequence) -> bool:
        manager, everyone = self.cache.manager, (*self.running, sequence)
        if self.running and (
            sum(len(s.heads) for s in everyone) > self.limits.max_sequences or manager.available <= self._refused_at
        ):
            return False
        tenant = sequence.completion.request.tenant
        space = self.cache.open(sequence.tokens, tenant=tenant)
        sequence.space = space
        own = sum(self._wanted(s) for s in everyone if s.completion.request.tenant == tenant)
        fits = sum(map(self._wanted, everyone)) <= manager.available - manager.reserve and manager.admits(
            own, tenant=tenant
        )
        if self.running and not fits:
            sequence.space = None
            space.release()
            self._refused_at = manager.available
            return False
        self._refused_at = -1
        for completion in () if sequence.admitted else sequence.heads:
            completion.cached_tokens = len(space)
        sequence.admitted = True
        return True

    def _wanted(self, sequence: Sequence) -> int:
        """Frames that what is left of `sequence` will take, promised and not yet planned, and a tail for each sample to come."""
        needed, at_once = self.cache.frames_for, self.limits.max_batch_tokens
        unmapped = needed(len(sequence.tokens), at_once) - needed(len(sequence.tokens) - sequence.remaining, at_once)
        return unmapped + len(sequence.heads) - 1
