"""Quotas: how many frames an account may hold, and from which account cached frames are evicted first.

The functions count before they change anything. A plan needs `need[a]` frames for account a, and evicts frames if too
few are free. Account a gives up at most `gives[a]` frames:

    gives[a] = min(evictable[a], max(need[a], used[a] + need[a] - protected[a]))

The registers NEED and GIVES of an account are scratch memory for these two numbers: `measure` and `evict_frames` set
them, and each eviction takes one from GIVES.

So an account gives frames for its own need always, and for other accounts only frames above its protected share. At its
hard quota an account must give up frames of its own. Then accounts over their soft quota give up frames, then the rest.
Each time, the policy picks the frame over all of these accounts. Free frames serve every account, so the sum of `gives`
decides whether a plan is possible.

Complexity: O(accounts) for a plan and for an eviction. All functions but evict_frames run only if a tenant has a quota.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pagedkv.core.compiled import inner
from pagedkv.core.pool import eviction
from pagedkv.core.pool.accounts import number_of, of_space, register
from pagedkv.core.pool.eviction_order import foremost
from pagedkv.core.state import (
    EVICTABLE,
    GIVES,
    HARD,
    I32,
    I64,
    NEED,
    NUM_FREE,
    NUM_REGISTERS,
    PROTECTED,
    SOFT,
    USED,
    State,
)

LEAST_STATES: Final = 3
"""State frames that a sequence may need: two, and a third while it has drafts or keeps a checkpoint."""


@inner
def measure(s: State, asids: I32, counts: I64, split: I32) -> int:
    """Set NEED and GIVES of each account for a plan. Return the first account whose hard quota forbids it, or -1."""
    size, reg = s.tokens.shape[1], s.reg
    _clear_scratch(s)
    for i in range(len(asids)):
        pages = (s.spaces[asids[i]].planned + counts[i] + size - 1) // size
        copies = 0
        for group in range(len(s.groups)):
            copies += split[i * len(s.groups) + group]
        reg[register(of_space(s, asids[i]), NEED)] += (pages - s.spaces[asids[i]].num_pages) * len(s.groups) + copies
    return set_gives(s)


@inner
def measure_one(s: State, account: int, count: int) -> int:
    """Do the same as `measure` for `count` frames that one account needs."""
    _clear_scratch(s)
    s.reg[register(account, NEED)] = count
    return set_gives(s)


@inner
def share_limits(s: State, t: State) -> None:
    """Give each account the share of the state frames `t` that it has of the pages `s`, and clear NEED.

    A tenant may always hold the frames that one sequence needs.
    """
    _clear_scratch(t)
    for account in range(number_of(s.reg)):
        for name in (HARD, SOFT, PROTECTED):
            limit = s.reg[register(account, name)]
            t.reg[register(account, name)] = limit if limit < 0 else limit * len(t.frames) // len(s.frames)
        if t.reg[register(account, HARD)] >= 0:
            t.reg[register(account, HARD)] = max(t.reg[register(account, HARD)], LEAST_STATES)


@inner
def set_gives(s: State) -> int:
    """Set GIVES of each account from its NEED. Return the first account whose hard quota forbids its NEED, or -1."""
    reg = s.reg
    for account in range(number_of(reg)):
        used, need = reg[register(account, USED)], reg[register(account, NEED)]
        evictable, hard = reg[register(account, EVICTABLE)], reg[register(account, HARD)]
        if need > 0 and hard >= 0 and used + need - evictable > hard:
            return account
        reg[register(account, GIVES)] = min(evictable, max(need, used + need - reg[register(account, PROTECTED)]))
    return -1


@inner
def _clear_scratch(s: State) -> None:
    for account in range(number_of(s.reg)):
        s.reg[register(account, NEED)] = s.reg[register(account, GIVES)] = 0


@inner
def givable(s: State) -> int:
    """Return the sum of GIVES: how many frames all accounts give up for the plan that was measured."""
    total = 0
    for account in range(number_of(s.reg)):
        total += s.reg[register(account, GIVES)]
    return total


@inner
def reclaim(s: State, wanted: int) -> None:
    """Evict, for the plan that was measured, until `wanted` frames are free and no account exceeds its hard quota."""
    reg = s.reg
    for account in range(number_of(reg)):
        hard, need = reg[register(account, HARD)], reg[register(account, NEED)]
        while need > 0 and hard >= 0 and reg[register(account, USED)] + need > hard:
            _evict_of(s, account)
    while reg[NUM_FREE] < wanted:
        _evict_of(s, _next_account(s))


@inner
def evict_frames(s: State, wanted: int, aside: I32) -> int:
    """Evict up to `wanted` frames that no plan needs, protected ones last. Return how many.

    aside: int32 [0], or [wanted] to take the frames off their lists only, and to write their numbers there.
    """
    if len(s.reg) == NUM_REGISTERS:
        return _evict_in_order(s, wanted, aside)
    _clear_scratch(s)
    for account in range(number_of(s.reg)):
        surplus = max(0, s.reg[register(account, USED)] - s.reg[register(account, PROTECTED)])
        s.reg[register(account, GIVES)] = min(s.reg[register(account, EVICTABLE)], surplus)
    evicted = 0
    for protected in (False, True):
        if protected:
            for account in range(number_of(s.reg)):
                s.reg[register(account, GIVES)] = s.reg[register(account, EVICTABLE)]
        while evicted < wanted and givable(s) > 0:
            account = _next_account(s)
            if len(aside):
                aside[evicted] = eviction.set_aside(s, account)
                s.reg[register(account, GIVES)] -= 1
            else:
                _evict_of(s, account)
            evicted += 1
    return evicted


@inner
def _evict_in_order(s: State, wanted: int, aside: I32) -> int:
    """Do the same for a pool without accounts."""
    evicted = 0
    while evicted < wanted:
        frame = eviction.set_aside(s, np.int64(0)) if len(aside) else eviction.evict(s, np.int64(0))
        if frame < 0:
            break
        if len(aside):
            aside[evicted] = frame
        evicted += 1
    return evicted


@inner
def _evict_of(s: State, account: int) -> None:
    eviction.evict(s, account)
    s.reg[register(account, GIVES)] -= 1


@inner
def _next_account(s: State) -> int:
    """Return the account that gives up the next frame: the one whose foremost frame has the greatest lead.

    Accounts over their soft quota come first; without such an account, all that can give a frame are compared.
    """
    reg = s.reg
    best, lead, best_over = -1, 0, False
    for account in range(number_of(reg)):
        if reg[register(account, GIVES)] > 0:
            soft = reg[register(account, SOFT)]
            over = soft >= 0 and reg[register(account, USED)] + reg[register(account, NEED)] > soft
            _, ahead = foremost(s, account)
            if best < 0 or (over and not best_over) or (over == best_over and ahead > lead):
                best, lead, best_over = account, ahead, over
    return best
