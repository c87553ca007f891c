"""The trace: agents that call tools of 1 to 60 s. The optimum over its requests, which knows the future. No manager."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import Final, NamedTuple

PAGE: Final = 16
AGENTS: Final = 100
TURNS: Final = 40
TOOL_SECONDS: Final = (1.0, 60.0)
BEGINNING: Final = 50
"""Pages of instructions, with which an agent begins again after its task."""
LONGEST: Final = 900
"""Pages of a context, after which a task ends."""


class Request(NamedTuple):
    """One turn of an agent. now, back: seconds; the agent comes back at `back`.

    task:     the number of the task that it works on.
    known:    number of pages that its last turn left, and that this one begins with.
    pages:    number of pages of the whole context, after the answer.
    expected: seconds until `back`, as the caller expects them.
    """

    agent: int
    task: int
    known: int
    pages: int
    now: float
    back: float
    expected: float


def requests(seed: int, turns: int = TURNS, error: float = 0.0) -> list[Request]:
    """Return the requests of all agents in the order of their times.

    error: by what share the expected time of a tool is off, at most.
    """
    rng, errors = random.Random(seed), random.Random(seed + 1)
    pages, tasks = [rng.randrange(200, 800) for _ in range(AGENTS)], [0] * AGENTS
    known, found = [0] * AGENTS, list[Request]()
    due = [(rng.uniform(0.0, TOOL_SECONDS[1]), agent) for agent in range(AGENTS)]
    heapq.heapify(due)
    while len(found) < turns * AGENTS:
        now, agent = heapq.heappop(due)
        if pages[agent] > LONGEST:
            pages[agent], tasks[agent] = rng.randrange(200, 400), tasks[agent] + 1
            known[agent] = BEGINNING
        pages[agent] += rng.randrange(2, 12)
        seconds = rng.uniform(*TOOL_SECONDS)
        expected = seconds * (1 + errors.uniform(-error, error))
        found.append(Request(agent, tasks[agent], known[agent], pages[agent], now, now + seconds, expected))
        known[agent] = pages[agent]
        heapq.heappush(due, (now + seconds, agent))
    return found


def half_of_all(trace: Sequence[Request]) -> int:
    """Return half of the pages that all agents have at once, in the middle of the trace."""
    last = {request.agent: request.pages for request in trace[: len(trace) // 2]}
    return sum(last.values()) // 2


def optimum(trace: Sequence[Request], num_frames: int) -> int:
    """Return the tokens that are computed again if the page that is needed last is always evicted first."""
    held, back, again = [0] * AGENTS, [0.0] * AGENTS, 0
    for request in trace:
        agent = request.agent
        again += max(0, request.known - held[agent])  # after a task, the pages of its end are needed no more
        held[agent], back[agent] = request.pages, request.back
        while (excess := sum(held) - num_frames) > 0:
            last = max((other for other in range(AGENTS) if other != agent and held[other]), key=back.__getitem__)
            held[last] -= min(held[last], excess)
    return PAGE * again
