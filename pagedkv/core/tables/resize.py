"""Resize: the same memory in a larger or smaller pool. It makes a new State; the old one is left as it was.

    larger     the new frames are free; every number stays
    smaller    the policy evicts until the rest fits; frames beyond the new end move to free ones below it, and every number that
               names them is rewritten: page tables, parents, lists, the index

A frame that moves keeps what it holds under a new number and a generation that its new place never had. A reference to a page that is gone
(the page before was evicted) stays one that can match nothing. Buckets and ghosts are laid out for the new size.

O(frames + page table). It knows the arrays and what in them names a frame; who may resize when is `refuse`'s business.
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
)
from pagedkv.core.tables import steps
from pagedkv.errors import InvalidRequest, OutOfFrames, PlanConflict

_Number = TypeVar("_Number", np.int32, np.int64)


def refuse_resize(s: State, num_frames: int) -> None:
    """Raise what speaks against a pool of `num_frames` frames now; nothing is changed.

    Raises: InvalidRequest if quotas protect more, or where a pinned frame would have to move;
            PlanConflict where one would that a plan or an epoch under way names; OutOfFrames if what is mapped does not fit
    """
    protected = int(account_registers(s.reg)[:, PROTECTED].sum())
    if protected > num_frames:
        raise InvalidRequest(f"resize to {num_frames} frames: quotas protect {protected}; lower them first")
    beyond = s.frames[num_frames:]
    if not (beyond["status"] != FREE).any() and len(s.frames) - int(s.reg[NUM_FREE]) <= num_frames:
        return  # nothing moves
    plans = int(s.spaces["outstanding"][:: len(s.groups)].sum())
    if plans:
        raise PlanConflict(
            f"resize to {num_frames} frames: {plans} plans name frames that would move; commit or abort them first"
        )
    if s.reg[EPOCH] > s.reg[PASSED]:
        raise PlanConflict(
            f"resize to {num_frames} frames: what epoch {s.reg[EPOCH]} may read would move; advance() to it first"
        )
    held = _named_by(
        s, np.repeat(s.spaces["status"][:: len(s.groups)] == HELD, len(s.groups))
    )  # the row that leads tells
    pinned = held[held >= num_frames]
    if len(pinned):
        raise InvalidRequest(
            f"resize to {num_frames} frames: {len(pinned)} beyond the new end are pinned, frame {pinned[0]} first; unpin them"
        )
    rooted = len(s.frames) - int(s.reg[NUM_FREE] + s.reg[NUM_EVICTABLE])
    if rooted > num_frames:
        short = OutOfFrames(rooted, num_frames, pending=pending(s))
        short.args = (
            f"resize to {num_frames} frames: {rooted} are mapped, or wait for what is under way ({pending(s)}), and cannot be evicted; "
            f"give at least {rooted}, or release sequences that hold {rooted - num_frames}",
        )
        raise short


def resized(s: State, num_frames: int) -> tuple[State, I32]:
    """(the state in a pool of `num_frames` frames, int32 [M, 2] the moves: source and target frame, targets distinct and free before).

    `refuse` has let it pass. Modifies: `s`, in which frames are evicted.
    """
    steps.evict_frames(s, max(0, len(s.frames) - int(s.reg[NUM_FREE]) - num_frames))
    sources = num_frames + np.flatnonzero(s.frames["status"][num_frames:] != FREE)
    targets = np.flatnonzero(s.frames["status"][:num_frames] == FREE)[: len(sources)]
    into = np.arange(len(s.frames), dtype=np.int32)
    into[num_frames:] = NIL
    into[sources] = targets
    same = min(num_frames, len(s.frames))
    fresh = new_state(
        num_frames, s.groups, block_size=s.tokens.shape[1], publishing=True, by_token=len(s.successors) > 0
    )
    for name in ("frames", "tokens", "successors"):
        old, new = getattr(s, name), getattr(fresh, name)
        if len(old):
            new[:same] = old[:same]
            new[targets] = old[sources]
    fresh.frames["generation"][targets] = s.frames["generation"][targets] + 1
    _redirect_parents(s.frames, fresh.frames, into)
    listed = fresh.frames["place"] != NOWHERE
    for link in ("newer", "older"):
        fresh.frames[link][listed] = _renamed(fresh.frames[link][listed], into)
    fresh.successors[:] = _renamed(fresh.successors, into)
    reg, roots = s.reg.copy(), s.roots.copy()
    for lists in (
        list_registers(reg),
        *(block[: 4 * NUM_LISTS].reshape(NUM_LISTS, 4) for block in account_registers(reg)),
    ):
        lists[:, :2] = _renamed(lists[:, :2], into)
    roots[:, 1] = _renamed(roots[:, 1], into)
    _lay_out_ghosts(s.ghosts, fresh.ghosts)
    _thread(fresh.frames, fresh.bucket)
    _free_the_rest(fresh.frames, fresh.chunks, fresh.reg)
    free = [NUM_FREE, *range(FREE_LISTS + 1, FREE_LISTS + 4)]
    reg[free] = fresh.reg[free]
    reg[PEAK] = min(int(reg[PEAK]), num_frames)  # of a pool of this size
    state = s._replace(
        frames=fresh.frames,
        tokens=fresh.tokens,
        successors=fresh.successors,
        chunks=fresh.chunks,
        bucket=fresh.bucket,
        ghosts=fresh.ghosts,
        table=_renamed(np.where(np.arange(s.table.shape[1]) < s.spaces["num_pages"][:, None], s.table, HOLE), into),
        roots=roots,
        reg=reg,
    )
    return state, np.stack([sources, targets], axis=1).astype(np.int32)


def _named_by(s: State, rows: npt.NDArray[np.bool_]) -> I32:
    """The frames that `rows` (bool [A]) of the page table map."""
    entries = s.table[rows]
    return np.unique(entries[entries != HOLE]).astype(np.int32)


def _renamed(names: npt.NDArray[_Number], into: I32) -> npt.NDArray[_Number]:
    """`names` of frames under their new numbers; what names none stays."""
    return np.where(names >= 0, into[np.maximum(names, 0)], names).astype(names.dtype)


def _redirect_parents(old: Records, new: Records, into: I32) -> None:
    """Let published frames name the page before them by its new number; a page that is gone by one that matches nothing."""
    new["parent"][(new["published"] == 0) & (new["pins"] == 0)] = (
        NIL  # a plan may have pinned a prefix that was forgotten meanwhile
    )
    children = np.flatnonzero(new["parent"] >= 0)
    parents = new["parent"][children]
    here = (old["generation"][parents] == new["parent_generation"][children]) & (old["status"][parents] != FREE)
    new["parent"][children[here]] = into[parents[here]]
    new["parent_generation"][children[here]] = new["generation"][into[parents[here]]]
    lost = children[~here & (parents >= len(new))]
    new["parent"][lost] = 0
    new["parent_generation"][lost] = (int(new["generation"][0]) - 1) % 2**32  # it was that, and will not be again


def _lay_out_ghosts(old: I32, new: I32) -> None:
    """Prints of evicted pages, each at its place in a table of another size (index.remember)."""
    places = np.flatnonzero(old)
    fingerprints = (old[places].astype(np.int64) - 1 << 2) | (places & 3)
    new[fingerprints & (len(new) - 1)] = old[places]


@compiled
def _thread(records: Records, bucket: I32) -> None:
    """Chain all published frames into empty buckets."""
    for frame in range(len(records)):
        if records[frame].published:
            place = np.int64(records[frame].fingerprint) & (len(bucket) - 1)
            records[frame].chain = bucket[place]
            bucket[place] = frame


@compiled
def _free_the_rest(records: Records, chunks: Records, reg: I64) -> None:
    """Take every frame that is not free out of chunks in which all are."""
    for frame in range(len(records)):
        if records[frame].status != FREE:
            free_runs.take(chunks, reg, frame - 1, 1)
