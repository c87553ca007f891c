"""States: the pool of state frames of a manager, and the calls that keep it in step with the pages.

MemoryManager has one of these if it was made with `states=`, and calls it in place of the functions of tables/. The
compiled functions hold the rules (bindings.py, steps.py). This file converts arguments, raises errors and grows arrays;
it must not know tensors, models or the contents of a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.core import state as st
from pagedkv.core.arguments import flag, whole
from pagedkv.core.handles import Plan, StateStep, Step
from pagedkv.core.observe.stats import StateStats
from pagedkv.core.policies import Cost, Policy, chosen, install
from pagedkv.core.pool.frames import pending
from pagedkv.core.pool.quotas import givable
from pagedkv.core.prefix import index
from pagedkv.core.prefix.roots import Root
from pagedkv.core.recovery import Assignment
from pagedkv.core.state import I32, I64, State
from pagedkv.core.states import bindings, steps
from pagedkv.core.tables import page_tables
from pagedkv.core.tables.layer_groups import Group, group_rows
from pagedkv.core.tables.resize import refuse_resize, resized
from pagedkv.core.tables.steps import OK
from pagedkv.errors import InvalidRequest, OutOfFrames, PlanConflict, QuotaExceeded


@dataclass(frozen=True)
class Places:
    """The positions at which the states of a sequence are kept, so that later prompts go on from there.

    A state is kept at the last full page of the prompt, and where a known prefix ends beyond the last state.

    boundary_tokens: the ids that begin a message. If a message begins in the part to be computed, each start is a
               place, and 64 tokens before the end; else the page before the last one is, and `distances` count.
    distances: tokens before the end of the prompt; None for 16, 64, 256, and so on by fours.
    branches:  whether the end of a known prefix is a place.
    rolling:   keep the state at the last full page of the output; it replaces the one before.
    grid:      places are multiples of it, and it is a multiple of block_size, or None for that. Kernels that compute by
               chunks give the same bits for a prompt computed again only if places are multiples of their chunk, too.
    """

    boundary_tokens: tuple[int, ...] = ()
    distances: tuple[int, ...] | None = None
    branches: bool = True
    rolling: bool = True
    grid: int | None = None


@dataclass(frozen=True)
class StatePool:
    """The state frames of a MemoryManager: how many, where states are kept, and in which order they are evicted.

    num_frames: a running sequence holds two, and a third while it has drafts; the others keep checkpoints.
    policy:     the order in which checkpoints are evicted, see MemoryManager. With "cost" a checkpoint is worth the
                tokens from the checkpoint before it.
    """

    num_frames: int
    places: Places = Places()
    policy: str | Policy = "cost"


_NEAR: Final = 64

_GHOSTS: Final = 4096
"""Evicted checkpoints that are remembered, so that `why` can tell them from those that were never kept."""


def _rules(places: Places, block_size: int) -> tuple[I64, I32]:
    """Return `Held.rules` and `Held.boundaries`."""
    grid = block_size if places.grid is None else whole(places.grid, "grid of Places", 1, 2**31)
    if grid % block_size:
        raise InvalidRequest(f"grid of Places is {grid}; give a multiple of block_size, {block_size}")
    for name in ("distances", "boundary_tokens"):
        if not isinstance(getattr(places, name) or (), tuple | list):
            raise InvalidRequest(f"{name} of Places is {getattr(places, name)!r}; give a tuple of ints")
    distances = [16 * 4**k for k in range(12)] if places.distances is None else list(places.distances)
    distances = [whole(distance, "a distance of Places", 0, 2**31) for distance in distances]
    if len(distances) > 16:
        raise InvalidRequest(f"{len(distances)} distances of Places; give at most 16")
    boundaries = [whole(token, "a boundary token of Places", 0, 2**31) for token in places.boundary_tokens]
    flags = [flag(places.rolling, "rolling of Places"), flag(places.branches, "branches of Places")]
    return np.array([grid, *flags, _NEAR, *distances], np.int64), np.array(boundaries, np.int32)


class States:
    """The state frames of one manager. accounts: that of each tenant with a quota."""

    def __init__(self, given: StatePool, block_size: int, accounts: dict[bytes, int]) -> None:
        self.accounts: dict[bytes, int] = accounts
        if not isinstance(given, StatePool) or not isinstance(given.places, Places):
            raise InvalidRequest(f"states is {given!r}; give a StatePool, such as StatePool(64, Places())")
        count = whole(given.num_frames, "num_frames of StatePool", 1, 2**31)
        self.policy: Policy = Cost(block_size) if given.policy == "cost" else chosen(given.policy)
        try:
            pool = st.new_state(count, group_rows((Group(),)), block_size=2, publishing=True)
        except (MemoryError, ValueError) as error:
            raise InvalidRequest(f"{count} state frames: no memory for their records ({error})") from None
        self.pool: State = pool._replace(ghosts=np.zeros(_GHOSTS, np.int32))
        install(self.policy, self.pool.reg)
        rules, boundaries = _rules(given.places, block_size)
        self._scratch: I32 = np.zeros(bindings.MOST_PLACES + 2, np.int32)
        self.held: bindings.Held = bindings.Held(
            rows=_new_rows(0),
            places=np.zeros((0, bindings.MOST_PLACES), np.int32),
            gaps=np.zeros(count, np.int64),
            totals=np.zeros(bindings.NUM_TOTALS, np.int64),
            rules=rules,
            boundaries=boundaries,
        )

    def _pools(self, s: State) -> bindings.Pools:
        """Return the argument with which every compiled function begins. The rows are as many as those of `s`."""
        more = len(s.spaces) - len(self.held.rows)
        if more > 0:
            rows = np.concatenate([self.held.rows, _new_rows(more)]).view(np.recarray)
            places = np.concatenate([self.held.places, np.zeros((more, bindings.MOST_PLACES), np.int32)])
            self.held = self.held._replace(rows=rows, places=places)
        return bindings.Pools(s, self.pool, self.held)

    # -- spaces --------------------------------------------------------------------------------------------------------

    def settle(self, s: State) -> None:
        """Process the queue of freed pages and closed spaces, and the epochs."""
        if bindings.is_behind(s, self.pool):
            bindings.settle_losses(self._pools(s))

    def opened(self, s: State, asid: int, ids: I32) -> None:
        """Give a space that was opened with the prompt `ids` its last checkpoint."""
        bindings.open_row(self._pools(s), asid, ids)

    def fork(self, s: State, asid: int) -> int:
        """Fork a space with its state, and return the child."""
        return bindings.fork_row(self._pools(s), asid)

    def reorder(self, s: State, forked: I32, released: I32) -> None:
        """See page_tables.reorder_spaces."""
        bindings.reorder_rows(self._pools(s), forked, released)

    def truncate(self, s: State, asid: int, length: int) -> None:
        """See page_tables.truncate_space."""
        bindings.truncate_row(self._pools(s), asid, length)

    def resumption(self, s: State, asid: int, length: int) -> int:
        """Return the position from which a space would be computed after truncate(length)."""
        self.settle(s)
        pages = s.table[asid, : length // s.tokens.shape[1]]
        ready = self.ready(asid)
        return ready if ready <= length else bindings.last_of(self._pools(s), pages) * s.tokens.shape[1]

    def pin(self, s: State, asid: int, pages: I32, most: int, with_state: bool) -> int:
        """See bindings.pin_row."""
        return bindings.pin_row(self._pools(s), asid, pages, most, with_state)

    def pinned(self, s: State) -> I64:
        """int64 [N]: the rows of pins that hold a state."""
        rows = self.held.rows["state"]
        return np.flatnonzero((s.spaces["status"][: len(rows)] == st.HELD) & (rows != st.NIL))

    def forget(self, s: State) -> int:
        """Unpublish every page and checkpoint. Return how many cached frames of pages that freed."""
        return bindings.forget_all(self._pools(s))

    def ready(self, asid: int) -> int:
        """Return the tokens of a space that have a state."""
        return int(self.held.rows["ready"][asid]) if asid < len(self.held.rows) else 0

    def stops(self, asid: int, end: int) -> list[int]:
        """Return the positions in ready + 1 .. end at which the state of a space is kept, and `end`."""
        row, grid = self.held.rows[asid], int(self.held.rules[bindings.GRID])
        places = self.held.places[asid, : row.num_places]
        found = set(places[(places > row.ready) & (places < end)].tolist())
        rolled = end // grid * grid
        if self.held.rules[bindings.ROLLING] and rolled > max(int(row.prompt_end), int(row.ready)):
            found.add(rolled)
        return [*sorted(found - {end}), end] if end > row.ready else []

    # -- the step ------------------------------------------------------------------------------------------------------

    def measured(self, s: State, plan: Plan, certain: I64) -> tuple[tuple[int, int], Step]:
        """Return (code, where) and the step of the pages; nothing is planned yet. Modifies: plan.states"""
        fresh = np.zeros(len(plan.rows), np.int64)
        rows = plan.rows, plan.counts, certain
        code, where, new, saves = steps.measure_rows(self._pools(s), rows, fresh, self._scratch)
        arrays = (plan.longs, plan.ints) if new == plan.num_tokens else None  # no token is computed again
        return (code, where), _with_states(plan, Step(plan.rows, fresh, new, len(s.groups), arrays), saves)

    def begun(self, plan: Plan) -> tuple[tuple[int, int], Step]:
        """Do the same as `measured` for a step that is probably plain, see steps.plan_rows. Modifies: plan.states"""
        arrays = plan.longs, plan.ints
        return (OK, 0), _with_states(plan, Step(plan.rows, plan.counts, plan.num_tokens, plan.num_groups, arrays), 0)

    def plan(self, s: State, plan: Plan, certain: I64, is_plain: bool) -> tuple[int, int]:
        """Plan a step that was measured, or that should be a plain one. Modifies: plan. Returns: (code, where)"""
        scratch = self._scratch[: 0 if is_plain else None]
        return steps.plan_rows(self._pools(s), _arrays_of(plan, certain, scratch))

    def commit(self, s: State, plan: Plan, kept: I64, ids: tuple[I32, bool], restoring: bool) -> tuple[int, int]:
        """Commit kept[i] tokens of each sequence. ids: the tokens, and whether they are known."""
        arrays, (tokens, named) = _arrays_of(plan, plan.counts[:0], self._scratch), ids
        is_plain = arrays.pages[0] is arrays.step[0]
        scratch = (kept[:0], tokens[:0]) if is_plain else (np.zeros_like(kept), np.zeros_like(tokens))
        return steps.commit_rows(self._pools(s), arrays, (kept, scratch[0]), (tokens, scratch[1]), (named, restoring))

    def abort(self, s: State, step: Step, copied: bool) -> tuple[int, int]:
        """Undo a step. See steps.abort_rows."""
        return steps.abort_rows(self._pools(s), _arrays_of(step, step.counts[:0], self._scratch), copied)

    def most(self, s: State, root: Root, ids: I32, most: int) -> int:
        """Return how many tokens a space with windows may map: up to a checkpoint where each group has its pages.

        Without windows, pages behind the last checkpoint are mapped, too.
        """
        found = np.empty(max(0, (len(ids) - 1) // s.tokens.shape[1]), np.int32)
        while True:
            self.settle(s)
            pages, _, common, _ = page_tables.find_prefix(s, root.number, root.seed, ids, most, found)
            length = pages * s.tokens.shape[1] + common
            last = int(bindings.last_of(self._pools(s), found[:pages]) * s.tokens.shape[1])
            if last == length:
                return last
            most = last

    # -- the pool ------------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """int: state frames that a plan could take now: free, evictable or spare."""
        spare = int((self.held.rows["spare"] != st.NIL).sum())
        return int(self.pool.reg[st.NUM_FREE] + self.pool.reg[st.NUM_EVICTABLE]) + spare

    def resized(self, old: State, new: State, moves: I32) -> tuple[Assignment, ...]:
        """Return what changes with the pool of pages: bindings follow the frames that moved. Modifies: new

        old: the state that `new` was made of; the pages that were evicted for `new` are in its queue.
        """
        pool = st.copied(self.pool)
        bindings.settle_losses(bindings.Pools(old, pool, self.held))
        new.reg[st.NUM_LOST] = 0
        bindings.rebind(old, new, pool, moves)
        return ((self, "pool", pool),)

    def resized_to(self, s: State, num_frames: int) -> tuple[tuple[Assignment, ...], I32, State]:
        """Lay the state frames out in a pool of another size: see tables/resize.py. Spare frames are freed, no more.

        Returns: the assignments, the moves (int32 [M, 2], source and target), and the new State of the pages
        """
        bindings.drop_spares(self._pools(s))
        blocks = st.account_registers(self.pool.reg)
        if len(blocks):  # the same shares of the new size; a plan sets the other limits
            blocks[:, st.PROTECTED] = st.account_registers(s.reg)[:, st.PROTECTED] * num_frames // len(s.frames)
        refuse_resize(self.pool, num_frames)
        old = st.copied(self.pool)
        pool, moves = resized(old, num_frames)
        pool = pool._replace(ghosts=old.ghosts)
        into = np.full(len(old.frames) + 1, st.NIL, np.int32)  # the last entry is that of NIL
        stays = np.flatnonzero(old.frames["status"][:num_frames] != st.FREE)
        into[stays], into[moves[:, 0]] = stays, moves[:, 1]
        rows, gaps = self.held.rows.copy(), np.zeros(num_frames, np.int64)
        rows["state"] = into[rows["state"]]
        current = old.frames["generation"][rows["rolled"]] == rows["rolled_generation"]
        rows["rolled"] = np.where(current, into[rows["rolled"]], st.NIL)
        rows["rolled_generation"] = pool.frames["generation"][rows["rolled"]]
        gaps[stays], gaps[moves[:, 1]] = self.held.gaps[stays], self.held.gaps[moves[:, 0]]
        checkpoints = s.checkpoints.copy()
        bound = checkpoints[: len(s.frames)]
        valid = (bound >= 0) & (old.tokens[bound, 0] == np.arange(len(bound))) & (old.frames["published"][bound] != 0)
        checkpoints[: len(s.frames)] = np.where(valid, into[bound], st.NIL)
        held = self.held._replace(rows=rows.view(np.recarray), gaps=gaps)
        return ((self, "pool", pool), (self, "held", held)), moves, s._replace(checkpoints=checkpoints)

    def explained(self, s: State, frames: I32) -> tuple[int, str]:
        """Return how many tokens of a prefix in `frames` (int32 [pages]) have a state, and why no more: see Miss."""
        pool, key = self.pool, np.empty(2, np.int32)
        last = int(bindings.last_of(self._pools(s), frames))
        if last == len(frames):
            return last * s.tokens.shape[1], ""
        for frame in frames[last:].tolist():
            key[:] = frame, int(s.frames["generation"][frame]) & 0x7FFFFFFF
            with np.errstate(over="ignore"):  # hashes overflow, as they do in machine code
                prefix_hash = int(index.prefix_hash_of(int(pool.reg[st.KEY]), 0, key))
            if index.remembers(pool.ghosts, prefix_hash):
                return last * s.tokens.shape[1], "evicted"
        return last * s.tokens.shape[1], "never kept"

    def kept(self, s: State) -> I64:
        """int64 [N]: the generation of each checkpoint, -1 for other state frames.

        The last checkpoint of an output has -1 until the space ends: the next one would replace it.
        """
        t, rows = self.pool, self.held.rows
        stamps = np.where(t.frames["published"] != 0, t.frames["generation"].astype(np.int64), -1)
        rolled = rows[(s.spaces["status"][: len(rows)] == st.OPEN) & (rows["rolled"] != st.NIL)]
        stamps[rolled["rolled"][stamps[rolled["rolled"]] == rolled["rolled_generation"]]] = -1
        return stamps

    def count_copies(self, count: int) -> None:
        """Count state frames that were copied."""
        self.held.totals[bindings.COPIED] += count

    def stats(self) -> StateStats:
        """Return the counters."""
        reg, totals = self.pool.reg, self.held.totals
        free, cached = int(reg[st.NUM_FREE]), int(reg[st.NUM_CACHED])
        return StateStats(
            num_frames=len(self.pool.frames),
            free=free,
            mapped=len(self.pool.frames) - free - cached - int(reg[st.NUM_RETIRED]),
            cached=cached,
            retired=int(reg[st.NUM_RETIRED]),
            checkpoints=int((self.pool.frames["published"] != 0).sum()),
            evictions=int(reg[st.EVICTIONS]),
            published=int(totals[bindings.PUBLISHED]),
            skipped=int(totals[bindings.SKIPPED]),
            copied=int(totals[bindings.COPIED]),
            tokens_computed=int(totals[bindings.COMPUTED]),
            tokens_replayed=int(totals[bindings.REPLAYED]),
        )


def _new_rows(count: int) -> npt.NDArray[np.void]:
    rows = np.zeros(count, bindings.ROW).view(np.recarray)
    rows["state"] = rows["rolled"] = rows["spare"] = st.NIL
    return rows


def _with_states(plan: Plan, pages: Step, num_saves: int) -> Step:
    """Return a step like `pages` that names its states. Modifies: plan.states

    It is a new Step, because a cycle between `pages` and its states would live until the garbage collector runs.
    """
    plan.states = StateStep(pages, plan, num_saves)
    step = Step(pages.rows, pages.counts, pages.num_tokens, pages.num_groups, (pages.longs, pages.ints))
    step.states = plan.states
    return step


def _arrays_of(step: Step, certain: I64, scratch: I32) -> steps.StepArrays:
    """Return the arrays of a step with states."""
    states = step.states
    assert states is not None, "a step of a manager with states must have states"
    pages, whole = states.pages, states.step
    return steps.StepArrays(
        step.rows, step.counts, pages.counts, certain, (pages.longs, pages.ints), (whole.longs, whole.ints),
        states.numbers, scratch,
    )  # fmt: skip


def refuse_states(code: int, where: int, plan: Plan, states: States, ids: I32 | None = None) -> None:
    """Raise the error of a code of states/steps.py, if it is one."""
    if code == steps.OVER_STATE_QUOTA:
        figures = st.account_registers(states.pool.reg)[where, [st.NEED, st.HARD, st.USED, st.EVICTABLE]].tolist()
        tenant = next(tenant for tenant, account in states.accounts.items() if account == where)
        over = QuotaExceeded(tenant, *figures)
        over.pool = "states"
        over.args = (
            f"this step needs {figures[0]} state frames for tenant {tenant!r}, which holds {figures[2]} of at most "
            f"{figures[1]}, the share that its hard quota is of the pages; {figures[3]} of them are evictable. Preempt "
            "sequences of this tenant, or raise its hard quota.",
        )
        raise over
    if code == steps.SHORT_STATES:
        free, evictable = int(states.pool.reg[st.NUM_FREE]), int(states.pool.reg[st.NUM_EVICTABLE])
        protected = ""
        if states.accounts:
            evictable, protected = int(givable(states.pool)), ", apart from those that quotas protect"
        error = OutOfFrames(where, free, evictable, pending(states.pool))
        error.pool = "states"
        error.args = (
            f"the step takes {where} state frames, one for each sequence, and {free + evictable} of "
            f"{len(states.pool.frames)} are free or evictable{protected}, {error.pending} pending; release a sequence, "
            "unpin, wait for the pending ones, or make the StatePool larger",
        )
        raise error
    if code == steps.PLANNED:
        raise PlanConflict(
            f"plan of address space {plan.rows[where]}: a plan of it is outstanding. With states, a space has one at a "
            "time; commit or abort it first"
        )
    if code == steps.OTHER_TOKENS and ids is not None:
        raise InvalidRequest(
            f"token {where} of the commit is {ids[where]}, but the KV at its position belongs to another token; "
            "a step with states begins at space.ready, not at len(space)"
        )
