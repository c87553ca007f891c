"""Eviction order: rank cached frames on lists, and choose the next victim. Compiled functions over `State`.

This file evicts no frame: eviction.py takes the victim off its list, out of the index, and frees it. core/policies.py
sets the lists up. Evictable frames are on up to 32 lists, each in order of arrival. When its last reference is dropped,
the policy ranks the frame for a list. The frame enters the list with the clock of that moment as its `entered` time.
Each list offers its oldest frame; the victim is the offered frame with the smallest sum

    entered + bonus[list]                    clock: the number of plans so far, or the value of the last victim

So a policy is a ranking, a row of bonuses and a clock. LRU has one list. Frequency and cost add to the value of the
last victim (greedy dual: a page that is not used again ages, because the clock catches up). One list is evicted before
all others: DEMOTED. To choose a victim costs one look at each list in use, for a pool of any size.

I9, a page is evicted before its prefix. A page enters its list before its prefix does, at the same clock or an earlier
one. A prefix is never put on a lower list than a page behind it (`floor`). Bonuses grow with the list, so the sum of
the prefix is greater, or the prefix stands behind the page on the same list.
"""

from __future__ import annotations

import math
from typing import Final

from pagedkv.core.compiled import inlined, inner
from pagedkv.core.pool.accounts import count, list_base, register
from pagedkv.core.state import (
    CLOCK,
    DEMOTED,
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
UNRANKED: Final = 0  # one list for all
TWO_QUEUES: Final = 1  # two lists: used once, used again
USES: Final = 2  # one list for each number of uses
COST: Final = 3  # uses x cost of computing the page, two lists an octave

# registers of a list
OLDEST: Final = 0
NEWEST: Final = 1
LENGTH: Final = 2
BONUS: Final = 3

MASK: Final = 2**31 - 1  # times and epochs are kept modulo 2**31


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
def _enter_before(records: Records, reg: I64, frame: int, following: int) -> None:
    """Put `frame` on the list of `following`, an evictable frame of its account: it is evicted just before that one."""
    base = list_base(records[following].account, int(records[following].place) - 1)
    older = records[following].older
    records[frame].older = older
    records[frame].newer = following
    records[frame].place = records[following].place
    records[following].older = frame
    if older == NIL:
        reg[base + OLDEST] = frame
    else:
        records[older].newer = frame
    reg[base + LENGTH] += 1


@inlined
def leave(records: Records, reg: I64, frame: int) -> None:
    """Take `frame` off its list."""
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
    """Return the list for `frame`, whose first token has `position` in a space with that `advice`."""
    rule, top = reg[RULE], reg[USED_LISTS] - 1
    if advice < 0:
        return NORMAL + advice
    if rule == UNRANKED:
        return NORMAL
    if rule == TWO_QUEUES:
        return NORMAL + 1 if records[frame].uses > 0 else NORMAL
    if rule == USES:
        return min(top, NORMAL + int(records[frame].uses))
    cost = 1.0 + position / reg[SCALE]  # attention reads all tokens before the page
    return min(top, NORMAL + int(2.0 * math.log2((1 + int(records[frame].uses)) * cost)))


@inlined
def raise_floor(records: Records, frame: int) -> None:
    """Raise the floor of every page before `frame` to the list of `frame`.

    All pages before it are visited, as a mapped page may lie behind a hole. O(1) amortised: the walk stops at a page
    whose floor is high enough, and a floor rises at most once for each list.
    """
    least = max(int(records[frame].rank) + 1, int(records[frame].floor))
    parent = records[frame].parent
    while parent >= 0 and records[parent].floor < least:
        records[parent].floor = least
        parent = records[parent].parent


@inlined
def enlist(records: Records, reg: I64, frame: int) -> None:
    """Put `frame`, which has become evictable, on its list."""
    records[frame].entered = (reg[CLOCK] if reg[INFLATION] else reg[TICK]) & MASK
    raise_floor(records, frame)
    enter(records, reg, frame, max(int(records[frame].rank), int(records[frame].floor) - 1))
    reg[NUM_EVICTABLE] += 1
    count(records, reg, frame, EVICTABLE, 1)


@inlined
def enlist_before(records: Records, reg: I64, frame: int, prefix: int) -> None:
    """Put `frame`, which has become evictable, before `prefix`, the last evictable page before it.

    All evictable pages after `frame` are before `prefix` already, so they are before `frame` now.
    """
    records[frame].entered = records[prefix].entered
    records[frame].rank = int(records[prefix].place) - 1
    raise_floor(records, frame)
    _enter_before(records, reg, frame, prefix)
    reg[NUM_EVICTABLE] += 1
    count(records, reg, frame, EVICTABLE, 1)


@inlined
def delist(records: Records, reg: I64, frame: int) -> None:
    """Take `frame`, which is evictable no more, off its list."""
    leave(records, reg, frame)
    reg[NUM_EVICTABLE] -= 1
    count(records, reg, frame, EVICTABLE, -1)


@inlined
def _lead(s: State, base: int, number: int, now: int) -> int:
    """Return the lead of the oldest frame of a list, clock - (entered + bonus).

    The lists compete: the oldest frame of the list with the greatest lead is evicted first.
    """
    return ((now - s.frames[s.reg[base + OLDEST]].entered) & MASK) - s.reg[FIRST_LIST + 4 * number + BONUS]


@inner
def foremost(s: State, account: int) -> tuple[int, int]:
    """Return (list, lead) of the frame that `account` gives up next, see `_lead`. The account has an evictable frame.

    A frame on DEMOTED has a lead beyond that of every other list.
    """
    if s.reg[list_base(account, DEMOTED) + LENGTH] > 0:
        return DEMOTED, 2 * MASK
    now = s.reg[CLOCK] if s.reg[INFLATION] else s.reg[TICK]
    evictable = s.reg[register(account, EVICTABLE)] if len(s.reg) > NUM_REGISTERS else s.reg[NUM_EVICTABLE]
    best, lead = -1, 0
    for number in range(NORMAL, s.reg[USED_LISTS]):
        base = list_base(account, number)
        if s.reg[base + LENGTH] > 0:
            ahead = _lead(s, base, number, now)
            if best < 0 or ahead > lead:
                best, lead = number, ahead
            if s.reg[RULE] == TWO_QUEUES and number == NORMAL and s.reg[base + LENGTH] * s.reg[SCALE] > evictable:
                break  # pages used once hold more than their share
    return best, lead


@inner
def victim(s: State, account: int) -> int:
    """Return the frame of `account` to be evicted next, or NIL, and advance a clock that follows the victims."""
    if s.reg[NUM_EVICTABLE] == 0:
        return NIL
    number, lead = foremost(s, account)
    if s.reg[INFLATION] and lead < 0:
        s.reg[CLOCK] -= lead
    return s.reg[list_base(account, number) + OLDEST]
