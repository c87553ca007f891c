"""MemoryManager: the door to core. It checks arguments, raises errors and grows the tables.

The compiled functions hold the rules. This file knows spaces, plans and roots; it must not know tensors, models or
time. One thread calls it; a second thread that calls during another call is refused (thread_guard.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pagedkv import debug
from pagedkv.core import state as st
from pagedkv.core.arguments import (
    asid_row,
    count_row,
    flag,
    token_row,
    unnamed_row,
    whole,
)
from pagedkv.core.check.laws import Expected, check_state
from pagedkv.core.handles import AddressSpace, Plan, Step
from pagedkv.core.observation import Observe
from pagedkv.core.observe.stats import Stats, gather, mean_run
from pagedkv.core.pins import PinMixin
from pagedkv.core.policies import Policy, advised, chosen, install
from pagedkv.core.pool import epochs
from pagedkv.core.prefix.roots import Roots
from pagedkv.core.recovery import Assignment, assign_together
from pagedkv.core.spaces.awaited import OpenPrompts
from pagedkv.core.spaces.opening import OpeningMixin
from pagedkv.core.spaces.reordering import ReorderMixin
from pagedkv.core.state import I32
from pagedkv.core.tables import page_tables, steps
from pagedkv.core.tables.forget import forget_pages
from pagedkv.core.tables.layer_groups import Group, group_lacking_pages, group_rows, group_tuple
from pagedkv.core.tables.resize import refuse_resize, resized
from pagedkv.core.tables.step_errors import refuse_ids, refuse_plan, refuse_settling
from pagedkv.core.tenants import pool_share
from pagedkv.core.thread_guard import exclusive
from pagedkv.errors import DoubleRelease, InvalidRequest, InvariantViolation, PlanConflict, StaleHandle

Spaces = Sequence[AddressSpace] | npt.NDArray[np.int32] | npt.NDArray[np.int64]
Counts = Sequence[int] | npt.NDArray[np.int32] | npt.NDArray[np.int64]


Move = Callable[[npt.NDArray[np.int64], I32], Iterable[Assignment]]


class MemoryManager(PinMixin, ReorderMixin, OpeningMixin):
    """Page tables over a pool of `num_frames` frames of `block_size` tokens each.

    policy:       the order in which cached frames are evicted: "lru", "2q", "lfu", "cost", or an object of
                  pagedkv.core.policies.
    prefix_cache: publish full pages at commit and map them again for equal prefixes.
    watermark:    share of the pool that `admits` keeps free for the sequences that run already.
    max_pinned:   share of the pool that `pin` may hold.
    observe:      records that the manager makes of itself, see Observe; none by default.
    groups:       the layer groups, each with page tables of its own over the one pool, see Group; by default one group
                  without a window.
    Raises:       InvalidRequest for sizes or options that make no sense.
    """

    def __init__(
        self,
        num_frames: int,
        block_size: int,
        *,
        policy: str | Policy = "lru",
        prefix_cache: bool = True,
        watermark: float = 0.0,
        max_pinned: float = 0.5,
        observe: Observe | None = None,
        groups: Sequence[Group] = (Group(),),
    ) -> None:
        self.num_frames: int = whole(num_frames, "num_frames", 1, 2**31)
        self.block_size: int = whole(block_size, "block_size", 1, 2**31)
        self.policy: Policy = chosen(policy)
        self._watermark = pool_share(watermark, "watermark")
        self._most_pinned = pool_share(max_pinned, "max_pinned")
        self.groups: tuple[Group, ...] = group_tuple(groups)
        self._begin_observation(observe)
        publishing, events = flag(prefix_cache, "prefix_cache"), self._observe.events
        rows = group_rows(self.groups)
        try:
            self.state: st.State = st.new_state(
                self.num_frames,
                rows,
                block_size=self.block_size,
                publishing=publishing,
                events=events,
            )
        except (MemoryError, ValueError) as error:
            raise InvalidRequest(
                f"{num_frames} frames of {block_size} tokens and {events} events: no memory for them ({error})"
            ) from None
        install(self.policy, self.state.reg)
        self._plain_records = (self.state.spaces, self.state.spaces.view(np.ndarray))
        self._roots, self._open_prompts = Roots(), OpenPrompts()
        self._accounts: dict[bytes, int] = {}  # account of each tenant that has a quota
        self._proves = debug.level() >= 3  # read once: the environment takes a tenth of a small step
        self._begin_recovery()
        self._begin_guard()

    # -- spaces --------------------------------------------------------------------------------------------------------

    @exclusive
    def fork(self, space: AddressSpace) -> AddressSpace:
        """See AddressSpace.fork."""
        self._report_lost()
        asid = self._settled_asid(space, "fork")
        self._grow_tables()
        child = page_tables.fork_space(self.state, asid)
        return self._opened(child, int(self.state.spaces["generation"][child]))

    @exclusive
    def truncate(self, space: AddressSpace, length: int) -> None:
        """See AddressSpace.truncate."""
        asid = self._settled_asid(space, "truncate")
        held = int(self.state.spaces["length"][asid])
        if (length := whole(length, "length")) > held:
            raise InvalidRequest(f"truncate to {length}: the space holds {held} tokens; give 0 up to that")
        group = group_lacking_pages(self.state, asid, length) if length < held else -1
        if group >= 0:
            window = self.groups[group].window
            raise InvalidRequest(
                f"truncate to {length}: group {group} sees {window} positions back, and some of these pages were given "
                f"back at length {held}; truncate to 0, open the prompt again, or make the group with a larger keep"
            )
        page_tables.truncate_space(self.state, asid, length)

    @exclusive
    def release(self, space: AddressSpace) -> None:
        """See AddressSpace.release."""
        self._release([self._releasable(space)])

    # -- the step ------------------------------------------------------------------------------------------------------

    @exclusive
    def plan(self, batch: Spaces, counts: Counts) -> Plan:
        """Map the frames for `counts[i]` new tokens of each space in `batch`: all of them or none.

        batch: AddressSpaces, or an int array of asids.
        Raises: OutOfFrames, InvalidRequest, StaleHandle; nothing was changed then
        """
        asids = self._asids(batch)
        wanted = count_row(counts, len(asids))
        num_tokens = steps.num_tokens(wanted, self.num_frames * self.block_size)
        plan = self._new_plan(Step(asids, wanted, num_tokens, len(self.groups)))
        code, where = steps.plan_step(self.state, asids, wanted, plan.longs, plan.ints)
        if code == steps.NARROW:
            self.state = st.with_wider_table(self.state, where)
            code, where = steps.plan_step(self.state, asids, wanted, plan.longs, plan.ints)
        if code != steps.OK:
            del self._plans[plan.number]
            refuse_plan(self.state, (code, where), asids, wanted, self._accounts)
        plan.live_table = self.state.table
        return plan

    @exclusive
    def commit(
        self,
        plan: Plan,
        token_ids: Sequence[int] | npt.NDArray[np.integer] | None,
        counts: Counts | None = None,
        *,
        keep_planned: bool = False,
    ) -> None:
        """Append `token_ids`, whose KV lies in the slots of `plan`, to their sequences, and publish full pages.

        token_ids: None if you do not know them. The tokens are kept, and their ids read as -1, which must not be
                   committed as ids. Their pages and all later pages of the space are never published.
        Shapes: token_ids int32 [sum(counts)], in plan order
                counts [B]: how many of the planned tokens of each sequence are kept; None for all. The others, rejected
                drafts, are rolled back and their frames given back.
        keep_planned: whether the others stay planned instead. The plan then begins behind the tokens that were kept
                (`plan.starts`, `plan.remaining`) and stays outstanding until all its tokens are committed, a commit
                rolls the rest back, or abort does. Its slots stay what they were, and its copies count as made.
        Raises: PlanConflict if the plan is settled, if an older plan of a space is not, or if a newer plan follows
                tokens that are rolled back; InvalidRequest if the numbers do not fit. Nothing was changed then.
        """
        self._require_own(plan, "commit")
        keep = flag(keep_planned, "keep_planned")
        accepted = plan.counts if counts is None else count_row(counts, len(plan.rows))
        ids = None if token_ids is None else token_row(token_ids)
        if counts is None and (ids is None or len(ids) != plan.num_tokens):
            accepted = plan.remaining  # fewer than planned if a part of the plan was committed
        if ids is None:
            ids = unnamed_row(accepted, plan.num_tokens)
        if len(ids) != (plan.num_tokens if accepted is plan.counts else accepted.sum()):
            refuse_ids(self.state, plan, len(ids), accepted)
        named, restoring = token_ids is not None, self._is_restoring()
        code, where = steps.commit_step(
            self.state, plan.rows, plan.longs, plan.ints, accepted, ids, named, keep, restoring
        )
        if code != steps.OK:
            if code == steps.TOO_MANY and counts is None:
                refuse_ids(self.state, plan, len(ids), plan.remaining)
            refuse_settling(self.state, plan, code, where)
        if not keep or not plan.is_outstanding:
            self._plans.pop(plan.number, None)
        if self._proves:
            self.check(3)

    @exclusive
    def abort(self, plan: Plan, *, copied: bool = False) -> None:
        """Undo the plan: every sequence is as long as before, and the frames for new tokens are given back.

        Tokens that commit(keep_planned=True) has kept stay.
        copied: whether you made the copies of the plan. True: each sequence keeps its copy of a shared tail page, as KV
                may have been written there. False: the targets of the copies are freed, and the sequences share their
                tail pages as before the plan.
        Raises: PlanConflict if the plan is settled already or is not the newest of its spaces
        """
        self._require_own(plan, "abort")
        code, where = steps.abort_step(self.state, plan.rows, plan.longs, plan.ints, flag(copied, "copied"))
        if code != steps.OK:
            refuse_settling(self.state, plan, code, where)
        self._plans.pop(plan.number, None)

    # -- epochs, advice (pins: pins.py) --------------------------------------------------------------------------------

    @exclusive
    def retire(self, epoch: int, batch: Sequence[AddressSpace] = ()) -> None:
        """Open `epoch`: work was launched that may read any frame mapped now.

        A frame that is dropped later waits for `advance(epoch)`. The spaces of `batch` are released under the epoch at
        once. Epochs grow: an engine whose steps overlap calls retire(n) when it launches step n, and advance(n) when it
        sees that step n has finished.
        Raises: InvalidRequest unless `epoch` is newer than the last one; DoubleRelease. Nothing was changed then.
        """
        opening = epochs.opening(self.state.reg, epoch)
        for space in self._require_spaces(batch):
            self._releasable(space)
        if len({space.asid for space in batch}) < len(batch):
            raise DoubleRelease("retire names an address space twice")
        self._release([space.asid for space in batch], opening)

    @exclusive
    def advance(self, epoch: int) -> int:
        """Make the frames available that waited for `epoch` or an older one: all work of these epochs has finished.

        Returns: how many frames waited for them. A second call for the same epoch does nothing.
        Raises:  InvalidRequest for an epoch that was not opened
        """
        return epochs.advance(self.state, epoch)

    @exclusive
    def advise(self, space: AddressSpace, advice: str = "WILLNEED") -> None:
        """Set how early the pages of `space` are evicted once they are cached. Forks made later inherit the advice.

        "DONTNEED": first of all.    "COLD": second, before all pages without advice.
        "WILLNEED": in the policy's order, and the pages count as used once more.
        Raises: InvalidRequest for any other advice; StaleHandle
        """
        asid = self._asid(space)
        offset = advised(advice)
        if advice == "WILLNEED":
            page_tables.count_use(self.state, asid)
        self.state.spaces["advice"][asid] = offset

    # -- the pool ------------------------------------------------------------------------------------------------------

    @exclusive
    def evict(self, count: int) -> int:
        """Free up to `count` cached frames, in the policy's order. Return how many were freed."""
        return int(steps.evict_frames(self.state, whole(count, "count")))

    @exclusive
    def forget(self) -> int:
        """Unpublish every page, as after an update of the weights: no prompt finds KV computed before. O(frames).

        Open spaces and outstanding plans go on, but publish no page until the space is truncated to 0. A frame that an
        epoch or a plan still reads is free when the epoch or the plan has ended. Readers of events get
        AllBlocksCleared.
        Returns: how many cached frames are free now.
        Raises:  InvalidRequest while there are pins, since a pin promises that its frames stay. Nothing was changed
                 then.
        """
        rows = np.flatnonzero(self.state.spaces["status"] == st.HELD).tolist()
        if rows:
            pinned, first = int(self.state.reg[st.PINNED]), self._pin_of(rows[0])
            owner = first.owner if first else "a pin that was dropped"
            raise InvalidRequest(
                f"forget() while {len(rows)} pins hold {pinned} frames, the first for "
                f"{owner or 'an unnamed owner'}; unpin them first"
            )
        freed = int(forget_pages(self.state))
        if self._proves:
            self.check()
        return freed

    @exclusive
    def resize(self, num_frames: int, move: Move | None = None) -> I32:
        """Make the pool larger or smaller.

        A smaller pool evicts cached frames until the rest fits, then moves the frames that lie beyond the new end.
        Spaces, plans and the prefixes that prompts find stay the same.
        move:    a function of (frames that stay, int64 [n]; frames that move, int32 [M, 2], source and target). It
                 copies their bytes to a second pool before anything has changed, and returns (object, attribute, value)
                 for each attribute that changes with the pool: all are set at once. If it raises, nothing was changed.
        Returns: int32 [M, 2]: source and target of each frame that moved. Sources lie beyond the new end, targets below
                 it. Without `move`, copy their bytes before the next plan.
        Raises:  OutOfFrames if the mapped frames do not fit; PlanConflict or InvalidRequest if a frame of a plan, an
                 epoch or a pin would move. Nothing was changed then.
        """
        num_frames = whole(num_frames, "num_frames", 1, 2**31)
        refuse_resize(self.state, num_frames)
        old = st.copied(self.state)  # frames are evicted there: if `move` fails, nothing was changed
        state, moves = resized(old, num_frames)
        used = np.flatnonzero(state.frames["status"][: len(old.frames)] != st.FREE)
        others = move(np.setdiff1d(used, moves[:, 1]), moves) if move else ()
        mine = (self, "state", state), (self, "num_frames", num_frames), self._log.renumbered(old, moves)
        assign_together((*mine, *others))
        if self._last_callers:
            self._last_callers.renumber(moves, num_frames)
        if self._proves:
            self.check()
        return moves

    def stats(self) -> Stats:
        """Return the counters and the waste in mapped frames. O(open spaces), or O(frames) if a tenant has a quota."""
        return gather(self.state, self.usages())

    def mean_run(self) -> float:
        """Return pages / runs over all open spaces: the mean length of a run of neighbouring frames. O(pages)."""
        return mean_run(self.state)

    def check(self, level: int = 3) -> None:
        """Check the invariants I1 to I9. O(frames + pages).

        level: 1 checks the counters, 2 also every frame, 3 also every page, list and index entry.
        Raises: InvariantViolation that names the law and the first frame or space that breaks it
        """
        seeds = {root.number: root.seed for _, root in self._roots.every()}
        try:
            check_state(
                self.state,
                level,
                Expected(
                    self.policy, seeds, [step for _, step in self._plans.values() if step.is_outstanding], self.groups
                ),
            )
        except InvariantViolation as broken:
            if self._last_callers is None:
                raise
            calls = self._last_callers.of_frame(broken.frame) if broken.frame is not None else ""
            calls += self._last_callers.of_space(broken.asid) if broken.asid is not None else ""
            raise InvariantViolation(f"{broken}{calls}", law=broken.law, frame=broken.frame, asid=broken.asid) from None

    def __repr__(self) -> str:
        now = self.stats()
        return (
            f"MemoryManager({self.num_frames} frames of {self.block_size} tokens: "
            f"{now.free} free, {now.mapped} mapped, {now.cached} cached; {now.spaces} spaces)"
        )

    # -- the methods that handles call (handles.Manager) ---------------------------------------------------------------

    def is_stale(self, space: AddressSpace) -> bool:
        """Return True if `space` was released (I8). Raises: InvalidRequest unless it is a space of this manager."""
        if not isinstance(space, AddressSpace):
            raise InvalidRequest(f"{space!r} is not an AddressSpace; give what open() or fork() returned")
        if space.manager is not self:
            raise InvalidRequest(f"address space {space.asid} belongs to another manager; use the one that opened it")
        return bool(self._records()["generation"][space.asid] != space.generation)

    def length_of(self, space: AddressSpace) -> int:
        """Return the number of committed tokens of `space`."""
        return int(self._records()["length"][self._asid(space)])

    def pages_of(self, space: AddressSpace, group: int = 0) -> I32:
        """See AddressSpace.pages and pages_in."""
        asid = self._asid(space)
        if (group := whole(group, "group")) >= len(self.groups):
            raise InvalidRequest(f"pages of group {group}: this manager has {len(self.groups)} groups, numbered from 0")
        return self.state.table[asid + group, : self.state.spaces["num_pages"][asid]].copy()

    def tokens_of(self, space: AddressSpace) -> I32:
        """See AddressSpace.token_ids."""
        asid = self._asid(space)
        pages, length = self.pages_of(space), int(self.state.spaces["length"][asid])
        ids = np.where((pages >= 0)[:, None], self.state.tokens[pages], -1)
        return ids.reshape(-1)[:length].astype(np.int32)

    # -- private -------------------------------------------------------------------------------------------------------

    def _records(self) -> st.Records:
        """Return the records of the spaces as a plain array. A field of a recarray takes eight times as long."""
        spaces, plain = self._plain_records
        if spaces is not self.state.spaces:
            spaces, plain = self._plain_records = (self.state.spaces, self.state.spaces.view(np.ndarray))
        return plain

    def _asid(self, space: AddressSpace) -> int:
        if self.is_stale(space):
            raise StaleHandle(
                f"address space {space.asid} was released: this handle is of generation {space.generation}; "
                f"open or fork a new one{self._last_calls(space)}"
            )
        return space.asid

    def _asids(self, batch: Spaces) -> I32:
        if isinstance(batch, np.ndarray):
            return asid_row(batch)
        self._require_spaces(batch)
        asids = np.fromiter([space.asid for space in batch], np.int32, len(batch))
        ours = all(space.manager is self for space in batch)
        if not ours or self._records()["generation"][asids].tolist() != [space.generation for space in batch]:
            for space in batch:
                self._asid(space)  # raises at the first that is stale or foreign
        return asids

    @staticmethod
    def _require_spaces(batch: Sequence[AddressSpace]) -> Sequence[AddressSpace]:
        if not isinstance(batch, Sequence) or not all(isinstance(space, AddressSpace) for space in batch):
            raise InvalidRequest(
                "the batch is not a list of AddressSpaces; "
                "give a list of AddressSpaces, or (to plan) a numpy array of asids"
            )
        return batch

    def _releasable(self, space: AddressSpace) -> int:
        if self.is_stale(space):
            raise DoubleRelease(
                f"address space {space.asid} was released already; "
                f"drop the handle after the first release(){self._last_calls(space)}"
            )
        return space.asid

    def _last_calls(self, space: AddressSpace) -> str:
        """Return a sentence for an error, the last calls that used the space; "" unless debug level 3 records them."""
        return self._last_callers.of_space(space.asid) if self._last_callers else ""

    def _release(self, asids: list[int], epochs: tuple[int, int] | None = None) -> None:
        """Close spaces. epochs: open the first one, whose predecessors after the second one have not passed."""
        if epochs is None:
            page_tables.release_space(self.state, asids[0])
        else:
            page_tables.retire_spaces(self.state, *epochs, np.array(asids, np.int32))
        for asid in asids:
            self._handles.pop(asid, None)
            self._open_prompts.remove(asid)
        if self.state.reg[st.CLOSED_LONG]:
            st.return_memory(self.state)

    def _settled_asid(self, space: AddressSpace, verb: str) -> int:
        asid = self._asid(space)
        plans = int(self.state.spaces["outstanding"][asid])
        if plans:
            raise PlanConflict(
                f"{verb} of address space {asid}: {plans} plans of it are outstanding; commit or abort them first"
            )
        return asid

    def _require_own(self, plan: Plan, verb: str) -> None:
        if not isinstance(plan, Plan):
            raise InvalidRequest(f"{verb} of {plan!r}; give what plan() returned")
        if plan.manager is not self:
            raise InvalidRequest(f"{verb}: this plan was made by another manager; give it back to that one")

    def _grow_tables(self, pages: int = 0, spaces: int = 1) -> None:
        """Let the tables hold so many more spaces, and a space of so many pages."""
        if self.state.reg[st.CLOSED_LONG]:  # of a space that a plan or a pin kept open after release
            st.return_memory(self.state)
        if self.state.reg[st.NUM_UNUSED_ASIDS] < spaces:
            most = rows = len(self.state.spaces) // len(self.groups)
            used = rows - int(self.state.reg[st.NUM_UNUSED_ASIDS])
            while 2 * most * len(self.groups) <= st.MAX_SPACES:
                most *= 2
            if used + spaces > most:
                raise InvalidRequest(f"{used} spaces and pins are open, and the limit is {most}; release some")
            while self.state.reg[st.NUM_UNUSED_ASIDS] < spaces:
                self.state = st.with_more_rows(self.state)
        pages = min(pages, self.num_frames)  # no known prefix is longer than the pool
        if pages > self.state.table.shape[1]:
            self.state = st.with_wider_table(self.state, pages)
