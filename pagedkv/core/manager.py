"""MemoryManager: the door to core. It checks arguments, raises errors and grows the tables.

The compiled functions hold the rules. This file knows spaces, plans, pins and roots; it must not know tensors, models
or time. One thread calls it; a second thread that calls during another call is refused (thread_guard.py). Handles that
are dropped, and interrupts, are the subject of recovery.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar
from weakref import ref

import numpy as np
import numpy.typing as npt

from pagedkv import debug
from pagedkv.core import state as st
from pagedkv.core import tenants
from pagedkv.core.arguments import (
    asid_row,
    count_row,
    flag,
    frame_row,
    real,
    salt_row,
    tenant_name,
    token_row,
    unnamed_row,
    whole,
)
from pagedkv.core.check.laws import Expected, check_state
from pagedkv.core.handles import AddressSpace, Pin, Plan, Step
from pagedkv.core.hints import Hints, action_of
from pagedkv.core.observe.misses import Miss, View, explain, known_tokens
from pagedkv.core.observe.stats import Stats, Usage, gather, mean_run, usages_of
from pagedkv.core.policies import Policy, chosen, install
from pagedkv.core.pool import epochs
from pagedkv.core.pool.frames import pending
from pagedkv.core.pool.quotas import LEAST_STATES
from pagedkv.core.prefix.events import Changes, Event, EventLog, PageName, Snapshot
from pagedkv.core.prefix.roots import Roots, Salts
from pagedkv.core.recovery import Assignment, Recovered, Registry, assign_together
from pagedkv.core.spaces.awaited import Awaited, OpenPrompts
from pagedkv.core.spaces.opening import Opened, Salt, first_end, for_each, listed, up_to_one_column
from pagedkv.core.spaces.reorder_index import continuations
from pagedkv.core.state import I32, I64, FrameViews
from pagedkv.core.states.bindings import PUBLISHED
from pagedkv.core.states.check import check_states
from pagedkv.core.states.door import StatePool, States, refuse_states
from pagedkv.core.tables import page_tables, steps
from pagedkv.core.tables.forget import forget_pages
from pagedkv.core.tables.layer_groups import Group, group_lacking_pages, group_rows, group_tuple
from pagedkv.core.tables.resize import refuse_resize, resized
from pagedkv.core.tables.step_errors import refuse_ids, refuse_plan, refuse_settling
from pagedkv.core.thread_guard import ThreadGuard, exclusive
from pagedkv.errors import DoubleRelease, InvalidRequest, InvariantViolation, OutOfFrames, PlanConflict, StaleHandle

Spaces = Sequence[AddressSpace] | npt.NDArray[np.int32] | npt.NDArray[np.int64]
Counts = Sequence[int] | npt.NDArray[np.int32] | npt.NDArray[np.int64]
Tokens = Sequence[int] | npt.NDArray[np.integer]

Result = TypeVar("Result")
Move = Callable[[npt.NDArray[np.int64], I32], Iterable[Assignment]]


class MemoryManager(ThreadGuard):
    """Page tables over a pool of `num_frames` frames of `block_size` tokens each.

    policy:       the order in which cached frames are evicted: "lru", "2q", "lfu", "cost", or an object of
                  pagedkv.core.policies.
    prefix_cache: publish full pages at commit and map them again for equal prefixes.
    watermark:    share of the pool that `admits` keeps free for the sequences that run already.
    max_pinned:   share of the pool that `pin` may hold, and the action "pin" of `advise`.
    hints:        share of the pool that prefixes may hold which `advise` retains. A plan that lacks frames takes them.
    events:       number of the last events kept for `events(since)`, 16 + 4 x block_size bytes each.
    history:      tokens of the past that `why` compares with a prompt: at least about so many, 16 to 32 bytes each.
    groups:       the layer groups, each with page tables of its own over the one pool, see Group; by default one group
                  without a window.
    states:       the frames for recurrent states of a hybrid model, see StatePool. A step then computes from
                  `space.ready` on, and `Plan.states` names the states that it reads and writes.
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
        hints: float = 0.1,
        events: int = 0,
        history: int = 0,
        groups: Sequence[Group] = (Group(),),
        states: StatePool | None = None,
    ) -> None:
        self.num_frames: int = whole(num_frames, "num_frames", 1, 2**31)
        self.block_size: int = whole(block_size, "block_size", 1, 2**31)
        self.policy: Policy = chosen(policy)
        self._watermark = tenants.pool_share(watermark, "watermark")
        self._most_pinned = tenants.pool_share(max_pinned, "max_pinned")
        self.groups: tuple[Group, ...] = group_tuple(groups)
        publishing, num_events = flag(prefix_cache, "prefix_cache"), whole(events, "events", 0, 2**31)
        rows = group_rows(self.groups)
        try:
            self.state: st.State = st.new_state(
                self.num_frames, rows, block_size=self.block_size, publishing=publishing, events=num_events
            )
        except (MemoryError, ValueError) as error:
            raise InvalidRequest(
                f"{num_frames} frames of {block_size} tokens and {events} events: no memory for them ({error})"
            ) from None
        install(self.policy, self.state.reg)
        self._accounts: dict[bytes, int] = {}  # account of each tenant that has a quota
        self.states: States | None = None if states is None else States(states, self.block_size, self._accounts)
        if self.states:
            self.state = st.with_checkpoints(self.state)
        self.state = self.state._replace(history=st.history_of(whole(history, "history", 0, 2**30)))
        self._plain_records = (self.state.spaces, self.state.spaces.view(np.ndarray))
        self._roots, self._open_prompts, self._log = Roots(), OpenPrompts(), EventLog()
        self._slides = any(group.window for group in self.groups)
        self._proves = debug.level() >= 3  # read once: the environment takes a tenth of a small step
        self._registry = Registry()
        self._hints = Hints(tenants.pool_share(hints, "hints"), self._most_pinned, self._registry)
        self._restoring: ref[_Restoring] | None = None
        self._begin_guard()

    # -- spaces: open and close ----------------------------------------------------------------------------------------

    @exclusive
    def open(
        self, token_ids: Tokens = (), *, tenant: bytes = b"", salt: Salt = b"", most: int | None = None
    ) -> AddressSpace:
        """Open a space that maps the longest known prefix of `token_ids`; its `len(space)` tokens need no computation.

        At least one token is left to compute, since the caller needs its logits. Equal tokens of different tenants
        never match each other.
        salt: identity besides the tokens: the digest of an adapter, as bytes, or {position: digest} of images and
              other media. From the page of a position on, prompts match only with an equal salt there.
        most: the most tokens that are mapped; None for all that are known. A caller that needs the logits of a prompt's
              own tokens gives 0: the prompt is computed whole, and published as any other.
        Raises: InvalidRequest if the ids are not one row of int32 numbers
        """
        self._registry.report_lost(self.state)
        ids, tenant, salts = token_row(token_ids), tenant_name(tenant), () if salt == b"" else salt_row(salt)
        self._grow_tables(pages=len(ids) // self.block_size + 1)
        return self._open(ids, tenant, salts, len(ids) if most is None else whole(most, "most"))

    @exclusive
    def open_batch(
        self,
        rows: Sequence[Tokens],
        *,
        tenant: bytes | Sequence[bytes] = b"",
        salt: Salt | Sequence[Salt] = b"",
        pads: Tokens | None = None,
    ) -> Opened:
        """Open a space for each prompt of `rows`, as `open` does: for all of them or for none.

        tenant, salt: for all rows, or a list with one for each row.
        pads: for a host that computes rectangles: how many columns of padding stand before each row. Each space then
              ends at the last column up to which all rows are known, and a window sees the pages before that column.
        Raises: as `open`; InvalidRequest if a list has not one entry for each row. Nothing was changed then
        """
        self._registry.report_lost(self.state)
        ids = [token_row(row) for row in listed(rows, "rows")]
        names = [tenant_name(one) for one in for_each(tenant, len(ids), "tenant")]
        salts = [salt_row(one) for one in for_each(salt, len(ids), "salt")]
        columns = None if pads is None else [whole(pad, "a pad") for pad in for_each(pads, len(ids), "pads")]
        prompts = list(zip(names, salts, ids, strict=True))
        most = list(map(len, ids))
        if columns is not None:
            most = up_to_one_column(self.state, self._roots, prompts, columns)
        self._grow_tables(pages=max(map(len, ids), default=0) // self.block_size + 1, spaces=len(ids))
        spaces: list[AddressSpace] = []
        try:
            for (name, own, row), length in zip(prompts, most, strict=True):
                spaces.append(self._open(row, name, own, length))
        except BaseException:
            for space in spaces:
                page_tables.release_space(self.state, space.asid)
            self._settle_states()
            raise
        lengths = [self.ready_of(space) for space in spaces]
        return Opened(spaces, first_end(lengths, columns or [0] * len(ids)))

    @exclusive
    def fork(self, space: AddressSpace) -> AddressSpace:
        """See AddressSpace.fork."""
        self._registry.report_lost(self.state)
        asid = self._settled_asid(space, "fork")
        self._grow_tables()
        fork = self.states.fork if self.states else page_tables.fork_space
        return self._opened(fork(self.state, asid))

    @exclusive
    def reorder(self, spaces: Sequence[AddressSpace], index: Tokens) -> list[AddressSpace]:
        """Return a space for each entry of `index`: one that goes on where `spaces[index[i]]` is.

        The first use of a space is the space itself, its handle included. Each further use is a fork. A space that is
        not used is released. No frame is taken or copied: the first write to a shared page copies it, see fork.
        O(pages of the forks and of the released spaces).
        Raises: InvalidRequest for an index that names no space, or a space named twice in `spaces`; StaleHandle;
                PlanConflict while a plan of a space that would be forked is outstanding. Nothing was changed then.
        """
        self._registry.report_lost(self.state)
        asids = [self._asid(space) for space in self._require_spaces(spaces)]
        sources, repeats, unused = continuations(asids, index)
        forked = np.array([self._settled_asid(spaces[sources[place]], "reorder") for place in repeats], np.int32)
        self._grow_tables(spaces=len(forked))
        reorder = self.states.reorder if self.states else page_tables.reorder_spaces
        reorder(self.state, forked, unused)
        self._forget_closed(unused.tolist())  # forks were made first, so none has the number of a released space
        result = [spaces[at] for at in sources]
        for place, child in zip(repeats, forked.tolist(), strict=True):
            result[place] = self._opened(child)
        return result

    @exclusive
    def truncate(self, space: AddressSpace, length: int) -> None:
        """See AddressSpace.truncate."""
        asid = self._settled_asid(space, "truncate")
        held = int(self.state.spaces["length"][asid])
        if (length := whole(length, "length")) > held:
            raise InvalidRequest(f"truncate to {length}: the space holds {held} tokens; give 0 up to that")
        begins = self.states.resumption(self.state, asid, length) if self.states and self._slides else length
        group = group_lacking_pages(self.state, asid, length, begins) if length < held else -1
        if group >= 0:
            window = self.groups[group].window
            raise InvalidRequest(
                f"truncate to {length}: group {group} sees {window} positions back, and some of these pages were given "
                f"back at length {held}; truncate to 0, open the prompt again, or make the group with a larger keep"
            )
        truncate = self.states.truncate if self.states else page_tables.truncate_space
        truncate(self.state, asid, length)

    @exclusive
    def release(self, space: AddressSpace) -> None:
        """See AddressSpace.release."""
        page_tables.release_space(self.state, self._releasable(space))
        self._forget_closed([space.asid])

    @exclusive
    def detach(self, space: AddressSpace) -> None:
        """See AddressSpace.detach."""
        self._registry.spaces[self._asid(space)] = space.generation

    @exclusive
    def attach(self, asid: int) -> AddressSpace:
        """Return a handle of the open space `asid`, which `detach` left without one.

        Raises: InvalidRequest if no detached space has this number
        """
        if not self._registry.is_detached(self.state, asid):
            raise InvalidRequest(f"attach to address space {asid!r}; give an asid that AddressSpace.detach() returned")
        return self._opened(asid)

    # -- prompts: look, and change nothing -----------------------------------------------------------------------------

    @exclusive
    def lookup(self, token_ids: Tokens, *, tenant: bytes = b"", salt: Salt = b"") -> int:
        """Return how many of `token_ids` are known: the length of the space that `open` would return now.

        The call changes nothing: it takes no reference, and neither the order of eviction nor a statistic notices it.
        O(pages matched).
        Raises: InvalidRequest if the ids are not one row of int32 numbers
        """
        ids, salts, tenant = token_row(token_ids), salt_row(salt), tenant_name(tenant)
        known = known_tokens(self.state, self._roots, (tenant, salts), ids, len(ids))
        root, _ = self._roots.longest(tenant, salts, self.state)
        if self.states and self._slides and root is not None:
            return self.states.most(self.state, root, ids, known)
        return known

    @exclusive
    def awaited(self, token_ids: Tokens, *, tenant: bytes = b"", salt: Salt = b"") -> Awaited | None:
        """Return the longest prefix of `token_ids` that an open space will publish and `open` does not find yet.

        None if `open` finds all there is.

        For prompts that arrive together: open the others when the space has `tokens` tokens, and their common pages
        are computed once. Wait only while that space is in your steps: one that is released, cut or left alone never
        gets there. The call changes nothing that others see. O(length of the prompt) for each open space that computes
        a prompt with the same first page.
        Raises: InvalidRequest if the ids are not one row of int32 numbers
        """
        ids, prompt = token_row(token_ids), (tenant_name(tenant), salt_row(salt))
        if not self.prefix_cache:
            return None
        known = known_tokens(self.state, self._roots, prompt, ids, len(ids))
        return self._open_prompts.longest(self.state, prompt, ids, known)

    def why(self, token_ids: Tokens, *, tenant: bytes = b"", salt: Salt = b"", private: bool = False) -> Miss:
        """Return why `open` finds no more whole pages of `token_ids`, see misses.Miss.

        private: whether the answer depends on the pages of this tenant alone: for the tenant itself, not an operator.
        """
        prompt = tenant_name(tenant), salt_row(salt)
        view = View(self.states.explained if self.states else None, flag(private, "private"))
        return explain(self.state, self._roots, prompt, token_row(token_ids), view)

    # -- the step ------------------------------------------------------------------------------------------------------

    @exclusive
    def plan(self, batch: Spaces, counts: Counts, *, certain: Counts | None = None, saves_inside: bool = True) -> Plan:
        """Map the frames for `counts[i]` new tokens of each space in `batch`: all of them or none.

        batch: AddressSpaces, or an int array of asids.
        With recurrent states, the tokens are those from `space.ready` on, and the slot of a token whose KV is known
        is -1: nothing is written there.
        certain:      the number of these tokens that are no drafts, for each space; None for all. A state is saved
                      behind them, so that rejected drafts cost no token computed again.
        saves_inside: whether the kernels can save a state inside a step. If not, see `AddressSpace.stops`.
        Raises: OutOfFrames, InvalidRequest, StaleHandle, PlanConflict; nothing was changed then
        """
        asids = self._asids(batch)
        wanted = count_row(counts, len(asids))
        self._registry.report_lost(self.state)
        if self.states is not None or certain is not None or saves_inside is not True:
            sure = self._certain_tokens(wanted, certain, saves_inside)
            if self.states is not None and not self._is_restoring():
                return self._plan_states(self.states, asids, wanted, sure)
        num_tokens = steps.num_tokens(wanted, self.num_frames * self.block_size)
        step = Step(asids, wanted, num_tokens, len(self.groups))
        plan = self._registry.add_plan(Plan(self, step), step)
        code, where = steps.plan_step(self.state, asids, wanted, plan.longs, plan.ints)
        while code != steps.OK:
            if code == steps.NARROW:
                self.state = st.with_wider_table(self.state, where)
            else:
                del self._registry.plans[plan.number]
                self._refuse_plan((code, where), plan, wanted)
                self._registry.add_plan(plan, step)
            code, where = steps.plan_step(self.state, asids, wanted, plan.longs, plan.ints)
        plan.live_table = self.state.table
        if self.states is not None:
            self._settle_states()
        return plan

    def _certain_tokens(self, wanted: I64, certain: Counts | None, saves_inside: bool) -> I64:
        """Return the tokens of each sequence that are no drafts, or [0] if no state can be saved inside the step."""
        inside = flag(saves_inside, "saves_inside")
        sure = wanted if certain is None else count_row(certain, len(wanted))
        if certain is not None and (self.states is None or self._is_restoring()):
            raise InvalidRequest("plan with certain=, but this manager has no states; leave it out")
        if certain is not None and ((sure < 0) | (sure > wanted)).any():
            raise InvalidRequest(f"certain is {sure.tolist()[:8]} for counts {wanted.tolist()[:8]}; give 0 up to each")
        return sure if inside else sure[:0]

    def _plan_states(self, states: States, asids: I32, wanted: I64, sure: I64) -> Plan:
        """Plan a step with recurrent states. sure: the certain tokens; [0] if no state can be saved inside the step."""
        most = self.num_frames * self.block_size
        if wanted.max(initial=0) > most:  # more than the pool holds, so no sequence has so many
            refuse_plan(self.state, (steps.SHORT, int(wanted.max()) // self.block_size), asids, wanted, self._accounts)
        num_tokens = steps.num_tokens(wanted, min(most * len(asids), steps.MOST_TOKENS))
        plan = Plan(self, Step(asids, wanted, num_tokens, len(self.groups)))
        is_plain = 0 < plan.num_tokens <= len(asids)
        while True:
            failure, pages = states.begun(plan) if is_plain else states.measured(self.state, plan, sure)
            if failure[0] == steps.OK:
                self._registry.add_plan(plan, pages)
                failure = states.plan(self.state, plan, sure, is_plain)
                if failure[0] == steps.OK:
                    plan.live_table = self.state.table
                    return plan
                del self._registry.plans[plan.number]
            if failure[0] == steps.NARROW:
                self.state = st.with_wider_table(self.state, failure[1])
            elif is_plain:
                is_plain = False  # some tokens are computed again, or the step is refused
            else:
                self._refuse_plan(failure, plan, wanted)

    def _refuse_plan(self, failure: tuple[int, int], plan: Plan, wanted: I64) -> None:
        """Raise the error of a plan, or return after a retained prefix was ended: the plan may now be possible."""
        try:
            if self.states is not None:
                refuse_states(*failure, plan, self.states)
            refuse_plan(self.state, failure, plan.rows, wanted, self._accounts)
        except OutOfFrames as lack:
            if not self._hints.relieve(self.state, self.states, lack, self._accounts):
                raise
            self._settle_states()

    @exclusive
    def commit(
        self, plan: Plan, token_ids: Tokens | None, counts: Counts | None = None, *, keep_planned: bool = False
    ) -> None:
        """Append `token_ids`, whose KV lies in the slots of `plan`, to their sequences, and publish full pages.

        token_ids: None if you do not know them. The tokens are kept, and their ids read as -1, which must not be
                   committed as ids. Their pages and all later pages of the space are never published.
        Shapes: token_ids int32 [sum(counts)], in plan order
                counts [B]: how many of the planned tokens of each sequence are kept; None for all. The others, rejected
                drafts, are rolled back and their frames given back.
        keep_planned: whether the others stay planned instead. The plan then begins behind the tokens that were kept
                (`plan.starts`, `plan.remaining`) and stays outstanding until all its tokens are committed, a commit
                rolls the rest back, or abort does. Its slots stay what they were, and its copies count as made. A fetch
                from tiers (tiers/fetch.py) commits its pages so.
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
        if self.states and plan.states is not None:
            if keep:
                raise InvalidRequest(
                    "commit with keep_planned=True of a step with states, which is committed at once; "
                    "commit all its tokens, or plan fewer"
                )
            code, where = self.states.commit(self.state, plan, accepted, (ids, named), restoring)
            refuse_states(code, where, plan, self.states, ids)
        else:
            code, where = steps.commit_step(
                self.state, plan.rows, plan.longs, plan.ints, accepted, ids, named, keep, restoring
            )
        if code != steps.OK:
            if code == steps.TOO_MANY and counts is None:
                refuse_ids(self.state, plan, len(ids), plan.remaining)
            refuse_settling(self.state, plan, code, where)
        if not keep or not plan.is_outstanding:
            self._registry.plans.pop(plan.number, None)
        if self.states is not None:
            self._settle_states()
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
        code, where = self._abort(plan, flag(copied, "copied"))
        if code != steps.OK:
            refuse_settling(self.state, plan, code, where)
        self._registry.plans.pop(plan.number, None)

    def _abort(self, step: Step, copied: bool) -> tuple[int, int]:
        if self.states and step.states is not None:
            return self.states.abort(self.state, step, copied)
        result = steps.abort_step(self.state, step.rows, step.longs, step.ints, copied)
        self._settle_states()
        return result

    def _settle_states(self) -> None:
        """Let the states know which pages and spaces are gone."""
        if self.states:
            self.states.settle(self.state)

    @property
    def has_plans(self) -> bool:
        """True while a plan is outstanding."""
        return any(step.is_outstanding for _, step in self._registry.plans.values())

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Suspend statistics and a window of group 0 while the caller refills the prefix cache by open, plan, commit.

        Inside the context, `open` counts in no statistic of prompts, and group 0 gives back no page: a page that was
        given back could be evicted for the next one. Plans made inside the context have no recurrent states, and a
        recurrent state that is committed is published wherever it is. All resume at the end, also after an exception
        or an interrupt: these calls ask whether the context is under way.
        """
        token = _Restoring()
        outer = self._restoring_from(ref(token))
        try:
            yield
        finally:
            self._restoring_from(outer)

    # -- frames that must stay, or may go ------------------------------------------------------------------------------

    @exclusive
    def pin(self, what: AddressSpace | npt.NDArray[np.int32], *, owner: str = "", deadline: float | None = None) -> Pin:
        """Keep frames until `unpin`: the committed full pages of a space, or published frames and their whole prefixes.

        A pinned frame is neither evicted nor moved nor written (I7): a write copies it first. The full pages of the
        space are published, so that a prompt finds the frames which the pin holds. O(pages). A frame of several pins
        counts under the cap once for each.
        Raises: InvalidRequest beyond `max_pinned`, or for frames that no prompt can find; StaleHandle
        """
        self._registry.report_lost(self.state)
        deadline = None if deadline is None else real(deadline, "deadline")
        asid, closure = -1, np.empty(0, np.int32)
        if isinstance(what, AddressSpace):
            asid = self._asid(what)
            pages = int(self.state.spaces["length"][asid]) // self.block_size
            num_frames = int(page_tables.frames_in(self.state, asid, pages))
        else:
            closure = self._closure(frame_row(what, self.num_frames))
            pages = num_frames = len(closure)
        pinned = int(self.state.reg[st.PINNED]) - self._hints.pinned_softly
        if pinned + num_frames > self.max_pinned:
            raise InvalidRequest(
                f"pin of {num_frames} frames: pins hold {pinned} of at most {self.max_pinned}; "
                "unpin some, or raise max_pinned"
            )
        self._grow_tables(pages=pages)
        state = self.state
        if self.states:
            row = self.states.pin(state, asid, closure, pages, self._hints.may_hold_state(state, self.states))
        else:
            row = page_tables.pin_space(state, asid, pages) if asid >= 0 else page_tables.pin_frames(state, closure)
        return self._registry.add_pin(Pin(row, int(self.state.spaces["generation"][row]), num_frames, owner, deadline))

    def _closure(self, wanted: I32) -> I32:
        """Return the frames `wanted` with their whole prefixes."""
        if not len(wanted):
            raise InvalidRequest("pin of no frames; name at least one, or pin the space that maps them")
        unfindable, closure = page_tables.prefix_closure(self.state, wanted)
        if unfindable >= 0:
            raise InvalidRequest(
                f"pin of frame {unfindable}: it is not published under a whole prefix; pin the space that maps it"
            )
        return closure

    @exclusive
    def unpin(self, pin: Pin) -> None:
        """Unpin the frames of `pin`. Raises: DoubleRelease the second time."""
        if not isinstance(pin, Pin):
            raise InvalidRequest(f"unpin of {pin!r}; give the handle that pin() returned")
        if not self.holds(pin):
            raise DoubleRelease(
                f"pin {pin.asid} of {pin.owner or 'an unnamed owner'} was given back already, or made by another "
                "manager; give each to the manager that made it, and drop the handle after unpin()"
            )
        page_tables.unpin_row(self.state, pin.asid)
        del self._registry.pins[pin.asid]
        self._settle_states()

    def holds(self, pin: Pin) -> bool:
        """Return True if the frames of `pin` are pinned by it."""
        is_current = self._registry.pin_of(pin.asid) is pin and self.state.spaces["status"][pin.asid] == st.HELD
        return bool(is_current and self.state.spaces["generation"][pin.asid] == pin.generation)

    @exclusive
    def retire(self, epoch: int, batch: Sequence[AddressSpace] = ()) -> None:
        """Open `epoch`: work was launched that may read any frame mapped now.

        A frame that is dropped later waits for `advance(epoch)`. The spaces of `batch` are released under the epoch at
        once. Epochs grow: an engine whose steps overlap calls retire(n) when it launches step n, and advance(n) when it
        sees that step n has finished.
        Raises: InvalidRequest unless `epoch` is newer than the last one; DoubleRelease. Nothing was changed then.
        """
        opening = epochs.opening(self.state.reg, epoch)
        asids = [self._releasable(space) for space in self._require_spaces(batch)]
        if len(set(asids)) < len(asids):
            raise DoubleRelease("retire names an address space twice")
        page_tables.retire_spaces(self.state, *opening, np.array(asids, np.int32))
        self._forget_closed(asids)

    @exclusive
    def advance(self, epoch: int) -> int:
        """Make the frames available that waited for `epoch` or an older one: all work of these epochs has finished.

        Returns: how many frames waited for them. A second call for the same epoch does nothing.
        Raises:  InvalidRequest for an epoch that was not opened
        """
        waited = epochs.advance(self.state, epoch)
        self._settle_states()
        return waited

    @exclusive
    def advise(self, space: AddressSpace | None, action: str, *, until: float | None = None, now: float = 0.0) -> str:
        """Say whether the published pages of `space`, a prefix, will be needed again. The space may end meanwhile.

        "retain":   hold the prefix until `until`, at least. All retained prefixes share `hints` of the pool, and those
                    that are needed last end first if there are more. So they do if a plan lacks frames.
        "pin":      hold it until `until`, whatever happens. `max_pinned` limits pins, and a tenant's to that share of
                    its hard quota.
        "demote":   evict its pages before all others, once no space maps them. Ends "retain". Forks inherit it.
        "prefetch": load what tiers have of the prompt. Rejected here: see PagedKVCache.
        "release":  end "retain", "pin" and "demote" of exactly this prefix. Of None: end only what has expired.
        until, now: seconds of any clock, but of the same one in all calls: this file reads none. Every call ends what
                    has expired by its `now`.
        Returns: "accepted"; "clipped" if only the first pages fit; "rejected"; "missing" if the space has no published
                 page, or nothing to release
        Raises:  InvalidRequest for any other action, or without a time where one is needed; StaleHandle
        """
        asid = -1 if space is None and action == "release" else self._asid(space)  # type: ignore[arg-type]
        (action, end), now = action_of(action, until), real(now, "now")
        self._registry.report_lost(self.state)
        self._hints.expire(self.state, now)
        answer = "accepted" if action == "demote" else "rejected"
        if asid < 0:
            answer = "missing"
        elif action in ("demote", "release"):
            self.state.spaces["advice"][asid] = st.DEMOTED - st.NORMAL if action == "demote" else 0
            released = self._hints.release(self.state, asid, hard=action == "release")
            answer = released if action == "release" else answer
        elif end is not None and now < end and (action == "retain" or end < float("inf")):
            self._grow_tables(pages=int(self.state.spaces["complete"][asid]))
            self.state.spaces["advice"][asid] = 0
            answer = self._hints.hold(self.state, self.states, asid, end, is_soft=action == "retain")
        self._settle_states()
        return answer

    @exclusive
    def evict(self, count: int) -> int:
        """Free up to `count` cached frames, in the policy's order. Return how many were freed."""
        evicted = int(steps.evict_frames(self.state, whole(count, "count")))
        self._settle_states()
        return evicted

    @exclusive
    def forget(self) -> int:
        """Unpublish every page, as after an update of the weights: no prompt finds KV computed before. O(frames).

        Open spaces and outstanding plans go on, but publish no page until the space is truncated to 0. A frame that an
        epoch or a plan still reads is free when the epoch or the plan has ended. Readers of events get
        AllBlocksCleared.
        Returns: how many cached frames are free now.
        Raises:  InvalidRequest while there are pins, since a pin promises that its frames stay. Nothing was changed
                 then. Prefixes that `advise` retains end.
        """
        held = np.flatnonzero(self.state.spaces["status"] == st.HELD).tolist()
        if rows := [row for row in held if row not in self._hints.soft]:
            pinned = int(self.state.reg[st.PINNED]) - self._hints.pinned_softly
            first = self._registry.pin_of(rows[0])
            owner = first.owner if first else "a pin that was dropped"
            raise InvalidRequest(
                f"forget() while {len(rows)} pins hold {pinned} frames, the first for "
                f"{owner or 'an unnamed owner'}; unpin them first"
            )
        self._hints.clear(self.state)
        self.state.history.fill(0)
        freed = int(self.states.forget(self.state) if self.states else forget_pages(self.state))
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
                 epoch or a pin would move. Nothing was changed then, but retained prefixes may have ended.
        """
        num_frames = whole(num_frames, "num_frames", 1, 2**31)
        if num_frames < self.num_frames:
            self._hints.clear(self.state, num_frames)
        self._relieved(lambda: refuse_resize(self.state, num_frames))
        self._settle_states()
        old = st.copied(self.state)  # frames are evicted there: if `move` fails, nothing was changed
        state, moves = resized(old, num_frames)
        used = np.flatnonzero(state.frames["status"][: len(old.frames)] != st.FREE)
        others = move(np.setdiff1d(used, moves[:, 1]), moves) if move else ()
        mine = (self, "state", state), (self, "num_frames", num_frames), self._log.renumbered(old, moves)
        bindings = self.states.resized(old, state, moves) if self.states else ()
        assign_together((*mine, *bindings, *others))
        if self._last_callers:
            self._last_callers.renumber(moves, num_frames)
        if self._proves:
            self.check()
        return moves

    @exclusive
    def resize_states(self, num_frames: int, move: Callable[[I32], Iterable[Assignment]] | None = None) -> I32:
        """Make the pool of recurrent states larger or smaller. See resize, whose rules hold.

        move:    a function of the state frames that move (int32 [M, 2], source and target), as that of `resize`.
        Returns: int32 [M, 2]: these frames
        Raises:  as resize; InvalidRequest for a manager without states. Nothing was changed then.
        """
        num_frames = whole(num_frames, "num_frames", 1, 2**31)
        if self.states is None:
            raise InvalidRequest("resize_states of a manager without states; make it with states=StatePool(...)")
        if self.has_plans:
            raise PlanConflict("resize_states while a plan is outstanding; commit or abort it first")
        self.states.settle(self.state)
        states = self.states
        changes, moves, state = self._relieved(lambda: states.resized_to(self.state, num_frames), "states")
        others = move(moves) if move else ()
        assign_together(((self, "state", state), *changes, *others))
        if self._proves:
            self.check()
        return moves

    def _relieved(self, call: Callable[[], Result], pool: str = "pages") -> Result:
        """Return the result of `call`, and end retained prefixes while it lacks frames of `pool`."""
        while True:
            try:
                return call()
            except OutOfFrames as lack:
                lack.pool = pool
                if not self._hints.relieve(self.state, self.states, lack, self._accounts):
                    raise
                self._settle_states()

    # -- frames to be had, and tenants ---------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """int, frames: how many a plan could take now, free or evictable. With quotas see `available_to`."""
        return tenants.available(self.state) + tenants.total(self._freeable())

    @property
    def pending(self) -> int:
        """int, frames: how many become available when outstanding plans and open epochs end; wait, do not preempt."""
        return pending(self.state) + tenants.total(self._freeable(is_fenced=True))

    def _freeable(self, *, is_fenced: bool = False) -> I64:
        """int64 [accounts]: frames that come free with retained prefixes now, or when the open epoch ends."""
        if not self._hints.soft or bool(self.state.reg[st.EPOCH] > self.state.reg[st.PASSED]) != is_fenced:
            return tenants.NONE
        return self._hints.freeable(self.state)

    @property
    def reserve(self) -> int:
        """int, frames: how many `admits` keeps free (the watermark)."""
        return int(np.ceil(self._watermark * self.num_frames))

    @property
    def max_pinned(self) -> int:
        """int, frames: how many pins may hold."""
        return int(self._most_pinned * self.num_frames)

    def available_to(self, tenant: bytes = b"") -> int:
        """Return how many frames a plan for spaces of `tenant` alone could take now.

        The hard quota of the tenant and the protected shares of other tenants limit them.
        """
        return max(0, min(self._headroom(tenant)))

    def admits(self, num_frames: int, *, tenant: bytes = b"") -> bool:
        """Return True if a new sequence of `tenant` may take `num_frames` frames, leaving the `reserve` to others."""
        pool, quota = self._headroom(tenant)
        return whole(num_frames, "num_frames") <= min(pool - self.reserve, quota)

    def _headroom(self, tenant: bytes) -> tuple[int, int]:
        """Return the frames that the pool, and those that its hard quota leaves to a tenant."""
        return tenants.headroom(self.state, self._accounts.get(tenant_name(tenant), 0), self._freeable())

    @exclusive
    def set_quota(self, tenant: bytes, *, hard: int | None = None, soft: int | None = None, protected: int = 0) -> None:
        """Limit the frames that `tenant` may hold, or change its limits.

        The three limits are those of a memory cgroup: max, high, min.
        hard:      the most frames of the tenant. A plan beyond it evicts the tenant's own cached frames, and is refused
                   if they do not suffice.
        soft:      above it, the tenant's cached frames are evicted before those of tenants below their soft quota.
        protected: number of the tenant's frames that are not evicted for other tenants.
        The limits count for recurrent states, too: as the same shares of their frames.
        Raises: InvalidRequest for numbers that make no sense, or for the first quota of a tenant that holds frames
                already
        """
        limits = tenants.Limits.of(self.state, self._accounts, tenant, (hard, soft, protected))
        if tenant not in self._accounts:
            if self._roots.is_used(tenant, self.state):
                raise InvalidRequest(
                    f"tenant {tenant!r} holds frames already, which are charged to no account; set its first quota "
                    "before its first prompt, or release its spaces and evict its cached frames"
                )
            self.state = tenants.with_account(self.state, self._accounts)
            if self.states:
                self.states.pool = tenants.with_account(self.states.pool, self._accounts)
            self._accounts[tenant] = len(self._accounts) + 1
        limits.set(self.state, self._accounts[tenant])

    def usage(self, tenant: bytes) -> Usage:
        """Return the frames that `tenant` holds and its limits. O(frames). Raises: InvalidRequest without a quota."""
        if tenant_name(tenant) not in self._accounts:
            raise InvalidRequest(
                f"tenant {tenant!r} has no quota, so no frame is charged to it; set_quota(tenant) gives it an account"
            )
        return self.usages()[tenant]

    def usages(self) -> dict[bytes, Usage]:
        """Return the `usage` of each tenant that has a quota. O(frames)."""
        return usages_of(self.state, self._accounts, self._freeable()) if self._accounts else {}

    # -- figures and events --------------------------------------------------------------------------------------------

    @property
    def prefix_cache(self) -> bool:
        """bool: True if `commit` publishes full pages and `open` finds them."""
        return bool(self.state.reg[st.PUBLISHING])

    def stats(self) -> Stats:
        """Return the counters and the waste in mapped frames. O(open spaces), or O(frames) if a tenant has a quota."""
        return gather(self.state, self.usages(), self.states.stats() if self.states else None)

    def mean_run(self) -> float:
        """Return pages / runs over all open spaces: the mean length of a run of neighbouring frames. O(pages)."""
        return mean_run(self.state)

    def free_mask(self) -> npt.NDArray[np.bool_]:
        """bool [F]: True for a frame in state FREE. A copy. O(frames)."""
        mask: npt.NDArray[np.bool_] = self.state.frames["status"] == st.FREE
        return mask

    def frame_generations(self) -> npt.NDArray[np.uint32]:
        """uint32 [F]: the generation of each frame; it rises when the frame is taken. A copy. O(frames)."""
        return self.state.frames["generation"].copy()

    def frame_views(self, *, of_states: bool = False) -> FrameViews:
        """Return views of the frames' records, for code that keeps their bytes. Other threads may read them, too.

        of_states: whether to return those of the frames of recurrent states.
        """
        return st.frame_views(self.states.pool if of_states and self.states else self.state)

    @exclusive
    def events(self, since: int) -> list[Event]:
        """Return the events after number `since` (0: from the beginning): pages that became findable or ceased to be.

        O(events), and one sha256 for each stored block.
        Raises: EventsLost if some of them have left the ring: begin again from `events_snapshot()`;
                InvalidRequest if the manager keeps no events
        """
        return self._required_log().events(self.state, whole(since, "since"))

    @exclusive
    def events_snapshot(self) -> Snapshot:
        """Return every page that can be found, and the number of the last event. O(published frames).

        Raises: InvalidRequest if the manager keeps no events
        """
        return self._required_log().snapshot(self.state)

    @property
    def last_event(self) -> int:
        """int: the number of the newest event, 0 if there is none."""
        return int(self.state.reg[st.LOGGED])

    @exclusive
    def page_changes(self, since: int | None) -> Changes:
        """Return the pages that were published or removed after event `since`, with their frames. See events.Changes.

        since: None for all pages that are published now.
        Raises: InvalidRequest if the manager keeps no events
        """
        return self._required_log().changes(self.state, None if since is None else whole(since, "since"))

    @exclusive
    def new_checkpoints(self, seen: I64) -> tuple[I64, list[tuple[int, int, PageName]]]:
        """Return the recurrent states that were kept since a call before: their frames, pages, and the pages' names.

        seen: int64 [N], the stamps that the call before returned; -1 for a first call.
        Returns: the stamps of now, and (state frame, page frame, name) of each state
        Raises: InvalidRequest if the manager keeps no events
        """
        self._settle_states()
        names, states = self._required_log().names(self.state), self.states
        if states is None:
            return seen, []
        kept, pages = states.kept(self.state), states.pool.tokens[:, 0]
        fresh = [(state, int(pages[state])) for state in np.flatnonzero((kept != seen) & (kept >= 0)).tolist()]
        return kept, [(state, page, names[page]) for state, page in fresh if page in names]

    def states_mark(self) -> tuple[int, ...]:
        """Return a value that differs once new_checkpoints may have more: states were kept, or spaces closed."""
        kept = int(self.states.held.totals[PUBLISHED]) if self.states else 0
        return kept, int(self.state.reg[st.NUM_UNUSED_ASIDS]), int(self.state.reg[st.ASKED])

    @property
    def states_available(self) -> int:
        """int: frames for recurrent states that a plan could take now."""
        return self.states.available if self.states else 0

    def states_of(self, tenant: bytes) -> int:
        """Return how many recurrent states a tenant may hold: its share of them, if it has a hard quota."""
        if self.states is None:
            return 0
        num_states = len(self.states.pool.frames)
        if tenant not in self._accounts:
            return num_states
        hard = int(st.account_registers(self.state.reg)[self._accounts[tenant], st.HARD])
        return num_states if hard < 0 else min(num_states, max(LEAST_STATES, hard * num_states // self.num_frames))

    # -- safety --------------------------------------------------------------------------------------------------------

    @exclusive
    def recover(self) -> Recovered:
        """Give back what no handle names: after an interrupt, or when handles were dropped.

        Plans whose handle was collected are aborted, newest first; such spaces are closed and such pins given back.
        A plan that a newer, living plan follows stays until the newer one is settled. Handles are collected with the
        exception whose traceback holds them, so call this outside of `except`. O(rows of the page table).
        Returns: how many of each
        """
        self._restoring = None  # of a context that an interrupt ended
        self._hints.forget_ended(self.state)
        recovered = self._registry.recover(self.state, self._abort)
        self._settle_states()
        return recovered

    def check(self, level: int = 3) -> None:
        """Check the invariants I1 to I9, and I10 to I16 with recurrent states. O(frames + pages).

        level: 1 checks the counters, 2 also every frame, 3 also every page, list and index entry.
        Raises: InvariantViolation that names the law and the first frame or space that breaks it
        """
        seeds = {root.number: root.seed for _, root in self._roots.every()}
        plans = [step for _, step in self._registry.plans.values() if step.is_outstanding]
        try:
            check_state(self.state, level, Expected(self.policy, seeds, plans, self.groups))
            if self.states:
                self.states.settle(self.state)
                check_states(self.state, self.states, level, plans)
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

    # -- the methods that handles call (handles._Manager) --------------------------------------------------------------

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

    def ready_of(self, space: AddressSpace) -> int:
        """See AddressSpace.ready."""
        asid = self._asid(space)
        return self.states.ready(asid) if self.states else int(self._records()["length"][asid])

    def stops_of(self, space: AddressSpace, end: int) -> list[int]:
        """See AddressSpace.stops."""
        asid, end = self._asid(space), whole(end, "end")
        if self.states:
            return self.states.stops(asid, end)
        return [end] if end > self._records()["length"][asid] else []

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

    def _open(self, ids: I32, tenant: bytes, salts: Salts, most: int) -> AddressSpace:
        """Open a space of at most `most` tokens. The tables are long enough, and the arguments were checked."""
        root, self.state = self._roots.of(tenant, self.state, salts)
        if self._accounts:
            self.state.roots[root.number, st.CHARGED] = self._accounts.get(tenant, 0)
        restoring = self._is_restoring()
        if self.states:
            most = self.states.most(self.state, root, ids, most) if self._slides else most
        asid, generation = page_tables.open_space(self.state, root.number, root.seed, ids, most, restoring)
        if self.states:
            self.states.opened(self.state, asid, ids)
        if len(self.state.log):
            for each in self._roots.chain(tenant, salts, self.block_size):
                self._log.root_taken(self.state, each.number, (tenant, each.own))
        self._open_prompts.add((asid, generation), tenant, salts, ids, self.block_size)
        return self._registry.add_space(AddressSpace(self, asid, generation))

    def _opened(self, asid: int) -> AddressSpace:
        """Return a handle of an open space."""
        return self._registry.add_space(AddressSpace(self, asid, int(self.state.spaces["generation"][asid])))

    def _forget_closed(self, asids: list[int]) -> None:
        """Forget the handles and prompts of spaces that were released now."""
        for asid in asids:
            self._registry.spaces.pop(asid, None)
            self._open_prompts.remove(asid)
        if self.state.reg[st.CLOSED_LONG]:
            st.return_memory(self.state)
        if self.states is not None:
            self._settle_states()

    @exclusive
    def _restoring_from(self, token: ref[_Restoring] | None) -> ref[_Restoring] | None:
        """Make `token` that of the innermost `restoring` context, and return the one before."""
        before, self._restoring = self._restoring, token
        return before

    def _is_restoring(self) -> bool:
        """Return True inside of `restoring`. An interrupt at its end leaves a dead token, which counts for nothing."""
        return self._restoring is not None and self._restoring() is not None

    def _required_log(self) -> EventLog:
        if not len(self.state.log):
            raise InvalidRequest("this manager keeps no events; make it with events=N, where N is the number to keep")
        return self._log

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


class _Restoring:
    """The token of a `restoring` context: the context is under way while its token lives."""
