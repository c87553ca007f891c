"""Stats: the present contents of the pool and totals of its past, read off the registers. This file knows no rule."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.pool.frames import pending
from pagedkv.core.pool.free_runs import runs_in
from pagedkv.core.state import I64, State


@dataclass(frozen=True)
class Usage:
    """A tenant's frames, its quota in frames, and the tokens of its prompts. Bytes = frames x spec.frame_bytes."""

    used: int  # mapped, cached and retired
    unique: int  # mapped by one page table
    shared: int  # mapped by several page tables of this tenant
    cached: int
    evictable: int
    hard: int | None
    soft: int | None
    protected: int
    tokens_asked: int
    tokens_matched: int
    evictions: int


@dataclass(frozen=True)
class StateStats:
    """The state frames of a manager, and totals of its past."""

    num_frames: int
    free: int
    mapped: int  # held by spaces, steps and pins
    cached: int  # checkpoints that no space holds
    retired: int  # wait for an epoch or a plan
    checkpoints: int  # bound to a page
    evictions: int
    published: int  # checkpoints made
    skipped: int  # saves inside a step that were left out: no free frame, or over the limit of one step
    copied: int  # frames copied by copy_states, for kernels that change a state in place; commit copies none
    tokens_computed: int  # committed tokens, those computed again included
    tokens_replayed: int  # of these, how many were computed again, for their state


