"""Frames: who owns which piece of the pool. Compiled functions over `State`; no sequences, no tensors here.

            take                  drop to 0, published
   FREE ───────────▶ MAPPED ───────────────────────────▶ CACHED
    ▲                 │  ▲                                │  │
    └─────────────────┘  └──────────── share ─────────────┘  │
    ▲   drop to 0 (by way of RETIRED while pinned)           │
    └───────────────────────── evict ────────────────────────┘

Held at every return: I1, I2, I7. The evictable frames (cached, not pinned) form a doubly linked list from OLDEST to NEWEST. Frames enter it
at NEWEST, tail of the sequence first, and a page is never touched without its prefix; so a page always stands before its prefix in the
list, and taking from OLDEST never orphans a suffix (I9). Everything here is O(1) a frame, whatever the size of the pool.
"""

from __future__ import annotations

from typing import Final

from numba import njit

from pagedkv.core import index
from pagedkv.core.state import (
    CACHED,
    EVICTIONS,
    FREE,
    MAPPED,
    NEWEST,
    NUM_CACHED,
    NUM_EVICTABLE,
    NUM_FREE,
    NUM_RETIRED,
    OLDEST,
    PEAK,
    RETIRED,
    State,
)

NOBODY: Final = -1


@njit(cache=True)
def _enlist(s: State, frame: int) -> None:
    newest = s.reg[NEWEST]
    s.frames[frame].older = newest
    s.frames[frame].newer = NOBODY
    if newest == NOBODY:
        s.reg[OLDEST] = frame
    else:
        s.frames[newest].newer = frame
    s.reg[NEWEST] = frame
    s.reg[NUM_EVICTABLE] += 1


@njit(cache=True)
def _delist(s: State, frame: int) -> None:
    older, newer = s.frames[frame].older, s.frames[frame].newer
    if older == NOBODY:
        s.reg[OLDEST] = newer
    else:
        s.frames[older].newer = newer
    if newer == NOBODY:
        s.reg[NEWEST] = older
    else:
        s.frames[newer].older = older
    s.reg[NUM_EVICTABLE] -= 1


@njit(cache=True)
def _free(s: State, frame: int) -> None:
    s.frames[frame].status = FREE
    s.free[s.reg[NUM_FREE]] = frame
    s.reg[NUM_FREE] += 1


@njit(cache=True)
def evict(s: State) -> int:
    """Free the oldest evictable frame and name it; -1 if there is none."""
    frame = s.reg[OLDEST]
    if frame != NOBODY:
        _delist(s, frame)
        index.remove(s, frame)
        s.reg[NUM_CACHED] -= 1
        s.reg[EVICTIONS] += 1
        _free(s, frame)
    return frame


@njit(cache=True)
def take(s: State) -> int:
    """A free frame, or else the oldest evictable one, mapped once. The caller has made sure that there is one."""
    if s.reg[NUM_FREE] == 0:
        evict(s)
    s.reg[NUM_FREE] -= 1
    frame = s.free[s.reg[NUM_FREE]]
    s.frames[frame].refs = 1
    s.frames[frame].status = MAPPED
    s.frames[frame].generation += 1
    mapped = len(s.frames) - s.reg[NUM_FREE] - s.reg[NUM_CACHED] - s.reg[NUM_RETIRED]
    s.reg[PEAK] = max(s.reg[PEAK], mapped)
    return frame


@njit(cache=True)
def share(s: State, frame: int) -> None:
    """One more page-table entry names `frame`, which is mapped, cached, or retired and about to be restored."""
    s.frames[frame].refs += 1
    if s.frames[frame].status == CACHED:
        if s.frames[frame].pins == 0:
            _delist(s, frame)
        s.reg[NUM_CACHED] -= 1
        mapped = len(s.frames) - s.reg[NUM_FREE] - s.reg[NUM_CACHED] - s.reg[NUM_RETIRED]
        s.reg[PEAK] = max(s.reg[PEAK], mapped)
    elif s.frames[frame].status == RETIRED:
        s.reg[NUM_RETIRED] -= 1
    s.frames[frame].status = MAPPED


@njit(cache=True)
def drop(s: State, frame: int, keep: bool) -> None:
    """One page-table entry less names `frame`. The last one leaves it cached if it is published and its prefix stays (`keep`)."""
    s.frames[frame].refs -= 1
    if s.frames[frame].refs > 0:
        return
    if s.frames[frame].published and keep:
        s.frames[frame].status = CACHED
        s.reg[NUM_CACHED] += 1
        if s.frames[frame].pins == 0:
            _enlist(s, frame)
        return
    if s.frames[frame].published:
        index.remove(s, frame)
    if s.frames[frame].pins > 0:
        s.frames[frame].status = RETIRED
        s.reg[NUM_RETIRED] += 1
    else:
        _free(s, frame)


@njit(cache=True)
def pin(s: State, frame: int) -> None:
    """`frame` may be neither evicted nor reused until it is unpinned as often (I7)."""
    if s.frames[frame].pins == 0 and s.frames[frame].status == CACHED:
        _delist(s, frame)
    s.frames[frame].pins += 1


@njit(cache=True)
def unpin(s: State, frame: int) -> None:
    """One pin less; the last one lets a cached frame be evicted and a retired one be free."""
    s.frames[frame].pins -= 1
    if s.frames[frame].pins == 0:
        if s.frames[frame].status == CACHED:
            _enlist(s, frame)
        elif s.frames[frame].status == RETIRED:
            s.reg[NUM_RETIRED] -= 1
            _free(s, frame)
