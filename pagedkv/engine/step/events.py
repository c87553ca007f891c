"""Events: which step computed how many tokens of which completion, and the same as a trace for a viewer.

    engine.events = []                     before the first step: each step appends a StepEvent
    json.dump(chrome_trace(engine.events), file)

    steps                   a slice for each step of the engine
    request 0               | queued | prefill               | decode                    |
                                     | chunk | chunk | chunk | chunk | chunk | ..             slices within slices

The times of a life (queued, first token, end) are those of its completion. A gap between two chunks is a preemption,
or a step in which the sequence waited. A step that is interrupted leaves no event.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pagedkv.engine.requests.request import Completion
    from pagedkv.engine.requests.sequence import Chunk

STEPS, REQUESTS = 1, 2
"""The two processes of a trace, which has threads for its tracks."""


class StepEvent(NamedTuple):
    """A step. began, ended: seconds of time.perf_counter(). chunks: tokens computed for each completion"""

    began: float
    ended: float
    chunks: list[tuple[Completion, int]]

    @classmethod
    def of(cls, began: float, chunks: Sequence[Chunk]) -> Self:
        """Return the event of a step that ends now."""
        return cls(began, time.perf_counter(), [(c.sequence.completion, c.num_tokens) for c in chunks])


def chrome_trace(events: Iterable[StepEvent]) -> dict[str, Any]:
    """Return the steps, and the lives of all requests in them, in the Trace Event Format of Perfetto and Chrome.

    Times are microseconds since the first request was submitted.
    """
    events = [event for event in events if event.chunks]
    completions = dict.fromkeys(completion for event in events for completion, _ in event.chunks)
    lives = {completion: track for track, completion in enumerate(completions)}
    numbers = {request: number for number, request in enumerate(dict.fromkeys(life.request for life in lives))}
    zero = min([*(event.began for event in events), *(life.request.submitted_at for life in lives)], default=0.0)

    def a_slice(process: int, track: int, name: str, begin: float, end: float, **args: int) -> dict[str, Any]:
        begin_us = round(1e6 * (begin - zero), 3)
        span = {"ts": begin_us, "dur": round(1e6 * (end - zero) - begin_us, 3)}
        return {"ph": "X", "pid": process, "tid": track, "name": name, **span, "args": args}

    def a_name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "pid": process, "tid": track, "name": kind, "args": {"name": name}}

    found = [a_name("process_name", STEPS, 0, "engine"), a_name("process_name", REQUESTS, 0, "requests")]
    for life, track in lives.items():
        found.append(a_name("thread_name", REQUESTS, track, f"request {numbers[life.request]}, sample {life.index}"))
        times = [life.request.submitted_at, life.admitted_at, life.first_token_at]
        times = [*(at for at in times if at), life.finished_at or life.last_token_at]
        for name, begin, end in zip(("queued", "prefill", "decode"), times, times[1:], strict=False):
            found.append(a_slice(REQUESTS, track, name, begin, max(begin, end)))
    for event in events:
        tokens = sum(count for _, count in event.chunks)
        found.append(a_slice(STEPS, 1, "step", event.began, event.ended, tokens=tokens))
        found += [a_slice(REQUESTS, lives[c], "chunk", event.began, event.ended, tokens=n) for c, n in event.chunks]
    return {"traceEvents": found, "displayTimeUnit": "ms"}
