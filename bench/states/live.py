"""Ours: the live `MemoryManager` serves the requests of a trace one after the other. It keeps integers only.

The pool has room for all pages, so that only states are evicted. Output is committed in pieces that end with a page;
a host that computes a token a step keeps the same states.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pagedkv.bench.states.rules import PAGE, Prefixes, Tally, known_pages
from pagedkv.bench.states.trace import START, Request, length, token_ids
from pagedkv.core import MemoryManager, Places, StatePool

NUM_FRAMES: Final = 1 << 17
ANY_NUMBER: Final = 20_000
"""States, more than a trace makes."""


def play(requests: Iterable[Request], policy: str, limit: int = 0) -> Tally:
    """Serve the requests of a trace. limit: states of the pool, those of the running request included; 0 for any."""
    pool = StatePool(limit or ANY_NUMBER, places=Places(boundary_tokens=(START,)), policy=policy)
    manager = MemoryManager(NUM_FRAMES, PAGE, states=pool)
    prefixes, tally = Prefixes(), Tally()
    for _, prompt, output in requests:
        tokens, possible, ids = length(prompt), known_pages(prefixes, prompt), token_ids(prompt + output)
        prefixes.add(prompt + output)
        space = manager.open(ids[:tokens])
        assert len(space) == possible, "a page was evicted, or the token ids of two prefixes are not those of messages"
        start = space.ready
        ends = [tokens, *range((tokens // PAGE + 1) * PAGE, len(ids), PAGE), len(ids)]
        for first, last in zip([start, *ends], ends, strict=False):
            plan = manager.plan([space], [last - first])
            manager.commit(plan, ids[first:last])
        space.release()
        tally.count(tokens, possible, tokens - start)
        states = manager.stats().states
        assert states, "the manager was made with states"
        tally.made, tally.held = states.published, max(tally.held, states.checkpoints)
    return tally
