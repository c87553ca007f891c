"""`--trace FILE`: the lives of requests as a trace for Perfetto or chrome://tracing, in the Trace Event Format.

    steps                   a slice for each step of the engine
    request 0               | queued | prefill               | decode                    |
                                     | chunk | chunk | chunk | token | preempted | token |      slices within slices

Times are microseconds since the first event, exact to a nanosecond, so that slices lie within one another. The file is
written at the end; it is opened before, so that a bad path is refused before any work. It holds the tokens of answers,
so a new file is for its user alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from pagedkv.errors import InvalidRequest
from pagedkv.model.engine import Engine
from pagedkv.model.loop.events import Event, Events

STEPS, REQUESTS = 1, 2
"""The two processes of the trace, which has threads for its tracks."""

BEGINS: Final = {"admitted": "prefill", "token": "decode", "forked": "decode", "searched": "beam search"}
"""The phase of a life that an event begins. A token begins none in the last two."""


@contextmanager
def traced(engine: Engine, path: Path | None) -> Iterator[None]:
    """Record the events of all steps of the block, and write the trace, unless `path` is None.

    Raises: InvalidRequest if the file cannot be written
    """
    if path is None:
        yield
        return
    events = Events()
    with _written(path), open(path, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
        engine.events = events
        failed: BaseException | None = None
        try:
            yield
        except BaseException as error:  # raised behind `_written`: an OSError of the block is not one of the file
            failed = error
        engine.events = None
        json.dump({"traceEvents": trace_events(events.events), "displayTimeUnit": "ms"}, file)
    if failed is not None:
        raise failed


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into words."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest(f"cannot write the trace to {path}: {error.strerror}; give another file") from None


def trace_events(events: list[Event]) -> list[dict[str, Any]]:
    """Return the entries of a trace for all events."""
    if not events:
        return []
    zero, last = min(event.at for event in events), max(event.until for event in events)
    found = [_name("process_name", STEPS, 0, "engine"), _name("process_name", REQUESTS, 0, "requests")]
    found.append(_name("thread_name", STEPS, 1, "steps"))
    tracks: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        if event.kind == "step":
            found.append(_slice(zero, (STEPS, 1), "step", event.at, event.until, tokens=event.value))
        else:
            tracks.setdefault((event.request, event.sample), []).append(event)
    for thread, (number, life) in enumerate(sorted(tracks.items()), 1):
        name = f"request {number[0]}, sample {number[1]}" if number[1] else f"request {number[0]}"
        found.append(_name("thread_name", REQUESTS, thread, name))
        found += _track(zero, last, (REQUESTS, thread), life)
    return found


def _track(zero: float, last: float, place: tuple[int, int], life: list[Event]) -> Iterator[dict[str, Any]]:
    """Yield the slices of one completion: its phases, then what lies within them."""
    for name, begin, end, arguments in _phases(life, last):
        yield _slice(zero, place, name, begin, end, **arguments)
    tokens: dict[float, list[Event]] = {}
    rejected = {event.at: event.value for event in life if event.kind == "rolled_back"}
    for event in life:
        if event.kind == "token":
            tokens.setdefault(event.at, []).append(event)
    computed: dict[tuple[float, float], int] = {}
    for event in life:
        if event.kind == "chunk":  # one for each beam of a search
            computed[event.at, event.until] = computed.get((event.at, event.until), 0) + event.value
    for (begin, end), count in computed.items():
        made = tokens.get(end, [])
        name = "token" if made and count == len(made) + rejected.get(end, 0) else "chunk"
        details: dict[str, Any] = {"tokens": count, "token_ids": [event.value for event in made]}
        if any(event.logprob is not None for event in made):
            details["logprobs"] = [event.logprob for event in made]
        yield _slice(zero, place, name, begin, end, **details)
    for event in life:
        if event.kind == "rolled_back":
            yield _instant(zero, place, "rolled back", event.at, drafts=event.value)
        elif event.kind == "rejected":
            yield _instant(zero, place, f"rejected: {event.detail}", event.at, tokens=event.value)
        elif event.kind == "finished":
            yield _instant(zero, place, f"finished: {event.detail}", event.at, tokens=event.value)


def _phases(life: list[Event], last: float) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Yield (name, begin, end, arguments) of each phase of a life, and of each time that it waited preempted."""
    phase: tuple[str, float, dict[str, Any]] | None = None
    preempted: float | None = None
    is_output = False
    for event in life:
        if event.kind == "finished" and preempted is not None:
            yield "preempted", preempted, event.at, {}
            preempted = None
        if event.kind == "preempted":
            preempted = event.at
        elif event.kind == "queued":
            phase = ("queued", event.at, {"prompt_tokens": event.value})
        elif event.kind == "admitted" and preempted is not None:
            yield "preempted", preempted, event.at, {"found": event.value}
            preempted = None
        elif event.kind == "finished" or (event.kind in BEGINS and not (event.kind == "token" and is_output)):
            if phase:
                yield phase[0], phase[1], event.at, phase[2]
            is_output = event.kind != "admitted"
            arguments = {} if is_output else {"found": event.value}
            phase = (BEGINS[event.kind], event.at, arguments) if event.kind in BEGINS else None
    if preempted is not None:
        yield "preempted", preempted, last, {}
    if phase:
        yield phase[0], phase[1], last, phase[2]


def _nanoseconds(zero: float, at: float) -> int:
    return round((at - zero) * 1e9)


def _slice(zero: float, place: tuple[int, int], name: str, at: float, until: float, **arguments: Any) -> dict[str, Any]:
    begin, end = _nanoseconds(zero, at), _nanoseconds(zero, until)
    times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
    return {"ph": "X", "pid": place[0], "tid": place[1], "name": name, **times, "args": arguments}


def _instant(zero: float, place: tuple[int, int], name: str, at: float, **arguments: Any) -> dict[str, Any]:
    times = {"ts": _nanoseconds(zero, at) / 1000, "s": "t"}
    return {"ph": "i", "pid": place[0], "tid": place[1], "name": name, **times, "args": arguments}


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    """Return the entry that names a process or a thread."""
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
