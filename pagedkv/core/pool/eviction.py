"""Eviction: take the frame that the policy evicts first off its list and out of the index, and free it.

eviction_order.py chooses the victim. quotas.py chooses the account that gives a frame.
"""

from __future__ import annotations

import numpy as np

from pagedkv.core.compiled import inlined, inner
from pagedkv.core.pool import frames
from pagedkv.core.pool.accounts import count
from pagedkv.core.pool.eviction_order import delist, victim
from pagedkv.core.prefix import index
from pagedkv.core.state import EVICTED, EVICTIONS, I32, I64, NIL, NUM_CACHED, NUM_FREE, USED, State


@inlined
def evict(s: State, account: int) -> int:
    """Free the frame of `account` that the policy evicts first, and return its number; -1 if there is none."""
    frame = victim(s, account)
    if frame != NIL:
        delist(s.frames, s.reg, frame)
        index.remember(s, frame)
        s.reg[NUM_CACHED] -= 1
        s.reg[EVICTIONS] += 1
        count(s.frames, s.reg, frame, EVICTED, 1)
        frames.free(s, frame)
    return frame


@inner
def set_aside(s: State, account: int) -> int:
    """Unlink the frame of `account` that is evicted next from its list, and return its number; -1 if there is none.

    The frame is not evicted: `put_back` restores what this function modifies.
    """
    frame = victim(s, account)
    if frame != NIL:
        place = s.frames[frame].place
        delist(s.frames, s.reg, frame)
        s.frames[frame].place = place
        count(s.frames, s.reg, frame, USED, -1)
    return frame


@inner
def put_back(s: State, aside: I32, reg: I64) -> None:
    """Link the frames `aside`, in the order in which `set_aside` returned them, to their lists again.

    reg: int64 [registers], the registers as they were before the first of them was set aside
    """
    for i in range(len(aside) - 1, -1, -1):
        frame = aside[i]
        if s.frames[frame].newer != NIL:
            s.frames[s.frames[frame].newer].older = frame
    for register in range(len(reg)):
        s.reg[register] = reg[register]


@inner
def reclaim(s: State, wanted: int) -> None:
    """Evict until `wanted` frames are free; for pools without quotas. The caller has checked that there are enough."""
    while s.reg[NUM_FREE] < wanted:
        evict(s, np.int64(0))
