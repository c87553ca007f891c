"""Eviction: in which order cached frames are given up. Compiled functions over the lists in `State`; policies.py sets them up.

Evictable frames stand on up to 32 lists, each in order of arrival. A frame is put on the list it was ranked for when it was last dropped,
with the clock of that moment as its `mark`. The victim is the oldest of the list where

    mark + bonus[list]          is smallest                    clock: the number of plans so far, or the value of the last victim

so each policy is a ranking, a row of bonuses and a clock: LRU has one list; retention adds steps to a frame's age; frequency and cost raise
its value over that of the last victim (greedy dual: what is not asked for again ages, as the clock catches up). Two lists stand before
all: DONTNEED and COLD. Choosing costs one look at each list in use, whatever the size of the pool.

I9, a page goes before its prefix: a page arrives before its prefix does, no later on the clock; and a prefix is never put on a list below
that of a page behind it (`floor`). As bonuses grow with the list, its sum is greater, or it stands behind the page on the same list.
"""

from __future__ import annotations

import math
from typing import Final

from numba import njit

from pagedkv.core.state import (
    CLOCK,
    COLD,
    DONTNEED,
    FIRST_LIST,
    INFLATION,
    NOBODY,
    NORMAL,
    NOWHERE,
    NUM_EVICTABLE,
    RULE,
    SCALE,
    TICK,
    USED_LISTS,
    State,
)

# rules: how a frame is ranked
ALIKE: Final = 0
AGAIN: Final = 1  # used once | used again
USES: Final = 2  # one list for each number of uses
COST: Final = 3  # uses x cost of computing the page, two lists an octave
RETENTION: Final = 4  # as advise() or open() asked

OLDEST: Final = 0  # registers of a list
NEWEST: Final = 1
LENGTH: Final = 2
BONUS: Final = 3

MASK: Final = 2**31 - 1  # marks are kept modulo 2**31


@njit(cache=True)
def enter(s: State, frame: int, number: int) -> None:
    """Put `frame` at the newest end of a list."""
    base = FIRST_LIST + 4 * number
    newest = s.reg[base + NEWEST]
    s.frames[frame].older = newest
    s.frames[frame].newer = NOBODY
    s.frames[frame].place = number
    if newest == NOBODY:
        s.reg[base + OLDEST] = frame
    else:
        s.frames[newest].newer = frame
    s.reg[base + NEWEST] = frame
    s.reg[base + LENGTH] += 1


@njit(cache=True)
def leave(s: State, frame: int) -> None:
    """Take `frame` off the list it is on."""
    base = FIRST_LIST + 4 * s.frames[frame].place
    older, newer = s.frames[frame].older, s.frames[frame].newer
    if older == NOBODY:
        s.reg[base + OLDEST] = newer
    else:
        s.frames[older].newer = newer
    if newer == NOBODY:
        s.reg[base + NEWEST] = older
    else:
        s.frames[newer].older = older
    s.reg[base + LENGTH] -= 1
    s.frames[frame].place = NOWHERE


@njit(cache=True)
def rank(s: State, frame: int, page: int, wish: int) -> int:
    """The list for `frame`, which held page `page` of a space of that `wish`."""
    rule, top = s.reg[RULE], s.reg[USED_LISTS] - 1
    if wish < 0:
        return NORMAL + wish
    if rule == ALIKE:
        return NORMAL
    if rule == AGAIN:
        return NORMAL + 1 if s.frames[frame].uses > 0 else NORMAL
    if rule == USES:
        return min(top, NORMAL + int(s.frames[frame].uses))
    if rule == RETENTION:
        return min(top, NORMAL + wish)
    cost = 1.0 + page * s.tokens.shape[1] / s.reg[SCALE]  # attention reads all that is before the page
    return min(top, NORMAL + int(2.0 * math.log2((1 + int(s.frames[frame].uses)) * cost)))


@njit(cache=True)
def raise_floor(s: State, frame: int) -> None:
    """Tell the page before `frame` which list `frame` is meant for."""
    parent = s.frames[frame].parent
    if parent >= 0:
        s.frames[parent].floor = max(s.frames[parent].floor, max(s.frames[frame].rank + 1, s.frames[frame].floor))


@njit(cache=True)
def enlist(s: State, frame: int) -> None:
    """`frame` is evictable now."""
    s.frames[frame].mark = (s.reg[CLOCK] if s.reg[INFLATION] else s.reg[TICK]) & MASK
    raise_floor(s, frame)
    enter(s, frame, max(int(s.frames[frame].rank), int(s.frames[frame].floor) - 1))
    s.reg[NUM_EVICTABLE] += 1


@njit(cache=True)
def delist(s: State, frame: int) -> None:
    """`frame` is not evictable any more."""
    leave(s, frame)
    s.reg[NUM_EVICTABLE] -= 1


@njit(cache=True)
def _lead(s: State, number: int, now: int) -> int:
    """By how much the oldest frame of a list is below the clock: the greatest lead goes first."""
    base = FIRST_LIST + 4 * number
    return ((now - s.frames[s.reg[base + OLDEST]].mark) & MASK) - s.reg[base + BONUS]


@njit(cache=True)
def victim(s: State) -> int:
    """The frame to be evicted next; NOBODY if there is none. Moves the clock on if that is the policy's."""
    if s.reg[NUM_EVICTABLE] == 0:
        return NOBODY
    for number in (DONTNEED, COLD):
        if s.reg[FIRST_LIST + 4 * number + LENGTH] > 0:
            return s.reg[FIRST_LIST + 4 * number + OLDEST]
    now = s.reg[CLOCK] if s.reg[INFLATION] else s.reg[TICK]
    best, lead = -1, 0
    for number in range(NORMAL, s.reg[USED_LISTS]):
        if s.reg[FIRST_LIST + 4 * number + LENGTH] > 0:
            ahead = _lead(s, number, now)
            if best < 0 or ahead > lead:
                best, lead = number, ahead
            if s.reg[RULE] == AGAIN and number == NORMAL and s.reg[FIRST_LIST + 4 * NORMAL + LENGTH] * s.reg[SCALE] > s.reg[NUM_EVICTABLE]:
                break  # those used once hold more than their share
    if s.reg[INFLATION] and lead < 0:
        s.reg[CLOCK] -= lead
    return s.reg[FIRST_LIST + 4 * best + OLDEST]
