"""Quotas: what an account may hold, and whose cached frames go first. Compiled functions; they count before anything is changed.

A plan needs `need[a]` frames for account a, and evicts what is not free. Account a gives up at most

    gives[a] = min(evictable[a], max(need[a], used[a] + need[a] - protected[a]))

frames: for its own need always, for others only what is above its protected share. At its hard quota it must give up its own. Then go those
over their soft quota, then the rest, each time the frame that the policy would give up first over all of these accounts. Frames are alike
once they are free, so the sum decides whether a plan can be had.

Complexity: O(accounts) a plan and an eviction; nothing of this runs while nobody has a quota.
"""

from __future__ import annotations

from pagedkv.core.compiled import compiled
from pagedkv.core.pool import frames
from pagedkv.core.pool.accounts import number_of, of_space, register
from pagedkv.core.pool.eviction import foremost
from pagedkv.core.state import EVICTABLE, GIVES, HARD, I32, I64, NEED, NUM_FREE, PROTECTED, SOFT, U8, USED, State


@compiled
def measure(s: State, asids: I32, counts: I64, split: U8) -> int:
    """Write down what each account needs and gives for a plan. Returns the first account that its hard quota stops, or -1."""
    size, reg = s.tokens.shape[1], s.reg
    _begin(s)
    for i in range(len(asids)):
        pages = (s.spaces[asids[i]].planned + counts[i] + size - 1) // size
        copies = 0
        for group in range(len(s.groups)):
            copies += split[i * len(s.groups) + group]
        reg[register(of_space(s, asids[i]), NEED)] += (pages - s.spaces[asids[i]].num_pages) * len(s.groups) + copies
    for account in range(number_of(reg)):
        used, need = reg[register(account, USED)], reg[register(account, NEED)]
        evictable, hard = reg[register(account, EVICTABLE)], reg[register(account, HARD)]
        if need > 0 and hard >= 0 and used + need - evictable > hard:
            return account
        reg[register(account, GIVES)] = min(evictable, max(need, used + need - reg[register(account, PROTECTED)]))
    return -1


@compiled
def _begin(s: State) -> None:
    for account in range(number_of(s.reg)):
        s.reg[register(account, NEED)] = s.reg[register(account, GIVES)] = 0


@compiled
def givable(s: State) -> int:
    """What all accounts together give up for the plan that was measured."""
    total = 0
    for account in range(number_of(s.reg)):
        total += s.reg[register(account, GIVES)]
    return total


@compiled
def reclaim(s: State, wanted: int) -> None:
    """Evict, for the plan that was measured, until `wanted` frames are free and everybody has room under the hard quota."""
    reg = s.reg
    for account in range(number_of(reg)):
        hard, need = reg[register(account, HARD)], reg[register(account, NEED)]
        while need > 0 and hard >= 0 and reg[register(account, USED)] + need > hard:
            _evict_of(s, account)
    while reg[NUM_FREE] < wanted:
        _evict_of(s, _loser(s))


@compiled
def evict_frames(s: State, wanted: int) -> int:
    """Evict up to `wanted` frames for nobody's need, protected ones last; returns how many."""
    _begin(s)
    for account in range(number_of(s.reg)):
        spare = max(0, s.reg[register(account, USED)] - s.reg[register(account, PROTECTED)])
        s.reg[register(account, GIVES)] = min(s.reg[register(account, EVICTABLE)], spare)
    done = 0
    for protected in (False, True):
        if protected:
            for account in range(number_of(s.reg)):
                s.reg[register(account, GIVES)] = s.reg[register(account, EVICTABLE)]
        while done < wanted and givable(s) > 0:
            _evict_of(s, _loser(s))
            done += 1
    return done


@compiled
def _evict_of(s: State, account: int) -> None:
    frames.evict(s, account)
    s.reg[register(account, GIVES)] -= 1


@compiled
def _loser(s: State) -> int:
    """Whose frame goes next: of those over their soft quota, or else of all that give, the one whose foremost frame leads most."""
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
