"""Forget: unpublish everything computed so far, as after an update of the weights. Compiled functions over `State`.

    CACHED   ──▶ FREE, or RETIRED while a plan or an epoch still reads the frame
    MAPPED   stays mapped: its space runs on and publishes no page any more (`no_publish`), as its pages mix old and new

O(frames + spaces), however much was published. This file does not know pins: a manager that has pins refuses to forget.
"""

from __future__ import annotations

from pagedkv.core.compiled import compiled, inner
from pagedkv.core.pool import free_runs
from pagedkv.core.pool.eviction import delist
from pagedkv.core.pool.frames import vacate
from pagedkv.core.prefix import index
from pagedkv.core.prefix.events import log_cleared
from pagedkv.core.state import (
    AMONG_FENCED,
    CACHED,
    CACHED_FENCED,
    IN_USE,
    NIL,
    NUM_CACHED,
    NUM_RETIRED,
    RETIRED,
    SUCCESSOR,
    UNUSED,
    State,
)


@compiled
def forget_pages(s: State) -> int:
    """Unpublish every page, free the cached frames, and return how many frames that freed."""
    freed = 0
    for frame in range(len(s.frames)):
        if s.frames[frame].published:
            index.remember(s, frame)
            s.frames[frame].published = 0
            s.frames[frame].floor = 0
            freed += _free_cached(s, frame)
    for bucket in range(len(s.bucket)):
        s.bucket[bucket] = NIL
    for root in range(len(s.roots)):
        s.roots[root, IN_USE] = 0
        s.roots[root, SUCCESSOR] = NIL
    for asid in range(0, len(s.spaces), len(s.groups)):
        if s.spaces[asid].status != UNUSED:
            s.spaces[asid].complete = 0
            s.spaces[asid].no_publish = 1
            s.roots[s.spaces[asid].root, IN_USE] += 1
    if len(s.log):
        log_cleared(s.log, s.reg)
    return freed


@inner
def _free_cached(s: State, frame: int) -> int:
    """Free or retire `frame`, which is no longer published, if it was cached. Return 1 if it is free now."""
    if s.frames[frame].status != CACHED:
        return 0
    s.reg[NUM_CACHED] -= 1
    if s.frames[frame].pins > 0:
        s.reg[CACHED_FENCED] -= s.frames[frame].place == AMONG_FENCED
        s.frames[frame].status = RETIRED
        s.reg[NUM_RETIRED] += 1
        return 0
    delist(s.frames, s.reg, frame)
    vacate(s.frames, s.reg, frame)
    free_runs.put(s.chunks, s.reg, frame, 1)
    return 1
