"""Frames: who owns which piece of the pool. Compiled functions over `State`; no sequences, no tensors here.

            take                  drop to 0, published
   FREE ───────────▶ MAPPED ───────────────────────────▶ CACHED
    ▲                 │  ▲                                │  │
    └─────────────────┘  └──────────── share ─────────────┘  │
    ▲   drop to 0 (by way of RETIRED while pinned)           │
    └───────────────────────── evict ────────────────────────┘

Held at every return: I1, I2, I7. Free frames are linked through `newer`: what was dropped last is taken next, its bytes are the likeliest
to be in a cache. The cached frames that are not pinned stand on the lists of eviction.py.

Fences. While an epoch is open, work in flight may still read what is dropped: such a frame gets a pin, and stands on the list FENCED with
the newest epoch as its mark until that has passed. Mapped again, it stays fenced; dropped again, it moves to the end. So the list is in
order of epochs, and pages leave it before their prefix. Everything here is O(1) a frame, whatever the size of the pool.
"""

from __future__ import annotations

from numba import njit

from pagedkv.core import index
from pagedkv.core.eviction import MASK, OLDEST, delist, enlist, enter, leave, raise_floor, rank, victim
from pagedkv.core.state import (
    CACHED,
    CACHED_FENCED,
    EPOCH,
    EVICTIONS,
    FENCED,
    FIRST_LIST,
    FREE,
    FREE_TOP,
    MAPPED,
    NOBODY,
    NUM_CACHED,
    NUM_FREE,
    NUM_RETIRED,
    PASSED,
    PEAK,
    RETIRED,
    State,
)


@njit(cache=True)
def _free(s: State, frame: int) -> None:
    if s.frames[frame].published:
        index.remove(s, frame)
    s.frames[frame].status = FREE
    s.frames[frame].newer = s.reg[FREE_TOP]
    s.reg[FREE_TOP] = frame
    s.reg[NUM_FREE] += 1


@njit(cache=True)
def evict(s: State) -> int:
    """Free the evictable frame that the policy gives up first, and name it; -1 if there is none."""
    frame = victim(s)
    if frame != NOBODY:
        delist(s, frame)
        index.remember(s, frame)
        s.reg[NUM_CACHED] -= 1
        s.reg[EVICTIONS] += 1
        _free(s, frame)
    return frame


@njit(cache=True)
def take(s: State) -> int:
    """A free frame, or else an evicted one, mapped once. The caller has made sure that there is one."""
    if s.reg[NUM_FREE] == 0:
        evict(s)
    frame = s.reg[FREE_TOP]
    s.reg[FREE_TOP] = s.frames[frame].newer
    s.reg[NUM_FREE] -= 1
    s.frames[frame].refs = 1
    s.frames[frame].status = MAPPED
    s.frames[frame].uses = 0
    s.frames[frame].floor = 0
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
            delist(s, frame)
        elif s.frames[frame].place == FENCED:
            s.reg[CACHED_FENCED] -= 1
        s.reg[NUM_CACHED] -= 1
        mapped = len(s.frames) - s.reg[NUM_FREE] - s.reg[NUM_CACHED] - s.reg[NUM_RETIRED]
        s.reg[PEAK] = max(s.reg[PEAK], mapped)
    elif s.frames[frame].status == RETIRED:
        s.reg[NUM_RETIRED] -= 1
    s.frames[frame].status = MAPPED


@njit(cache=True)
def _fence(s: State, frame: int) -> None:
    if s.frames[frame].place == FENCED:
        leave(s, frame)
    else:
        s.frames[frame].pins += 1
    s.frames[frame].mark = s.reg[EPOCH] & MASK
    enter(s, frame, FENCED)


@njit(cache=True)
def drop(s: State, frame: int, keep: bool, page: int, wish: int) -> None:
    """One page-table entry less names `frame`: page `page` of a space of that `wish`. The last one leaves it cached if it is published and
    its prefix stays (`keep`)."""
    s.frames[frame].refs -= 1
    if s.frames[frame].refs > 0:
        return
    if s.frames[frame].published and keep:
        s.frames[frame].status = CACHED
        s.frames[frame].rank = rank(s, frame, page, wish)
        s.reg[NUM_CACHED] += 1
        if s.reg[EPOCH] > s.reg[PASSED]:
            _fence(s, frame)
            s.reg[CACHED_FENCED] += 1
        if s.frames[frame].pins == 0:
            enlist(s, frame)
        else:
            raise_floor(s, frame)
        return
    if s.reg[EPOCH] > s.reg[PASSED]:
        _fence(s, frame)
    if s.frames[frame].pins > 0:
        s.frames[frame].status = RETIRED
        s.reg[NUM_RETIRED] += 1
    else:
        _free(s, frame)


@njit(cache=True)
def touch(s: State, frame: int) -> None:
    """A cached frame, as if it were mapped and dropped now."""
    if s.frames[frame].pins == 0:
        delist(s, frame)
    if s.reg[EPOCH] > s.reg[PASSED]:
        s.reg[CACHED_FENCED] += s.frames[frame].place != FENCED
        _fence(s, frame)
    if s.frames[frame].pins == 0:
        enlist(s, frame)


@njit(cache=True)
def pin(s: State, frame: int) -> None:
    """`frame` may be neither evicted nor reused until it is unpinned as often (I7)."""
    if s.frames[frame].pins == 0 and s.frames[frame].status == CACHED:
        delist(s, frame)
    s.frames[frame].pins += 1


@njit(cache=True)
def unpin(s: State, frame: int) -> None:
    """One pin less; the last one lets a cached frame be evicted and a retired one be free."""
    s.frames[frame].pins -= 1
    if s.frames[frame].pins == 0:
        if s.frames[frame].status == CACHED:
            enlist(s, frame)
        elif s.frames[frame].status == RETIRED:
            s.reg[NUM_RETIRED] -= 1
            _free(s, frame)


@njit(cache=True)
def pass_epoch(s: State, epoch: int) -> int:
    """Nothing that was launched in `epoch` or before reads anything any more. Returns how many frames are no longer fenced."""
    passed = 0
    frame = s.reg[FIRST_LIST + 4 * FENCED + OLDEST]
    while frame != NOBODY and ((epoch - int(s.frames[frame].mark)) & MASK) <= MASK // 2:
        leave(s, frame)
        if s.frames[frame].status == CACHED:
            s.reg[CACHED_FENCED] -= 1
        unpin(s, frame)
        passed += 1
        frame = s.reg[FIRST_LIST + 4 * FENCED + OLDEST]
    s.reg[PASSED] = max(s.reg[PASSED], epoch)
    return passed
