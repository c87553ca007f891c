"""The meter: totals and latencies of the steps so far. Knows the counts of a cache and the times of outputs; no text.

a new request    ─▶ queue ───▶ requests, prompt tokens
a token          ─▶ take ────▶ output tokens, the time to a first token, the time between two steps with tokens
a step           ─▶ measure ─▶ steps, computed tokens, waste, the time of a step
a request's end  ─▶ ended ───▶ reasons, and the phases of latencies
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pagedkv.engine.requests.latency import Histogram, Percentiles

if TYPE_CHECKING:
    from pagedkv.cache import PagedKVCache
    from pagedkv.engine.requests.request import Completion, Request
    from pagedkv.engine.step.scheduler import Scheduler

MEASURED: Final = 8
"""One step in MEASURED is measured, because measuring takes as long as the rest of a small step."""


@dataclass
class Times:
    """The distribution of each latency, in seconds.

    step:           a step that computed tokens
    first_token:    from submission to the first token
    between_tokens: from one step that gave an output tokens to the next; drafts come with the token before them
    queue, prefill, decode: the phases of `Latency`, for outputs that ended with "stop" or "length"
    total:          from submission to the end of such an output
    """

    step: Histogram = field(default_factory=Histogram)
    first_token: Histogram = field(default_factory=Histogram)
    between_tokens: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)
    prefill: Histogram = field(default_factory=Histogram)
    decode: Histogram = field(default_factory=Histogram)
    total: Histogram = field(default_factory=Histogram)

    def percentiles(self) -> dict[str, Percentiles]:
        """Return the percentiles of each distribution, by its name."""
        return {name: histogram.percentiles() for name, histogram in vars(self).items()}


@dataclass(frozen=True)
class EngineStats:
    """The sequences of this moment, and totals of an engine's past.

    steps:           number of steps that computed tokens
    requests:        queued requests. prompt_tokens: tokens of their prompts
    computed_tokens: tokens whose KV was computed, of prompts, outputs and drafts
    output_tokens:   tokens of completions
    drafts:          computed drafts. drafts_accepted: drafts that equalled the drawn token
    finished:        completions by finish_reason. receipts: prompts by the reason of their receipt
    retained:        ended outputs that asked for `retain_s`, by the answer of `advise`
    latency:         percentiles in seconds, by the names of `Times`
    """

    running: int
    waiting: int
    preemptions: int
    steps: int
    requests: int
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    drafts: int
    drafts_accepted: int
    finished: dict[str, int]
    receipts: dict[str, int]
    retained: dict[str, int]
    latency: dict[str, Percentiles]


@dataclass
class Meter:
    """Totals so far. One step in MEASURED adds, at its end, the slots then mapped and those that hold no token.

    steps:  all measured steps, including steps without work
    tokens: tokens of all sequences, over the measured steps; a token that several share counts for each
    others: see EngineStats
    """

    steps: int = 0
    slots_mapped: int = 0
    slots_wasted: int = 0
    tokens: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    times: Times = field(default_factory=Times)

    @property
    def waste(self) -> float:
        """Share of the mapped slots that held no token, over the measured steps: 0.0 to 1.0."""
        return self.slots_wasted / self.slots_mapped if self.slots_mapped else 0.0

    @property
    def saved(self) -> float:
        """Share of the sequences' tokens that lie in a slot of another sequence, over the measured steps."""
        held = self.slots_mapped - self.slots_wasted
        return max(0.0, 1 - held / self.tokens) if self.tokens else 0.0

    def measure(self, cache: PagedKVCache, began: float, num_tokens: int) -> None:
        """Count a step that ended, and computed so many tokens. began: seconds of time.perf_counter()"""
        if self.steps % MEASURED == 0:
            now = cache.stats()
            self.slots_mapped += now.slots_mapped
            self.slots_wasted += now.slots_wasted
            if all(spec.window is None for spec in cache.specs):  # else most tokens lie in no slot any more
                self.tokens += now.tokens
        self.steps += 1
        if num_tokens:
            self.computed_tokens += num_tokens
            self.times.step.add(time.perf_counter() - began)

    def stats(self, *, waiting: int, scheduler: Scheduler) -> EngineStats:
        """Return the totals of the meter and of a scheduler."""
        guess = scheduler.speculation
        return EngineStats(
            running=len(scheduler.running),
            waiting=waiting,
            preemptions=scheduler.preemptions,
            steps=sum(self.times.step.counts),
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
            computed_tokens=self.computed_tokens,
            output_tokens=self.output_tokens,
            drafts=guess.num_drafts if guess else 0,
            drafts_accepted=guess.num_accepted if guess else 0,
            finished=dict(self.finished),
            receipts=dict(scheduler.receipts),
            retained=dict(scheduler.retained),
            latency=self.times.percentiles(),
        )

    def queue(self, request: Request) -> None:
        """Count a request that was submitted."""
        self.requests += 1
        self.prompt_tokens += len(request.prompt_ids)

    def take(self, completion: Completion, now: float) -> None:
        """Count a token that a completion gets now, and note the time. Tokens of one step come at one time."""
        self.output_tokens += 1
        if not completion.first_token_at:
            completion.first_token_at = now
            self.times.first_token.add(now - completion.request.submitted_at)
        elif now > completion.last_token_at:
            self.times.between_tokens.add(now - completion.last_token_at)
        completion.last_token_at = now

    def ended(self, request: Request) -> None:
        """Count the completions of a request that is done with."""
        times = self.times
        for completion in request.completions:
            self.finished[completion.finish_reason] += 1
            self.output_tokens += len(completion.token_ids) if request.search else 0  # no other way brought them here
            if completion.finish_reason in ("stop", "length"):
                spent = completion.latency
                times.queue.add(spent.queue_s)
                times.prefill.add(spent.prefill_s)
                times.decode.add(spent.decode_s)
                times.total.add(spent.total_s)
                if request.search:
                    times.first_token.add(completion.ttft_s)
