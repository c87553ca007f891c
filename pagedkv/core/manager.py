"""MemoryManager: the door to core. It checks arguments, speaks in errors, grows the tables; the rules live in the compiled functions.

It knows spaces, plans and roots; it must not know tensors, models or time. One thread calls it; a second one that comes in meanwhile is
refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv import debug
from pagedkv.core import spaces, steps
from pagedkv.core import state as st
from pagedkv.core.check import check_state
from pagedkv.core.plan import Plan
from pagedkv.core.space import AddressSpace
from pagedkv.core.state import I32, I64
from pagedkv.errors import ConcurrentUse, DoubleRelease, InvalidRequest, OutOfFrames, PlanConflict, StaleHandle

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Spaces = Sequence[AddressSpace] | npt.NDArray[np.int32] | npt.NDArray[np.int64]
Counts = Sequence[int] | npt.NDArray[np.int32] | npt.NDArray[np.int64]


def _exclusive(
    method: Callable[Concatenate[MemoryManager, Parameters], Result],
) -> Callable[Concatenate[MemoryManager, Parameters], Result]:
    @wraps(method)
    def guarded(self: MemoryManager, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if not self._entered.acquire(blocking=False):
            raise ConcurrentUse(
                f"MemoryManager.{method.__name__} was called while another call was under way; one thread owns a manager. "
                "Call it from one thread, or hold a lock of your own around it."
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            self._entered.release()

    return guarded


@dataclass(frozen=True)
class Stats:
    """What the pool holds now, and what it has done. Frames and tokens are counts; `waste` and `hit_rate` are shares of 1."""

    num_frames: int
    free: int
    mapped: int
    cached: int
    retired: int
    evictable: int
    spaces: int
    tokens: int  # committed, over all open spaces; shared ones count for each
    slots_mapped: int  # distinct mapped frames x block_size
    slots_wasted: int  # of these, how many hold no token
    peak_mapped: int
    tokens_asked: int  # whole pages that open() looked for, in tokens
    tokens_matched: int
    evictions: int
    copies: int
    deduplicated: int

    @property
    def waste(self) -> float:
        """Share of allocated slots that hold no token."""
        return self.slots_wasted / self.slots_mapped if self.slots_mapped else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens looked for that were found."""
        return self.tokens_matched / self.tokens_asked if self.tokens_asked else 0.0


