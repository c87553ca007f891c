"""Resize: the same memory in a larger or smaller pool. It makes a new State and leaves the old one as it was.

    larger     the new frames are free; every number stays
    smaller    the policy evicts until the rest fits; frames beyond the new end move to free ones below it, and every
               number that names them is rewritten: page tables, parents, lists, the index

A frame that moves keeps its contents under a new number, and gets a generation that its new place never had. A page
whose parent was evicted names a parent that matches nothing. Buckets and ghosts are laid out for the new size.

O(frames + page table). This file knows the arrays, and which of their fields name a frame; `refuse_resize` knows when
resizing is allowed.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.core.compiled import compiled
from pagedkv.core.pool import free_runs
from pagedkv.core.pool.frames import pending
from pagedkv.core.state import (
    EPOCH,
    FREE,
    FREE_LISTS,
    HELD,
    HOLE,
    I32,
    I64,
    NIL,
    NOWHERE,
    NUM_EVICTABLE,
    NUM_FREE,
    NUM_LISTS,
    PASSED,
    PEAK,
    PROTECTED,
    Records,
    State,
    account_registers,
    list_registers,
    new_state,
    with_checkpoints,
    with_salts,
)
from pagedkv.core.tables import steps
from pagedkv.errors import InvalidRequest, OutOfFrames, PlanConflict

_Number = TypeVar("_Number", np.int32, np.int64)


def refuse_resize(s: State, num_frames: int) -> None:
    """Raise if the pool cannot have `num_frames` frames now; nothing is changed.

    Raises: InvalidRequest if quotas protect more frames, or a pinned frame would have to move;
            PlanConflict if a frame that a plan or an open epoch names would have to move;
            OutOfFrames if the frames that cannot be evicted do not fit
    """
    refusal = f"cannot resize to {num_frames} frames"
    protected = int(account_registers(s.reg)[:, PROTECTED].sum())
    if protected > num_frames:
        raise InvalidRequest(f"{refusal}: quotas protect {protected}; lower the quotas first")
    beyond = s.frames[num_frames:]
    if not (beyond["status"] != FREE).any() and len(s.frames) - int(s.reg[NUM_FREE]) <= num_frames:
        return  # no frame moves
    plans = int(s.spaces["outstanding"][:: len(s.groups)].sum())
    if plans:
        raise PlanConflict(f"{refusal}: {plans} plans name frames that would move; commit or abort the plans first")
    if s.reg[EPOCH] > s.reg[PASSED]:
        raise PlanConflict(
            f"{refusal}: work launched in epoch {s.reg[EPOCH]} may still read frames that would move; "
            f"call advance({s.reg[EPOCH]}) first"
        )
    # the row of group 0 has the status of the whole space
    pinned = _frames_of(s, np.repeat(s.spaces["status"][:: len(s.groups)] == HELD, len(s.groups)))
    stuck = pinned[pinned >= num_frames]
    if len(stuck):
        raise InvalidRequest(
            f"{refusal}: {len(stuck)} frames beyond the new end are pinned, frame {stuck[0]} first; unpin them first"
        )
    unevictable = len(s.frames) - int(s.reg[NUM_FREE] + s.reg[NUM_EVICTABLE])
    if unevictable > num_frames:
        error = OutOfFrames(unevictable, num_frames, pending=pending(s))
        error.args = (
            f"{refusal}: {unevictable} frames cannot be evicted, {pending(s)} of them until work under way has ended; "
            f"give at least {unevictable}, or release sequences that hold {unevictable - num_frames}",
        )
        raise error


def resized(s: State, num_frames: int) -> tuple[State, I32]:
    """Lay the state out in a pool of `num_frames` frames, which `refuse_resize` has allowed.

    Returns: (the new state, int32 [M, 2] source and target of each frame that moves; targets were free)
    Modifies: `s`, in which frames are evicted
    """
    steps.evict_frames(s, max(0, len(s.frames) - int(s.reg[NUM_FREE]) - num_frames))
    sources = num_frames + np.flatnonzero(s.frames["status"][num_frames:] != FREE)
    targets = np.flatnonzero(s.frames["status"][:num_frames] == FREE)[: len(sources)]
    into = np.arange(len(s.frames), dtype=np.int32)
    into[num_frames:] = NIL
    into[sources] = targets
    same = min(num_frames, len(s.frames))
    fresh = new_state(num_frames, s.groups, block_size=s.tokens.shape[1], publishing=True)
    fresh = with_salts(fresh) if len(s.salts) else fresh
    fresh = with_checkpoints(fresh) if len(s.checkpoints) else fresh
    for name in ("frames", "tokens", "salts"):
        old, new = getattr(s, name), getattr(fresh, name)
        if len(old):
            new[:same] = old[:same]
            new[targets] = old[sources]
    fresh.frames["generation"][targets] = s.frames["generation"][targets] + 1
    _redirect_parents(s.frames, fresh.frames, into)
    listed = fresh.frames["place"] != NOWHERE
    for link in ("newer", "older"):
        fresh.frames[link][listed] = _renumbered(fresh.frames[link][listed], into)
    reg = s.reg.copy()
    for lists in (
        list_registers(reg),
        *(block[: 4 * NUM_LISTS].reshape(NUM_LISTS, 4) for block in account_registers(reg)),
    ):
        lists[:, :2] = _renumbered(lists[:, :2], into)
    _lay_out_ghosts(s.ghosts, fresh.ghosts)
    _fill_buckets(fresh.frames, fresh.bucket)
    _take_used_frames(fresh.frames, fresh.chunks, fresh.reg)
    free = [NUM_FREE, *range(FREE_LISTS + 1, FREE_LISTS + 4)]
    reg[free] = fresh.reg[free]
    reg[PEAK] = min(int(reg[PEAK]), num_frames)  # of a pool of this size
    state = s._replace(
        frames=fresh.frames,
        tokens=fresh.tokens,
        salts=fresh.salts,
        chunks=fresh.chunks,
        bucket=fresh.bucket,
        ghosts=fresh.ghosts,
        checkpoints=fresh.checkpoints,
        table=_renumbered(np.where(np.arange(s.table.shape[1]) < s.spaces["num_pages"][:, None], s.table, HOLE), into),
        reg=reg,
    )
    return state, np.stack([sources, targets], axis=1).astype(np.int32)


def _frames_of(s: State, rows: npt.NDArray[np.bool_]) -> I32:
    """Return the frames that `rows` (bool [A]) of the page table map."""
    entries = s.table[rows]
    return np.unique(entries[entries != HOLE]).astype(np.int32)


def _renumbered(names: npt.NDArray[_Number], into: I32) -> npt.NDArray[_Number]:
    """Return `names` with each frame under its new number; negative entries stay."""
    return np.where(names >= 0, into[np.maximum(names, 0)], names).astype(names.dtype)


def _redirect_parents(old: Records, new: Records, into: I32) -> None:
    """Rewrite the parents of published frames: the new number, or one that matches nothing if the parent is gone."""
    # a pinned frame keeps its parent too: a plan may have pinned a prefix that forget() unpublished
    new["parent"][(new["published"] == 0) & (new["pins"] == 0)] = NIL
    children = np.flatnonzero(new["parent"] >= 0)
    parents = new["parent"][children]
    here = (old["generation"][parents] == new["parent_generation"][children]) & (old["status"][parents] != FREE)
    new["parent"][children[here]] = into[parents[here]]
    new["parent_generation"][children[here]] = new["generation"][into[parents[here]]]
    lost = children[~here & (parents >= len(new))]
    new["parent"][lost] = 0
    new["parent_generation"][lost] = (int(new["generation"][0]) - 1) % 2**32  # a past one of frame 0: matches nothing


def _lay_out_ghosts(old: I32, new: I32) -> None:
    """Copy the prefix hashes of evicted pages to their places in a table of another size (index.remember)."""
    places = np.flatnonzero(old)
    prefix_hashes = (old[places].astype(np.int64) - 1 << 2) | (places & 3)
    new[prefix_hashes & (len(new) - 1)] = old[places]


@compiled
def _fill_buckets(records: Records, bucket: I32) -> None:
    """Put all published frames into the empty buckets of the index."""
    for frame in range(len(records)):
        if records[frame].published:
            place = np.int64(records[frame].prefix_hash) & (len(bucket) - 1)
            records[frame].chain = bucket[place]
            bucket[place] = frame


@compiled
def _take_used_frames(records: Records, chunks: Records, reg: I64) -> None:
    """Mark every frame that is not free as taken in `chunks`, in which all frames are free."""
    for frame in range(len(records)):
        if records[frame].status != FREE:
            free_runs.take(chunks, reg, frame - 1, 1)
