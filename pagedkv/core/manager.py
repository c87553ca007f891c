"""MemoryManager: the door to core. It checks arguments, speaks in errors, grows the tables; the rules live in the compiled functions.

It knows spaces, plans and roots; it must not know tensors, models or time. One thread calls it; a second one that comes in meanwhile is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagedkv import debug
from pagedkv.core import state as st
from pagedkv.core.arguments import asid_row, count_row, flag, frame_row, real, tenant_name, token_row, whole
from pagedkv.core.check.laws import Expected, check_state
from pagedkv.core.handles import AddressSpace, Pin, Plan
from pagedkv.core.observation import Observe, Observed
from pagedkv.core.observe.misses import Miss, explain
from pagedkv.core.observe.reuse_distance import record_release
from pagedkv.core.observe.stats import Stats, gather, mean_run
from pagedkv.core.pool import frames
from pagedkv.core.pool.policies import Policy, Priority, chosen, install, retention
from pagedkv.core.prefix.roots import Roots
from pagedkv.core.state import I32
from pagedkv.core.tables import page_tables, steps
from pagedkv.core.tables.forget import forget_pages
from pagedkv.core.tables.layer_groups import Group, blind_group, group_rows, group_tuple
from pagedkv.core.tables.resize import refuse_resize, resized
from pagedkv.core.tables.step_errors import refuse_plan, refuse_settling
from pagedkv.core.tenants import Tenants, headroom
from pagedkv.core.thread_guard import exclusive
from pagedkv.errors import DoubleRelease, InvalidRequest, InvariantViolation, PlanConflict, StaleHandle

Spaces = Sequence[AddressSpace] | npt.NDArray[np.int32] | npt.NDArray[np.int64]
Counts = Sequence[int] | npt.NDArray[np.int32] | npt.NDArray[np.int64]


class MemoryManager(Observed, Tenants):
    """Page tables over a pool of `num_frames` frames of `block_size` tokens each.

    policy:       which cached frames are given up first: "lru", "2q", "lfu", "cost", "priority", or an object of pagedkv.core.policies.
    prefix_cache: publish full pages at commit and map them again for equal prefixes.
    match:        "page": whole pages; "token": also the longest common part of the next one, copied at the first write.
    watermark:    share of the pool that `admits` keeps free for the sequences that run already.
    max_pinned:   share of the pool that `pin` may hold.
    observe:      what to watch, see Observe; nothing by default.
    groups:       the layers that have page tables of their own over the one pool, see Group; one, which sees all, by default.
    Raises:       InvalidRequest for a pool that cannot be.
    """

    def __init__(
        self,
        num_frames: int,
        block_size: int,
        *,
        policy: str | Policy = "lru",
        prefix_cache: bool = True,
        match: str = "page",
        watermark: float = 0.0,
        max_pinned: float = 0.5,
        observe: Observe | None = None,
        groups: Sequence[Group] = (Group(),),
    ) -> None:
        self.num_frames: int = whole(num_frames, "num_frames", 1, 2**31)
        self.block_size: int = whole(block_size, "block_size", 1, 2**31)
        self.policy: Policy = chosen(policy)
        self._shares = real(watermark, "watermark"), real(max_pinned, "max_pinned")
        if not 0.0 <= self._shares[0] < 1.0:
            raise InvalidRequest(
                f"watermark is {watermark}; it is the share of the pool to keep free, from 0 to less than 1"
            )
        if not 0.0 <= self._shares[1] <= 1.0:
            raise InvalidRequest(
                f"max_pinned is {max_pinned}; it is the share of the pool that pins may hold, from 0 to 1"
            )
        if not isinstance(match, str) or match not in ("page", "token"):
            raise InvalidRequest(f"match is {match!r}; it is 'page' or 'token'")
        self.groups: tuple[Group, ...] = group_tuple(groups)
        self._watch(observe)
        prefix_cache, by_token, events = flag(prefix_cache, "prefix_cache"), match == "token", self._watched.events
        rows = group_rows(self.groups, prefix_cache=prefix_cache, by_token=by_token)
        try:
            self.state: st.State = st.new_state(
                self.num_frames,
                rows,
                block_size=self.block_size,
                publishing=prefix_cache,
                by_token=by_token,
                events=events,
            )
        except (MemoryError, ValueError) as error:
            raise InvalidRequest(
                f"{num_frames} frames of {block_size} tokens and {events} events: no memory for them ({error})"
            ) from None
        install(self.policy, self.state.reg)
        self._roots = Roots()
        self._accounts: dict[bytes, int] = {}  # of the tenants that have quotas
        self._pins: dict[int, Pin] = {}
        self._plans: set[Plan] = set()  # those not settled yet
        self._begin_guard()

    # -- spaces ------------------------------------------------------------------------------------------------------------------

    @exclusive
    def open(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.integer] = (),
        *,
        tenant: bytes = b"",
        priority: float = 1.0,
        half_life: float = 1000.0,
    ) -> AddressSpace:
        """A new space that maps the longest known prefix of `token_ids`; `len(space)` of them need not be computed.

        At least one token is left to compute, since its logits are what the caller is after. Equal tokens of different
        tenants are different (put an adapter's or image's digest into `tenant` too). `priority`, `half_life`: see advise(retain=).
        Raises: InvalidRequest if the ids are not one row of int32 numbers, or a priority was given that the policy does not know
        """
        ids, tenant = token_row(token_ids), tenant_name(tenant)
        priority, half_life = real(priority, "priority"), real(half_life, "half_life")
        advice = self._retention(priority, half_life) if (priority, half_life) != (1.0, 1000.0) else 0
        self._grow_tables(pages=len(ids) // self.block_size + 1)
        root, self.state = self._roots.of(tenant, self.state)
        self._charge_root(tenant, root.number)
        asid, generation = page_tables.open_space(self.state, root.number, root.seed, advice, ids)
        if self._watching:
            self._opened(tenant, root, ids, asid)
        return AddressSpace(self, asid, generation)

    def why(self, token_ids: Sequence[int] | npt.NDArray[np.integer], *, tenant: bytes = b"") -> Miss:
        """Why `open` finds no more of `token_ids` than it does: see misses.Miss. An operator's question: it looks at all tenants."""
        return explain(self.state, self._roots, tenant_name(tenant), token_row(token_ids))

    @exclusive
    def fork(self, space: AddressSpace) -> AddressSpace:
        """See AddressSpace.fork."""
        asid = self._settled(space, "fork")
        self._grow_tables()
        child = page_tables.fork_space(self.state, asid)
        return AddressSpace(self, child, int(self.state.spaces["generation"][child]))

    @exclusive
    def truncate(self, space: AddressSpace, length: int) -> None:
        """See AddressSpace.truncate."""
        asid = self._settled(space, "truncate")
        held = int(self.state.spaces["length"][asid])
        if (length := whole(length, "length")) > held:
            raise InvalidRequest(f"truncate to {length}: the space holds {held} tokens; give 0 up to that")
        page, offset = divmod(length, self.block_size)
        if offset and (self.state.table[asid : asid + len(self.groups), page] == st.HOLE).any():
            raise InvalidRequest(
                f"truncate to {length}: page {page} was punched and cannot be written again; truncate to its start or end"
            )
        blind = blind_group(self.state, asid, length) if length < held else -1
        if blind >= 0:
            raise InvalidRequest(
                f"truncate to {length}: group {blind} sees {self.groups[blind].window} positions back, and some of these pages were given "
                f"back at length {held}; truncate to 0, or open the prompt again"
            )
        page_tables.truncate_space(self.state, asid, length)

    @exclusive
    def punch(self, space: AddressSpace, first: int, last: int) -> None:
        """See AddressSpace.punch."""
        asid = self._settled(space, "punch")
        full = int(self.state.spaces["length"][asid]) // self.block_size
        first, last = whole(first, "first page"), whole(last, "last page")
        if not first <= last <= full:
            raise InvalidRequest(
                f"punch pages {first} to {last}: the space has {full} full pages; give 0 <= first <= last <= {full}"
            )
        if first < last:
            page_tables.punch_space(self.state, asid, first, last)

    @exclusive
    def release(self, space: AddressSpace) -> None:
        """See AddressSpace.release."""
        self._close(self._releasable(space))

    # -- the step ----------------------------------------------------------------------------------------------------------------

    @exclusive
    def plan(self, batch: Spaces, counts: Counts) -> Plan:
        """Map the frames for `counts[i]` new tokens of each space (AddressSpaces, or an int array of asids), all of them or none.

        Raises: OutOfFrames, InvalidRequest, StaleHandle; nothing was changed then
        """
        asids = self._asids(batch)
        wanted = count_row(counts, len(asids))
        step = steps.plan_step(self.state, asids, wanted)
        if step.code == steps.NARROW:
            self.state = st.with_wider_table(self.state, step.where)
            step = steps.plan_step(self.state, asids, wanted)
        if step.code != steps.OK:
            refuse_plan(self.state, (step.code, step.where), asids, wanted, self._accounts)
        plan = Plan(
            slots=step.slots[0],
            positions=step.positions,
            seq_lens=step.seq_lens,
            cu_seqlens_q=step.cu_seqlens_q,
            rows=asids,
            block_table=self.state.table,
            starts=step.starts,
            counts=wanted,
            group_slots=step.slots,
            splits=step.copies,
            manager=self,
        )
        self._plans.add(plan)
        return plan

    @exclusive
    def commit(
        self, plan: Plan, token_ids: Sequence[int] | npt.NDArray[np.integer], counts: Counts | None = None
    ) -> None:
        """The KV of `token_ids` was stored where `plan` said: they are part of their sequences now, and full pages become findable.

        Shapes: token_ids int32 [sum(counts)], in plan order. counts [B]: how many of the planned tokens of each sequence are kept
                (rejected drafts are rolled back, their frames given back); None for all.
        Raises: PlanConflict if the plan was settled, an older one of a space was not, or a newer one stands on tokens given back;
                InvalidRequest if the numbers do not fit. Nothing was changed then.
        """
        self._unsettled(plan, "commit")
        accepted = plan.counts if counts is None else count_row(counts, len(plan.rows))
        ids = token_row(token_ids)
        if len(ids) != (plan.num_tokens if counts is None else accepted.sum()):
            raise InvalidRequest(
                f"commit got {len(ids)} token ids and counts {accepted.tolist()[:8]} for a plan of {len(plan.rows)} spaces; "
                "give one count for each space, and as many ids as they add up to"
            )
        code, where = steps.commit_step(
            self.state, plan.rows, plan.starts, plan.cu_seqlens_q, plan.splits, accepted, ids
        )
        if code != steps.OK:
            refuse_settling(self.state, plan, code, where)
        plan.settled = "committed"
        self._plans.discard(plan)
        if debug.level() >= 3:
            self.check(3)

    @exclusive
    def abort(self, plan: Plan, *, copied: bool = False) -> None:
        """Nothing comes of the plan: every page table returns to what it was before.

        copied: whether its copies were made. Then nobody knows what was written after them, and tails that were split stay split.
        Raises: PlanConflict if it was settled already or is not the newest of its spaces
        """
        self._unsettled(plan, "abort")
        code, where = steps.abort_step(
            self.state, plan.rows, plan.starts, plan.cu_seqlens_q, plan.splits, flag(copied, "copied")
        )
        if code != steps.OK:
            refuse_settling(self.state, plan, code, where)
        plan.settled = "aborted"
        self._plans.discard(plan)

    # -- what is kept, and until when ------------------------------------------------------------------------------------------------

    @exclusive
    def pin(self, what: AddressSpace | npt.NDArray[np.int32], *, owner: str = "", deadline: float | None = None) -> Pin:
        """Keep the committed full pages of a space, or published frames and all that is before them, until `unpin`.

        Whoever writes to one of them copies it first. O(pages). Frames held by several pins count for each under the cap.
        Raises: InvalidRequest beyond `max_pinned`, or for frames that no prompt could find; StaleHandle
        """
        deadline = None if deadline is None else real(deadline, "deadline")
        if isinstance(what, AddressSpace):
            asid = self._asid(what)
            pages = int(self.state.spaces["length"][asid]) // self.block_size
            num_frames = int(page_tables.frames_in(self.state, asid, pages))
        else:
            wanted = frame_row(what, self.num_frames)
            if not len(wanted):
                raise InvalidRequest("pin of no frames; name at least one, or pin the space that maps them")
            stranger, closure = page_tables.prefix_closure(self.state, wanted)
            if stranger >= 0:
                raise InvalidRequest(
                    f"pin of frame {stranger}: it is not published under a whole prefix; pin the space that maps it"
                )
            pages = num_frames = len(closure)
        held = int(self.state.reg[st.PINNED])
        if held + num_frames > self.max_pinned:
            raise InvalidRequest(
                f"pin of {num_frames} frames: pins hold {held} of at most {self.max_pinned}; unpin some, or raise max_pinned"
            )
        self._grow_tables(pages=pages)
        row = (
            page_tables.pin_space(self.state, asid)
            if isinstance(what, AddressSpace)
            else page_tables.pin_frames(self.state, closure)
        )
        self._pins[row] = Pin(row, int(self.state.spaces["generation"][row]), num_frames, owner, deadline)
        return self._pins[row]

    @exclusive
    def unpin(self, pin: Pin) -> None:
        """Let go of what `pin` holds. Raises: DoubleRelease the second time."""
        if not isinstance(pin, Pin):
            raise InvalidRequest(f"unpin of {pin!r}; give the handle that pin() returned")
        if self._pins.get(pin.asid) is not pin:  # an equal one may be that of another manager
            raise DoubleRelease(
                f"pin {pin.asid} of {pin.owner or 'nobody named'} was given back already, or made by another manager; "
                "give each to the manager that made it, and drop the handle after unpin()"
            )
        del self._pins[pin.asid]
        self._outdate(pin.asid)
        page_tables.unpin_row(self.state, pin.asid)

    def overdue(self, now: float) -> list[Pin]:
        """The pins whose deadline, on the caller's clock, is before `now`. Nothing is unpinned: the transfer may still be writing."""
        now = real(now, "now")
        return [pin for pin in self._pins.values() if pin.deadline is not None and pin.deadline < now]

    @exclusive
    def retire(self, epoch: int, batch: Sequence[AddressSpace] = ()) -> None:
        """Work was launched that reads the frames of now: what is dropped from here on is not reused until `advance(epoch)`.

        `batch` is released under it at once. Epochs grow; an engine whose steps overlap calls retire(n) when it launches step n, and
        advance(n) when it sees that step n has finished.
        Raises: InvalidRequest unless `epoch` is newer than the last one; DoubleRelease, and then nothing was changed
        """
        reg, epoch = self.state.reg, whole(epoch, "epoch")
        newest = int(reg[st.EPOCH])
        if epoch <= newest:
            raise InvalidRequest(f"retire under epoch {epoch}: epoch {newest} was opened already; give a larger number")
        oldest = int(reg[st.PASSED]) if newest > reg[st.PASSED] else epoch - 1
        if epoch - oldest >= 2**30:
            raise InvalidRequest(
                f"retire under epoch {epoch}: {oldest} passed and later ones have not; number epochs by steps"
            )
        for space in self._handles(batch):
            self._releasable(space)
        if len({space.asid for space in batch}) < len(batch):
            raise DoubleRelease("retire names an address space twice")
        reg[st.EPOCH], reg[st.PASSED] = epoch, oldest
        for space in batch:
            self._close(space.asid)

    @exclusive
    def advance(self, epoch: int) -> int:
        """All work launched up to `epoch` has finished: the frames that waited for it can be had. Returns how many did. Again is harmless.

        Raises: InvalidRequest for an epoch that was not opened
        """
        newest, epoch = int(self.state.reg[st.EPOCH]), whole(epoch, "epoch", -1)
        if epoch > newest:
            raise InvalidRequest(f"advance to epoch {epoch}: the newest one is {newest}; retire(epoch) opens one")
        if epoch <= self.state.reg[st.PASSED]:
            return 0  # marks are kept modulo 2**31: one that passed long ago could be taken for one to come
        return int(frames.pass_epoch(self.state, epoch))

    @exclusive
    def advise(
        self, space: AddressSpace, advice: str = "WILLNEED", *, retain: tuple[float, float] | None = None
    ) -> None:
        """Say what the pages of `space` are worth once it lets go of them. Forks made later inherit it.

        "DONTNEED": evict them before all others. "COLD": before all but those. "WILLNEED": like any other, and as if used once more.
        retain=(priority, half_life): see policies.Priority; half_life counts plans.
        Raises: InvalidRequest for other words, or if the policy knows no retention; StaleHandle
        """
        asid = self._asid(space)
        offsets = {"DONTNEED": st.DONTNEED - st.NORMAL, "COLD": st.COLD - st.NORMAL, "WILLNEED": 0}
        if not isinstance(advice, str) or advice not in offsets:
            raise InvalidRequest(f"advice is {advice!r}; it is one of {', '.join(offsets)}")
        if retain is not None and not (isinstance(retain, tuple | list) and len(retain) == 2):
            raise InvalidRequest(f"retain is {retain!r}; give (priority, half_life)")
        offset = offsets[advice]
        if retain is not None:
            offset = self._retention(real(retain[0], "priority"), real(retain[1], "half_life"))
        if advice == "WILLNEED":
            page_tables.count_use(self.state, asid)
        self.state.spaces["advice"][asid] = offset

    # -- the pool ----------------------------------------------------------------------------------------------------------------

    @exclusive
    def evict(self, count: int) -> int:
        """Free up to `count` cached frames, in the policy's order; returns how many."""
        return int(steps.evict_frames(self.state, whole(count, "count")))

    @exclusive
    def forget(self) -> int:
        """No prompt finds anything that was computed so far, as after an update of the weights. Returns how many cached frames that freed.

        Who runs goes on, plans under way included, and publishes nothing any more (a space truncated to 0 begins anew); what an epoch or
        a plan still reads is free when that has ended. Readers of events are told AllBlocksCleared. O(frames).
        Raises: InvalidRequest while there are pins, which promise that what they hold stays; nothing was changed then
        """
        if self._pins:
            held, owner = int(self.state.reg[st.PINNED]), next(iter(self._pins.values())).owner
            raise InvalidRequest(
                f"forget() while {len(self._pins)} pins hold {held} frames, the first for {owner or 'nobody named'}; unpin them first"
            )
        freed = int(forget_pages(self.state))
        if debug.level() >= 3:
            self.check()
        return freed

    @exclusive
    def resize(self, num_frames: int) -> I32:
        """Make the pool larger or smaller. Smaller: cached frames are evicted until the rest fits, then what lies beyond the end moves.

        Returns: int32 [M, 2]: source and target of each frame that moved; copy its bytes before the next plan. Sources lie beyond the new
                 end, targets below it; no target is a source. Spaces, plans under way and what prompts find are what they were.
        Raises:  OutOfFrames if what is mapped does not fit; PlanConflict or InvalidRequest where a frame would move that a plan, an
                 epoch or a pin names. Nothing was changed then.
        """
        num_frames = whole(num_frames, "num_frames", 1, 2**31)
        refuse_resize(self.state, num_frames)
        old = self.state
        self.state, moves = resized(old, num_frames)
        self._log.renumber(old, moves)
        if self._last_callers:
            self._last_callers.renumber(moves, num_frames)
        self.num_frames = num_frames
        if debug.level() >= 3:
            self.check()
        return moves

    @property
    def reserve(self) -> int:
        """Frames that `admits` keeps free."""
        return int(np.ceil(self._shares[0] * self.num_frames))

    @property
    def max_pinned(self) -> int:
        """Frames that pins may hold."""
        return int(self._shares[1] * self.num_frames)

    @property
    def available(self) -> int:
        """Frames a plan could take now: free or evictable. With quotas see `available_to`."""
        return int(self.state.reg[st.NUM_FREE] + self.state.reg[st.NUM_EVICTABLE])

    @property
    def pending(self) -> int:
        """Frames that will be available once the plans and epochs under way have ended: a reason to wait rather than to preempt."""
        return frames.pending(self.state)

    def available_to(self, tenant: bytes = b"") -> int:
        """Frames a plan for spaces of `tenant` alone could take now: what its hard quota and the protected shares of others leave."""
        return max(0, min(headroom(self.state, self._accounts.get(tenant_name(tenant), 0))))

    def admits(self, num_frames: int, *, tenant: bytes = b"") -> bool:
        """Whether a new sequence of `tenant` may take `num_frames` frames and leave the watermark's share to those that run."""
        pool, quota = headroom(self.state, self._accounts.get(tenant_name(tenant), 0))
        return whole(num_frames, "num_frames") <= min(pool - self.reserve, quota)

    def stats(self) -> Stats:
        """The counters, and how full the mapped frames are. O(open spaces), and O(frames) where tenants have quotas."""
        return gather(self.state, self._missed_other_root, self.usages())

    def mean_run(self) -> float:
        """How contiguous the frames of open spaces are: pages / runs of neighbouring frames (AddressSpace.runs). O(pages)."""
        return mean_run(self.state)

    def check(self, level: int = 3) -> None:
        """Prove the invariants: 1 the counters, 2 every frame, 3 every page, list and index entry. O(frames + pages).

        Raises: InvariantViolation naming the law and the first frame or space that breaks it
        """
        seeds = {root.number: root.seed for root in self._roots.by_tenant.values()}
        try:
            check_state(self.state, level, Expected(self.policy, seeds, self._plans, self.groups))
        except InvariantViolation as broken:
            if self._last_callers is None:
                raise
            told = self._last_callers.of_frame(broken.frame) if broken.frame is not None else ""
            told += self._last_callers.of_space(broken.asid) if broken.asid is not None else ""
            raise InvariantViolation(f"{broken}{told}", law=broken.law, frame=broken.frame, asid=broken.asid) from None

    def __repr__(self) -> str:
        now = self.stats()
        return (
            f"MemoryManager({self.num_frames} frames of {self.block_size} tokens: "
            f"{now.free} free, {now.mapped} mapped, {now.cached} cached; {now.spaces} spaces)"
        )

    # -- what handles ask ----------------------------------------------------------------------------------------------------------

    def is_stale(self, space: AddressSpace) -> bool:
        """Whether `space` was released (I8). Raises: InvalidRequest if it is none, or another manager's."""
        if not isinstance(space, AddressSpace):
            raise InvalidRequest(f"{space!r} is no AddressSpace; give what open() or fork() returned")
        if space.manager is not self:
            raise InvalidRequest(f"{space.asid} is an address space of another manager; use the one that opened it")
        return bool(self.state.spaces["generation"][space.asid] != space.generation)

    def length_of(self, space: AddressSpace) -> int:
        """Committed tokens of `space`."""
        return int(self.state.spaces["length"][self._asid(space)])

    def pages_of(self, space: AddressSpace, group: int = 0) -> I32:
        """See AddressSpace.pages and pages_in."""
        asid = self._asid(space)
        if (group := whole(group, "group")) >= len(self.groups):
            raise InvalidRequest(
                f"pages of group {group}: this manager has {len(self.groups)}; they are numbered from 0"
            )
        return self.state.table[asid + group, : self.state.spaces["num_pages"][asid]].copy()

    def tokens_of(self, space: AddressSpace) -> I32:
        """See AddressSpace.token_ids."""
        asid = self._asid(space)
        pages, length = self.pages_of(space), int(self.state.spaces["length"][asid])
        held = np.where((pages >= 0)[:, None], self.state.tokens[pages], -1)
        return held.reshape(-1)[:length].astype(np.int32)

    # -- inside ----------------------------------------------------------------------------------------------------------------------

    def _asid(self, space: AddressSpace) -> int:
        if self.is_stale(space):
            raise StaleHandle(
                f"address space {space.asid} was released (generation {space.generation} of it); open or fork a new one{self._told(space)}"
            )
        return space.asid

    def _asids(self, batch: Spaces) -> I32:
        if isinstance(batch, np.ndarray):
            return asid_row(batch)
        self._handles(batch)
        asids = np.fromiter([space.asid for space in batch], np.int32, len(batch))
        ours = all(space.manager is self for space in batch)
        if not ours or (self.state.spaces["generation"][asids] != [space.generation for space in batch]).any():
            for space in batch:
                self._asid(space)  # raises at the first that is stale or foreign
        return asids

    @staticmethod
    def _handles(batch: Sequence[AddressSpace]) -> Sequence[AddressSpace]:
        if not isinstance(batch, Sequence) or not all(isinstance(space, AddressSpace) for space in batch):
            raise InvalidRequest(
                "the batch is, or holds, something that is no AddressSpace; give a list of them, or (to plan) a numpy array of asids"
            )
        return batch

    def _releasable(self, space: AddressSpace) -> int:
        if self.is_stale(space):
            raise DoubleRelease(
                f"address space {space.asid} was released already; drop the handle after the first release(){self._told(space)}"
            )
        return space.asid

    def _told(self, space: AddressSpace) -> str:
        """Who had it last, if anybody writes that down."""
        return self._last_callers.of_space(space.asid) if self._last_callers else ""

    def _close(self, asid: int) -> None:
        if self._reuse:
            record_release(self.state, self._reuse.sample, asid)
        self._outdate(asid)
        page_tables.close_space(self.state, asid)

    def _outdate(self, asid: int) -> None:
        """Handles of the row are stale now."""
        self.state.spaces["generation"][asid : asid + 1] += 1  # of one number numpy would warn when it wraps around

    def _retention(self, priority: float, half_life: float) -> int:
        if not isinstance(self.policy, Priority):
            asked = f"priority {priority} with half-life {half_life}"
            raise InvalidRequest(f"{asked} under policy {self.policy.name!r}, which knows none; use policy='priority'")
        return retention(priority, half_life)

    def _settled(self, space: AddressSpace, verb: str) -> int:
        asid = self._asid(space)
        plans = int(self.state.spaces["outstanding"][asid])
        if plans:
            raise PlanConflict(
                f"{verb} of address space {asid}: {plans} plans of it are outstanding; commit or abort them first"
            )
        return asid

    def _unsettled(self, plan: Plan, verb: str) -> None:
        if not isinstance(plan, Plan):
            raise InvalidRequest(f"{verb} of {plan!r}; give what plan() returned")
        if plan.manager is not self:
            raise InvalidRequest(f"{verb}: this plan was made by another manager; give it back to that one")
        if plan.settled:
            raise PlanConflict(f"{verb}: this plan was {plan.settled} already; make a new one")

    def _grow_tables(self, pages: int = 0) -> None:
        if self.state.reg[st.NUM_SPARE] == 0:
            if 2 * len(self.state.spaces) > st.MAX_SPACES:
                most = len(self.state.spaces) // len(self.groups)
                raise InvalidRequest(f"{most} spaces and pins are open, the most that there can be; release some")
            self.state = st.with_more_rows(self.state)
        pages = min(pages, self.num_frames)  # a longer prefix cannot be known
        if pages > self.state.table.shape[1]:
            self.state = st.with_wider_table(self.state, pages)