class MemoryManager:
    """Page tables over a pool of `num_frames` frames of `block_size` tokens each.

    prefix_cache: publish full pages at commit and map them again for equal prefixes.
    watermark:    share of the pool that `admits` keeps free for the sequences that run already.
    Raises:       InvalidRequest for a pool that cannot be.
    """

    def __init__(self, num_frames: int, block_size: int, *, prefix_cache: bool = True, watermark: float = 0.0) -> None:
        if not 1 <= num_frames < 2**31:
            raise InvalidRequest(f"num_frames is {num_frames}; a pool has at least 1 and fewer than 2**31 frames")
        if block_size < 1:
            raise InvalidRequest(f"block_size is {block_size}; a frame holds at least one token")
        if not 0.0 <= watermark < 1.0:
            raise InvalidRequest(f"watermark is {watermark}; it is the share of the pool to keep free, from 0 to less than 1")
        self.num_frames, self.block_size = num_frames, block_size
        self.reserve = int(np.ceil(watermark * num_frames))
        self.state = st.new_state(num_frames, block_size, publishing=prefix_cache)
        self._roots: dict[bytes, int] = {}
        self._roots_kept = 8  # sweep the unused ones when there are more
        self._entered = threading.Lock()

    # -- spaces ------------------------------------------------------------------------------------------------------------------

    @_exclusive
    def open(self, token_ids: Sequence[int] | npt.NDArray[np.integer] = (), *, tenant: bytes = b"") -> AddressSpace:
        """A new space that maps the longest known prefix of `token_ids`; `len(space)` of them need not be computed.

        At least one token is left to compute, since its logits are what the caller is after. Equal tokens of different
        tenants are different (put an adapter's or image's digest into `tenant` too).
        Raises: InvalidRequest if the ids are not one row of int32 numbers
        """
        ids = self._token_ids(token_ids)
        self._make_room(pages=len(ids) // self.block_size)
        asid = spaces.open_space(self.state, self._root(tenant), ids)
        return AddressSpace(self, asid, int(self.state.spaces["generation"][asid]))

    @_exclusive
    def fork(self, space: AddressSpace) -> AddressSpace:
        """See AddressSpace.fork."""
        asid = self._settled(space, "fork")
        self._make_room()
        child = spaces.fork_space(self.state, asid)
        return AddressSpace(self, child, int(self.state.spaces["generation"][child]))

    @_exclusive
    def truncate(self, space: AddressSpace, length: int) -> None:
        """See AddressSpace.truncate."""
        asid = self._settled(space, "truncate")
        held = int(self.state.spaces["length"][asid])
        if not 0 <= length <= held:
            raise InvalidRequest(f"truncate to {length}: the space holds {held} tokens; give 0 up to that")
        page, offset = divmod(length, self.block_size)
        if offset and self.state.table[asid, page] == st.HOLE:
            raise InvalidRequest(f"truncate to {length}: page {page} was punched and cannot be written again; truncate to its start or end")
        spaces.truncate_space(self.state, asid, length)

    @_exclusive
    def punch(self, space: AddressSpace, first: int, last: int) -> None:
        """See AddressSpace.punch."""
        asid = self._settled(space, "punch")
        full = int(self.state.spaces["length"][asid]) // self.block_size
        if not 0 <= first <= last <= full:
            raise InvalidRequest(f"punch pages {first} to {last}: the space has {full} full pages; give 0 <= first <= last <= {full}")
        if first < last:
            spaces.punch_space(self.state, asid, first, last)

    @_exclusive
    def release(self, space: AddressSpace) -> None:
        """See AddressSpace.release."""
        if space.manager is self and self.is_stale(space):
            raise DoubleRelease(f"address space {space.asid} was released already; drop the handle after the first release()")
        asid = self._asid(space)
        self.state.spaces["generation"][asid] += 1
        spaces.close_space(self.state, asid)

    # -- the step ----------------------------------------------------------------------------------------------------------------

    @_exclusive
    def plan(self, batch: Spaces, counts: Counts) -> Plan:
        """Map the frames for `counts[i]` new tokens of each space (AddressSpaces, or an int array of asids), all of them or none.

        Raises: OutOfFrames, InvalidRequest, StaleHandle; nothing was changed then
        """
        asids = self._asids(batch)
        wanted = np.asarray(counts, np.int64)
        if wanted.shape != asids.shape:
            raise InvalidRequest(f"plan got {len(asids)} spaces and counts of shape {list(wanted.shape)}; give one count for each space")
        made = steps.plan_step(self.state, asids, wanted)
        if made[0] == steps.NARROW:
            self.state = st.with_wider_table(self.state, made[1])
            made = steps.plan_step(self.state, asids, wanted)
        if made[0] != steps.OK:
            self._refuse_plan(made[0], made[1], asids, wanted)
        _, _, slots, positions, splits, seq_lens, cu_seqlens_q, starts = made
        return Plan(slots, positions, seq_lens, cu_seqlens_q, asids, self.state.table, starts, splits)

    @_exclusive
    def commit(self, plan: Plan, token_ids: Sequence[int] | npt.NDArray[np.integer], counts: Counts | None = None) -> None:
        """The KV of `token_ids` was stored where `plan` said: they are part of their sequences now, and full pages become findable.

        Shapes: token_ids int32 [sum(counts)], in plan order. counts [B]: how many of the planned tokens of each sequence are kept
                (rejected drafts are rolled back, their frames given back); None for all.
        Raises: PlanConflict if the plan was settled, an older one of a space was not, or a newer one stands on tokens given back;
                InvalidRequest if the numbers do not fit. Nothing was changed then.
        """
        self._unsettled(plan, "commit")
        accepted = np.asarray(plan.counts if counts is None else counts, np.int64)
        ids = self._token_ids(token_ids)
        if accepted.shape != plan.rows.shape or accepted.sum() != len(ids):
            raise InvalidRequest(
                f"commit got {len(ids)} token ids and counts {accepted.tolist()[:8]} for a plan of {len(plan.rows)} spaces; "
                "give one count for each space, and as many ids as they add up to"
            )
        code, where = steps.commit_step(self.state, plan.rows, plan.starts, plan.cu_seqlens_q, plan.splits, accepted, ids)
        if code != steps.OK:
            self._refuse_settling(plan, code, where)
        plan.settled = "committed"
        if debug.level() >= 3:
            check_state(self.state, 3)

    @_exclusive
    def abort(self, plan: Plan) -> None:
        """The plan was not run: return every page table to what it was before, copies undone.

        Raises: PlanConflict if it was settled already or is not the newest of its spaces
        """
        self._unsettled(plan, "abort")
        code, where = steps.abort_step(self.state, plan.rows, plan.starts, plan.cu_seqlens_q, plan.splits)
        if code != steps.OK:
            self._refuse_settling(plan, code, where)
        plan.settled = "aborted"

    # -- the pool ----------------------------------------------------------------------------------------------------------------

    @_exclusive
    def evict(self, count: int) -> int:
        """Free up to `count` cached frames, least recently used first; returns how many."""
        if count < 0:
            raise InvalidRequest(f"evict {count} frames: give 0 or more")
        return int(steps.evict_frames(self.state, count))

    @property
    def available(self) -> int:
        """Frames a plan could take now: free or evictable."""
        return int(self.state.reg[st.NUM_FREE] + self.state.reg[st.NUM_EVICTABLE])

    def admits(self, num_frames: int) -> bool:
        """Whether a new sequence may take `num_frames` frames and leave the watermark's share to those that run."""
        return num_frames + self.reserve <= self.available

    def stats(self) -> Stats:
        """The counters, and how full the mapped frames are. O(open spaces)."""
        s, reg = self.state, self.state.reg
        rows = np.flatnonzero(s.spaces["status"] != st.UNUSED)
        free, cached, retired = (int(reg[i]) for i in (st.NUM_FREE, st.NUM_CACHED, st.NUM_RETIRED))
        mapped = self.num_frames - free - cached - retired
        return Stats(
            num_frames=self.num_frames,
            free=free,
            mapped=mapped,
            cached=cached,
            retired=retired,
            evictable=int(reg[st.NUM_EVICTABLE]),
            spaces=len(rows),
            tokens=int(s.spaces["length"][rows].sum()),
            slots_mapped=mapped * self.block_size,
            slots_wasted=self._wasted(rows),
            peak_mapped=int(reg[st.PEAK]),
            tokens_asked=int(reg[st.ASKED]),
            tokens_matched=int(reg[st.MATCHED]),
            evictions=int(reg[st.EVICTIONS]),
            copies=int(reg[st.COPIES]),
            deduplicated=int(reg[st.DEDUPLICATED]),
        )

    def check(self, level: int = 3) -> None:
        """Prove the invariants: 1 the counters, 2 every frame, 3 every page, list and index entry. O(frames + pages).

        Raises: InvariantViolation naming the law and the first frame or space that breaks it
        """
        check_state(self.state, level)

    def __repr__(self) -> str:
        now = self.stats()
        return (
            f"MemoryManager({self.num_frames} frames of {self.block_size} tokens: "
            f"{now.free} free, {now.mapped} mapped, {now.cached} cached; {now.spaces} spaces)"
        )

    # -- what handles ask ----------------------------------------------------------------------------------------------------------

    def is_stale(self, space: AddressSpace) -> bool:
        """Whether `space` was released (I8)."""
        return bool(self.state.spaces["generation"][space.asid] != space.generation)

    def length_of(self, space: AddressSpace) -> int:
        """Committed tokens of `space`."""
        return int(self.state.spaces["length"][self._asid(space)])

    def pages_of(self, space: AddressSpace) -> I32:
        """See AddressSpace.pages."""
        asid = self._asid(space)
        return self.state.table[asid, : self.state.spaces["num_pages"][asid]].copy()

    def tokens_of(self, space: AddressSpace) -> I32:
        """See AddressSpace.token_ids."""
        asid = self._asid(space)
        pages, length = self.pages_of(space), int(self.state.spaces["length"][asid])
        held = np.where((pages >= 0)[:, None], self.state.tokens[pages], -1)
        return held.reshape(-1)[:length].astype(np.int32)

    # -- inside ----------------------------------------------------------------------------------------------------------------------

    def _asid(self, space: AddressSpace) -> int:
        if space.manager is not self:
            raise InvalidRequest(f"{space.asid} is an address space of another manager; use the one that opened it")
        if self.is_stale(space):
            raise StaleHandle(f"address space {space.asid} was released (generation {space.generation} of it); open or fork a new one")
        return space.asid

    def _asids(self, batch: Spaces) -> I32:
        if isinstance(batch, np.ndarray):
            return np.array(batch, np.int32)  # a copy: the plan keeps it
        return np.fromiter(map(self._asid, batch), np.int32, len(batch))

    def _settled(self, space: AddressSpace, verb: str) -> int:
        asid = self._asid(space)
        plans = int(self.state.spaces["outstanding"][asid])
        if plans:
            raise PlanConflict(f"{verb} of address space {asid}: {plans} plans of it are outstanding; commit or abort them first")
        return asid

    def _unsettled(self, plan: Plan, verb: str) -> None:
        if plan.settled:
            raise PlanConflict(f"{verb}: this plan was {plan.settled} already; make a new one")

    def _token_ids(self, token_ids: Sequence[int] | npt.NDArray[np.integer]) -> I32:
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
            raise InvalidRequest(f"token ids of shape {list(ids.shape)} and dtype {ids.dtype}; give one row of integers")
        if len(ids) and ids.dtype != np.int32 and (ids.min() < -(2**31) or ids.max() >= 2**31):
            raise InvalidRequest("a token id does not fit int32")
        return np.ascontiguousarray(ids, np.int32)

    def _root(self, tenant: bytes) -> int:
        if tenant not in self._roots:
            if len(self._roots) >= self._roots_kept:
                live = {name: root for name, root in self._roots.items() if self.state.root_refs[root]}
                self._roots, self._roots_kept = live, 2 * len(live) + 8
            taken = set(self._roots.values())
            root = next(number for number in range(len(taken) + 1) if number not in taken)
            if root >= len(self.state.root_refs):
                self.state = st.with_more_roots(self.state)
            self._roots[tenant] = root
        return self._roots[tenant]

    def _make_room(self, pages: int = 0) -> None:
        if self.state.reg[st.NUM_SPARE] == 0:
            self.state = st.with_more_rows(self.state)
        pages = min(pages, self.num_frames)  # a longer prefix cannot be known
        if pages > self.state.table.shape[1]:
            self.state = st.with_wider_table(self.state, pages)

    def _wasted(self, rows: I64) -> int:
        s, size = self.state, self.block_size
        length = s.spaces["length"][rows]
        used = -(-length // size)  # pages that hold tokens; the rest are planned and empty
        wasted = int((s.spaces["num_pages"][rows] - used).sum()) * size
        rows, length, used = rows[used > 0], length[used > 0], used[used > 0]
        tails, fill = s.table[rows, used - 1], length - (used - 1) * size
        frames, owner = np.unique(tails, return_inverse=True)
        fullest = np.zeros(len(frames), np.int64)
        np.maximum.at(fullest, owner, fill)
        return wasted + int((size - fullest[frames >= 0]).sum())

    def _refuse_plan(self, code: int, where: int, asids: I32, counts: I64) -> None:
        reg = self.state.reg
        if code == steps.SHORT:
            raise OutOfFrames(where, int(reg[st.NUM_FREE]), int(reg[st.NUM_EVICTABLE]), int(reg[st.NUM_RETIRED]))
        if code == steps.NEGATIVE:
            raise InvalidRequest(f"plan asks for {counts[where]} tokens of address space {asids[where]}; give 0 or more")
        if code == steps.TWICE:
            raise InvalidRequest(f"plan names address space {asids[where]} twice; add its counts up")
        raise StaleHandle(f"plan names address space {asids[where]}, which is not open; open or fork one")

    def _refuse_settling(self, plan: Plan, code: int, where: int) -> None:
        asid = plan.rows[where]
        if code == steps.OUT_OF_ORDER:
            held = int(self.state.spaces["length"][asid])
            raise PlanConflict(
                f"this plan of address space {asid} starts at token {plan.starts[where]}, which holds {held}; commit the older plans first"
            )
        if code == steps.TOO_MANY:
            raise InvalidRequest(f"commit keeps more tokens of address space {asid} than the {plan.counts[where]} planned, or fewer than 0")
        raise PlanConflict(f"a newer plan of address space {asid} stands on the tokens to be given back; abort it first")