@dataclass(frozen=True)
class Stats:
    """The present contents of the pool, and totals of its past. Frames and tokens are counts; rates are shares of 1."""

    num_frames: int
    free: int
    mapped: int
    cached: int
    retired: int
    evictable: int
    pending: int  # retired, or cached and waiting for an epoch: available once the work under way has finished
    pinned: int  # held by user pins; a frame of several pins counts for each
    spaces: int
    tokens: int  # committed, over all open spaces; a shared token counts for each space
    slots_mapped: int  # distinct mapped frames x block_size
    slots_wasted: int  # of these, how many hold no token
    peak_mapped: int
    tokens_asked: int  # tokens of the whole pages that open() looked for
    tokens_matched: int
    # tokens asked for and not matched, by the reason of the first missing page
    missed_evicted: int  # it was evicted not long ago
    missed_new: int  # it was never published, as far as the index knows, or lies behind the column of a rectangle
    below_one_page: int  # tokens beyond the last whole page, which open() does not look for
    evictions: int
    copies: int
    deduplicated: int
    tenants: dict[bytes, Usage] = field(default_factory=dict)  # the tenants that have quotas
    states: StateStats | None = None  # of recurrent states, if the manager has them

    @property
    def waste(self) -> float:
        """Share of allocated slots that hold no token."""
        return self.slots_wasted / self.slots_mapped if self.slots_mapped else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens looked for that were found."""
        return self.tokens_matched / self.tokens_asked if self.tokens_asked else 0.0


@dataclass(frozen=True)
class PoolStats:
    """The present contents of a FramePool, and totals of its past. All figures are counts of frames."""

    num_frames: int
    free: int
    mapped: int  # with references
    cached: int
    retired: int
    evictable: int
    pending: int  # retired, or cached and waiting for an epoch: available once the work under way has finished
    named: int  # with a key
    peak_mapped: int
    evictions: int
    tenants: dict[bytes, Usage] = field(default_factory=dict)  # the tenants that have quotas


def gather_pool(s: State, tenants: dict[bytes, Usage]) -> PoolStats:
    """Return the figures of this moment of a frame pool. O(1)."""
    count = {name: int(s.reg[register]) for name, register in _COUNTERS.items() if name in PoolStats.__annotations__}
    num_frames = len(s.frames)
    return PoolStats(
        num_frames=num_frames,
        mapped=num_frames - count["free"] - count["cached"] - count["retired"],
        pending=pending(s),
        named=int(s.roots[0, 0]),
        tenants=tenants,
        **count,
    )


def gather(s: State, tenants: dict[bytes, Usage], states: StateStats | None = None) -> Stats:
    """Return the figures of this moment. O(open spaces), and again for tails that are full pages of another space."""
    rows = np.flatnonzero((s.spaces["status"] == st.OPEN) | (s.spaces["status"] == st.CLOSING))
    count = {name: int(s.reg[register]) for name, register in _COUNTERS.items()}
    num_frames, size = s.tokens.shape
    mapped = num_frames - count["free"] - count["cached"] - count["retired"]
    return Stats(
        num_frames=num_frames,
        mapped=mapped,
        pending=pending(s),
        spaces=len(rows),
        tokens=int(s.spaces["length"][rows].sum()),
        slots_mapped=mapped * size,
        slots_wasted=_wasted(s, _all_groups(s, rows)),
        tenants=tenants,
        states=states,
        **count,
    )


_COUNTERS = {
    "free": st.NUM_FREE,
    "cached": st.NUM_CACHED,
    "retired": st.NUM_RETIRED,
    "evictable": st.NUM_EVICTABLE,
    "pinned": st.PINNED,
    "peak_mapped": st.PEAK,
    "tokens_asked": st.ASKED,
    "tokens_matched": st.MATCHED,
    "missed_evicted": st.MISSED_EVICTED,
    "missed_new": st.MISSED_NEW,
    "below_one_page": st.BELOW_PAGE,
    "evictions": st.EVICTIONS,
    "copies": st.COPIES,
    "deduplicated": st.DEDUPLICATED,
}


def _all_groups(s: State, rows: I64) -> I64:
    """Return the rows of all groups of the spaces whose rows of group 0 are `rows`."""
    return (rows[:, None] + np.arange(len(s.groups))).reshape(-1)


def mean_run(s: State) -> float:
    """Return the mean run length of neighbouring frames over all open spaces: pages / runs, or 0.0. O(pages)."""
    rows = _all_groups(s, np.flatnonzero((s.spaces["status"] == st.OPEN) | (s.spaces["status"] == st.CLOSING)))
    found = [runs_in(s.table[row, : s.spaces["num_pages"][row]])[:, 1] for row in rows]
    num_runs = sum(map(len, found))
    return float(sum(lengths.sum() for lengths in found) / num_runs) if num_runs else 0.0


def _wasted(s: State, rows: I64) -> int:
    """Count the slots of mapped frames that hold no token. A shared frame is as full as the fullest space has it."""
    size = s.tokens.shape[1]
    length = s.spaces["length"][rows]
    used = -(-length // size)  # pages that hold tokens; the others are planned and empty
    wasted: int = int((s.spaces["num_pages"][rows] - used).sum()) * size
    rows, length, used = rows[used > 0], length[used > 0], used[used > 0]
    tails, fill = s.table[rows, used - 1], length - (used - 1) * size
    if (tails >= 0).all() and (s.frames["refs"][tails] == 1).all():
        return wasted + int((size - fill).sum())
    frames, first, owner, times = np.unique(tails, return_index=True, return_inverse=True, return_counts=True)
    fullest = np.zeros(len(frames), np.int64)
    np.maximum.at(fullest, owner, fill)
    # the tail of one space may be a full page of another space, at the same place
    for i in np.flatnonzero((s.frames["refs"][frames] > times) & (fullest < size)):
        page = used[first[i]] - 1
        others = s.table[rows, page] == frames[i]
        fullest[i] = min(size, int(length[others].max()) - page * size)
    wasted += int((size - fullest[frames >= 0]).sum())
    return wasted


def usages_of(s: State, accounts: dict[bytes, int], retained: I64) -> dict[bytes, Usage]:
    """Return the usage of each tenant of `accounts`. O(frames + accounts): all are counted in one pass.

    retained: int64 [accounts], frames that count as evictable, too.
    """
    owner, refs = s.frames["account"], s.frames["refs"]
    blocks = st.account_registers(s.reg)
    unique, shared, cached = (
        np.bincount(owner[frames], minlength=len(blocks))
        for frames in (refs == 1, refs > 1, s.frames["status"] == st.CACHED)
    )
    return {
        tenant: Usage(
            used=int(blocks[account, st.USED]),
            unique=int(unique[account]),
            shared=int(shared[account]),
            cached=int(cached[account]),
            evictable=int((blocks[:, st.EVICTABLE] + retained)[account]),
            hard=_limit(blocks[account, st.HARD]),
            soft=_limit(blocks[account, st.SOFT]),
            protected=int(blocks[account, st.PROTECTED]),
            tokens_asked=int(blocks[account, st.ASKED_BY]),
            tokens_matched=int(blocks[account, st.MATCHED_BY]),
            evictions=int(blocks[account, st.EVICTED]),
        )
        for tenant, account in accounts.items()
    }


def _limit(register: np.int64) -> int | None:
    return int(register) if register >= 0 else None
