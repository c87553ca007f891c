"""The laws of recurrent states, I10 to I16, executable: plain numpy, which shares no code with what it checks.

    I10  A space has a state exactly if ready > 0, and ready is at most its length.
    I11  A state frame of an outstanding step is written by that step alone, once, and is the state of no space.
    I12  The references of a state are the spaces, pins and outstanding steps that name it.
    I13  A checkpoint is bound to one published page of group 0, and each page to one checkpoint at most.
    I14  A step writes no KV for a token that has it.
    I15  A checkpoint without references is evictable: it causes no shortage.
    I16  The four counts of state frames add up.

The pool of state frames is a frame pool, so the laws I1 to I9 of frames hold for it too.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.check.laws import check_frame_pool
from pagedkv.core.check.requirements import I10, I11, I12, I13, I14, I15, I16
from pagedkv.core.handles import Step
from pagedkv.core.state import I64, State
from pagedkv.core.states import bindings
from pagedkv.core.states.door import States


def check_states(s: State, states: States, level: int, steps: Collection[Step]) -> None:
    """Raise InvariantViolation at the first broken law. O(frames + spaces) at level 2 and 3. steps: the outstanding."""
    pool, held = states.pool, states.held
    free, cached, retired = (int(pool.reg[i]) for i in (st.NUM_FREE, st.NUM_CACHED, st.NUM_RETIRED))
    mapped = len(pool.frames) - free - cached - retired
    I16.require(min(free, cached, retired, mapped) >= 0, f"of {len(pool.frames)} state frames {mapped} are mapped")
    I16.require(s.reg[st.NUM_LOST] == 0, f"{s.reg[st.NUM_LOST]} freed pages or closed spaces are still queued")
    I16.require(bool((held.totals >= 0).all()), f"a total of states is negative: {held.totals.tolist()}")
    check_frame_pool(pool, level, states.policy, twins=False)
    if level >= 2:
        written = _check_steps(s, steps)
        _check_rows(s, held, written, pool)
        _check_bindings(s, held, pool)


def _check_steps(s: State, steps: Collection[Step]) -> I64:
    """Check I11 and I14 of the outstanding steps. Return the frames that they write, int64 [n]."""
    frames: list[int] = []
    for pages in steps:
        states = pages.states
        if states is None:
            continue
        frames += [*states.state_out[states.state_out >= 0].tolist(), *states.save_frames.tolist()]
        slots, positions = states.step.slots, states.step.positions
        bounds = states.step.cu_seqlens_q
        for i, asid in enumerate(states.step.rows.tolist()):
            mine = slice(bounds[i], bounds[i + 1])
            known = positions[mine] < s.spaces["length"][asid]
            I14.require(
                bool(((slots[mine] < 0) == known).all()),
                f"a step of space {asid} writes KV for a token below its length {s.spaces['length'][asid]}",
            )
    I11.require(len(set(frames)) == len(frames), "two writes of outstanding steps go to one state frame")
    return np.array(frames, np.int64)


def _check_rows(s: State, held: bindings.Held, written: I64, pool: State) -> None:
    """Check the state of each space, and the references of each state frame."""
    count = min(len(held.rows), len(s.spaces))
    rows, spaces = held.rows[:count], s.spaces[:count]
    used = np.isin(spaces["status"], (st.OPEN, st.CLOSING, st.HELD))
    has = rows["state"] != st.NIL
    I10.forbid(
        has != (rows["ready"] > 0), "a space has a state but ready is 0, or ready > 0 without a state", place="space"
    )
    I10.forbid((has | (rows["spare"] != st.NIL)) & ~used, "an unused row has a state", place="space")
    I10.forbid(used & (rows["ready"] > spaces["length"]), "a space is ready beyond its length", place="space")
    I10.forbid(
        (rows["num_places"] > bindings.MOST_PLACES) | (rows["num_places"] < 0) | (rows["prompt_end"] < 0),
        f"a space has more than {bindings.MOST_PLACES} places, or a prompt of a negative length",
        place="space",
    )
    I10.forbid(rows["rolled"] >= len(pool.frames), "a space names a rolling checkpoint beyond the pool", place="space")
    named = np.concatenate([rows["state"][has], rows["spare"][rows["spare"] != st.NIL]])
    beyond = named[(named < 0) | (named >= len(pool.frames))]
    I10.require(not len(beyond), f"a space names state frame {beyond[:1].tolist()} of {len(pool.frames)}")
    clash = np.intersect1d(named, written)
    I11.require(not len(clash), f"state frame {clash[:1].tolist()} is written by a step, and is the state of a space")
    refs = np.bincount(np.concatenate([named, written]).astype(np.int64), minlength=len(pool.frames))
    wrong = np.flatnonzero(refs != pool.frames["refs"])
    first = int(wrong[0]) if len(wrong) else 0
    I12.require(
        not len(wrong),
        f"state frame {first} has {pool.frames['refs'][first]} references, but {refs[first]} spaces and steps name it",
    )
    I11.require(not pool.frames["published"][written].any(), "a state frame is a checkpoint before its step is settled")


def _check_bindings(s: State, held: bindings.Held, pool: State) -> None:
    """Check that checkpoints and pages name one another, and that each unused checkpoint is evictable."""
    I13.require(len(s.checkpoints) == 2 * len(s.frames) + st.MAX_SPACES, "the array of checkpoints has another size")
    states = np.flatnonzero(pool.frames["published"] != 0)
    pages, generations = pool.tokens[states, 0], pool.tokens[states, 1]
    inside = (pages >= 0) & (pages < len(s.frames))
    I13.require(bool(inside.all()), f"checkpoint {states[~inside][:1].tolist()} names a page beyond the pool")
    bound = s.checkpoints[: len(s.frames)]
    for wrong, text in (
        (bound[pages] != states, "is bound to a page that names another state"),
        (s.frames["published"][pages] != 1, "is bound to a page that no prompt finds"),
        ((s.frames["generation"][pages] & 0x7FFFFFFF) != generations, "is bound to an earlier page of its frame"),
        (held.gaps[states] <= 0, "has no distance to the one before it"),
    ):
        I13.require(not wrong.any(), f"checkpoint {states[wrong][:1].tolist()} {text}")
    I13.require(bool(((bound >= st.NIL) & (bound < len(pool.frames))).all()), "a page names a state beyond the pool")
    stuck = (pool.frames["status"] == st.CACHED) & (pool.frames["place"] == st.NOWHERE)
    I15.require(not stuck.any(), f"checkpoint {np.flatnonzero(stuck)[:1].tolist()} is unused and cannot be evicted")
