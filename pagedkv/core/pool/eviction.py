"""Eviction: in which order cached frames are given up. Compiled functions over the lists in `State`; policies.py sets them up.

Evictable frames stand on up to 32 lists, each in order of arrival. A frame is put on the list it was ranked for when it was last dropped,
with the clock of that moment as its `entered` time. The victim is the oldest of the list where

    entered + bonus[list]          is smallest                    clock: the number of plans so far, or the value of the last victim

so each policy is a ranking, a row of bonuses and a clock: LRU has one list; retention adds steps to a frame's age; frequency and cost raise
its value over that of the last victim (greedy dual: what is not asked for again ages, as the clock catches up). Two lists stand before
all: DONTNEED and COLD. Choosing costs one look at each list in use, whatever the size of the pool.

I9, a page goes before its prefix: a page arrives before its prefix does, no later on the clock; and a prefix is never put on a list below
that of a page behind it (`floor`). As bonuses grow with the list, its sum is greater, or it stands behind the page on the same list.
"""

from __future__ import annotations

import math
from typing import Final

from pagedkv.core.compiled import compiled, inlined
from pagedkv.core.pool.accounts import count, list_base, register
from pagedkv.core.state import (
    CLOCK,
    COLD,
    DONTNEED,
    EVICTABLE,
    FIRST_LIST,
    I64,
    INFLATION,
    NIL,
    NORMAL,
    NOWHERE,
    NUM_EVICTABLE,
    NUM_REGISTERS,
    RULE,
    SCALE,
    TICK,
    USED_LISTS,
    Records,
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


@inlined
def enter(records: Records, reg: I64, frame: int, number: int) -> None:
    """Put `frame` at the newest end of a list."""
    base = list_base(records[frame].account, number)
    newest = reg[base + NEWEST]
    records[frame].older = newest
    records[frame].newer = NIL
    records[frame].place = 1 + number
    if newest == NIL:
        reg[base + OLDEST] = frame
    else:
        records[newest].newer = frame
    reg[base + NEWEST] = frame
    reg[base + LENGTH] += 1


@inlined
def leave(records: Records, reg: I64, frame: int) -> None:
    """Take `frame` off the list it is on."""
    base = list_base(records[frame].account, int(records[frame].place) - 1)
    older, newer = records[frame].older, records[frame].newer
    if older == NIL:
        reg[base + OLDEST] = newer
    else:
        records[older].newer = newer
    if newer == NIL:
        reg[base + NEWEST] = older
    else:
        records[newer].older = older
    reg[base + LENGTH] -= 1
    records[frame].place = NOWHERE


@inlined
def rank(records: Records, reg: I64, frame: int, position: int, advice: int) -> int:
    """The list for `frame`, whose first token was at `position` of a space of that `advice`."""
    rule, top = reg[RULE], reg[USED_LISTS] - 1
    if advice < 0:
        return NORMAL + advice
    if rule == ALIKE:
        return NORMAL
    if rule == AGAIN:
        return NORMAL + 1 if records[frame].uses > 0 else NORMAL
    if rule == USES:
        return min(top, NORMAL + int(records[frame].uses))
    if rule == RETENTION:
        return min(top, NORMAL + advice)
    cost = 1.0 + position / reg[SCALE]  # attention reads all that is before the page
    return min(top, NORMAL + int(2.0 * math.log2((1 + int(records[frame].uses)) * cost)))


@inlined
def raise_floor(records: Records, frame: int) -> None:
    """Tell the pages before `frame` which list `frame` is meant for: all of them, as one that is mapped may be behind a punched one.

    O(1) amortised: it stops where that is known, and a floor rises at most once for each list.
    """
    least = max(int(records[frame].rank) + 1, int(records[frame].floor))
    parent = records[frame].parent
    while parent >= 0 and records[parent].floor < least:
        records[parent].floor = least
        parent = records[parent].parent


@inlined
def enlist(records: Records, reg: I64, frame: int) -> None:
    """`frame` is evictable now."""
    records[frame].entered = (reg[CLOCK] if reg[INFLATION] else reg[TICK]) & MASK
    raise_floor(records, frame)
    enter(records, reg, frame, max(int(records[frame].rank), int(records[frame].floor) - 1))
    reg[NUM_EVICTABLE] += 1
    count(records, reg, frame, EVICTABLE, 1)


@inlined
def delist(records: Records, reg: I64, frame: int) -> None:
    """`frame` is not evictable any more."""
    leave(records, reg, frame)
    reg[NUM_EVICTABLE] -= 1
    count(records, reg, frame, EVICTABLE, -1)


@inlined
def _lead(s: State, base: int, number: int, now: int) -> int:
    """By how much the oldest frame of a list is below the clock: the greatest lead goes first."""
    return ((now - s.frames[s.reg[base + OLDEST]].entered) & MASK) - s.reg[FIRST_LIST + 4 * number + BONUS]


@compiled
def foremost(s: State, account: int) -> tuple[int, int]:
    """(list, lead) of the frame that `account` gives up next; it has an evictable one."""
    for number in (DONTNEED, COLD):
        if s.reg[list_base(account, number) + LENGTH] > 0:
            return number, MASK * (3 - number)
    now = s.reg[CLOCK] if s.reg[INFLATION] else s.reg[TICK]
    evictable = s.reg[register(account, EVICTABLE)] if len(s.reg) > NUM_REGISTERS else s.reg[NUM_EVICTABLE]
    best, lead = -1, 0
    for number in range(NORMAL, s.reg[USED_LISTS]):
        base = list_base(account, number)
        if s.reg[base + LENGTH] > 0:
            ahead = _lead(s, base, number, now)
            if best < 0 or ahead > lead:
                best, lead = number, ahead
            if s.reg[RULE] == AGAIN and number == NORMAL and s.reg[base + LENGTH] * s.reg[SCALE] > evictable:
                break  # those used once hold more than their share
    return best, lead


@compiled
def victim(s: State, account: int) -> int:
    """The frame of `account` to be evicted next; NIL if there is none. Moves the clock on if that is the policy's."""
    if s.reg[NUM_EVICTABLE] == 0:
        return NIL
    number, lead = foremost(s, account)
    if s.reg[INFLATION] and lead < 0:
        s.reg[CLOCK] -= lead
    return s.reg[list_base(account, number) + OLDEST]
