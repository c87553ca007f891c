"""Forget: unpublish everything computed so far, as after an update of the weights. Compiled functions over `State`.

    CACHED   ──▶ FREE, or RETIRED while a plan or an epoch still reads the frame
    MAPPED   stays mapped: its space runs on and publishes no page any more (`no_publish`), as its pages mix old and new

O(frames + spaces), however much was published. This file does not know pins: a manager that has pins refuses to forget.
"""

from __future__ import annotations

from pagedkv.core.compiled import compiled
from pagedkv.core.pool import frames
from pagedkv.core.prefix import index
from pagedkv.core.prefix.events import log_cleared
from pagedkv.core.state import CACHED, IN_USE, NIL, UNUSED, State


@compiled
def forget_pages(s: State) -> int:
    """Unpublish every page, free the cached frames, and return how many frames that freed."""
    freed = 0
    for frame in range(len(s.frames)):
        if s.frames[frame].published:
            index.remember(s, frame)
            s.frames[frame].published = 0
            s.frames[frame].floor = 0
            if s.frames[frame].status == CACHED:
                freed += frames.free_cached(s, frame)
    for bucket in range(len(s.bucket)):
        s.bucket[bucket] = NIL
    for root in range(len(s.roots)):
        s.roots[root, IN_USE] = 0
    for asid in range(0, len(s.spaces), len(s.groups)):
        if s.spaces[asid].status != UNUSED:
            s.spaces[asid].complete = 0
            s.spaces[asid].no_publish = 1
            s.roots[s.spaces[asid].root, IN_USE] += 1
    if len(s.log):
        log_cleared(s.log, s.reg)
    return freed
