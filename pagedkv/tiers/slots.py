"""SlotTier: a tier of equal slots under one FramePool, the base of host memory and disk.

    submit(STORE)  find(name)? ─no─▶ take a slot (evicts the slots used longest ago) ─▶ task: read frame, seal slot
    poll           publish(slot, name); drop(slot): from here on `lookup` finds it
    submit(LOAD)   find(name) ─▶ share(slot), so that it is not evicted ─▶ task: write frame, verify
    poll           drop(slot); a slot whose page was damaged loses its name

All calls of the pool are made by the owner thread. The tasks get slot and frame numbers, and touch bytes only. A slot
is sealed with the name and the checksum of its page by the task that filled it, after it has seen that the frame held
its page all the time.

Subclasses say where the bytes lie: `_begin`, `_store`, `_load`, `_void`, `_end`.
"""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.core.arguments import real
from pagedkv.core.frame_pool.pool import FramePool
from pagedkv.errors import InvalidRequest, OutOfFrames
from pagedkv.spec import parse_bytes
from pagedkv.tiers.mover import Mover, Task
from pagedkv.tiers.pool_view import PoolView
from pagedkv.tiers.tier import CLOSING, KEY_BYTES, Job, Key, Op, Result, Tier, TierStats

PART: Final = 16 << 20
"""Bytes that a thread moves at a time, see `_part`. A load waits for at most one such part."""
MOST_STORES: Final = 64
MOST_BYTES: Final = 64 << 20
"""Pages that are stored at a time: MOST_STORES, or MOST_BYTES if these are more pages."""
MOST_SLOTS: Final = 2**31
EXITING: Final = 2.0
"""Seconds that the end of a process waits for a tier that was not closed."""
GONE, CORRUPT, CHANGED, FULL, CANCELLED = "gone", "corrupt", "changed", "full", "cancelled"


@dataclass(slots=True, eq=False)
class Move:
    """One page under way. slot: -1 if there is none. why: see Result. seconds: how long its bytes took."""

    job: Job
    key: Key
    frame: int
    slot: int
    stamp: int = 0
    why: str = ""
    seconds: float = 0.0


class SlotTier(Tier):
    """Pages in equal slots. See Tier for the methods that a cache calls.

    size:   the memory for pages, "16GiB" or an int of bytes.
    limit:  the most bytes a second that the tier moves, "2GB" or an int; None for no limit.
    policy: the order in which pages are evicted, see MemoryManager.
    Raises: InvalidRequest
    """

    kind: str
    num_threads: int = 1
    _pool: PoolView  # once the tier is registered

    def __init__(self, size: str | int, *, limit: str | int | None = None, policy: str = "lru") -> None:
        self.size: int = parse_bytes(size)
        self.name: str = self.kind
        self._limit = None if limit is None else float(parse_bytes(limit))
        if self._limit is not None and self._limit < 1:
            raise InvalidRequest(f"limit is {limit!r}; give the bytes that the tier may move in a second, or None")
        self._policy = policy
        self._stats = TierStats()
        self._is_registered = self._is_closed = self._has_ended = False

    # -- where the bytes lie (for subclasses) --------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, pool: PoolView, fingerprint: bytes, num_slots: int) -> list[tuple[int, bytes, bytes]]:
        """Prepare `num_slots` slots. Return (slot, name, charged tenant) of the pages that are there already."""

    @abstractmethod
    def _store(self, moves: Sequence[Move]) -> None:
        """Copy frames to slots, and seal these. Where a frame was reused meanwhile, seal nothing: `why` is CHANGED."""

    @abstractmethod
    def _load(self, moves: Sequence[Move]) -> None:
        """Copy slots to frames. `why` is CORRUPT where name or checksum of the slot do not fit."""

    @abstractmethod
    def _void(self, slots: Sequence[int]) -> None:
        """Take the seals of these slots away."""

    def _reuse(self, slots: Sequence[int]) -> None:
        """Take the seals of slots away before `_store` writes to them."""
        self._void(slots)

    def _end_stores(self, moves: Sequence[Move]) -> None:
        """Take note of stores that came to nothing. Called by the owner thread, in `poll`."""

    @abstractmethod
    def _end(self) -> None:
        """Give back the memory or the file, also if `_begin` has taken a part of it only. It may be called again."""

    def _slot_bytes(self, frame_bytes: int) -> int:
        """Return the bytes that a slot for a frame takes of `size`."""
        return frame_bytes

    def _part(self) -> int:
        """Return the bytes that a thread moves at a time, roughly."""
        return PART

    # -- the interface -------------------------------------------------------------------------------------------------

    def register(self, pool: PoolView, fingerprint: bytes) -> None:
        """See Tier.register."""
        if self._is_closed:
            raise InvalidRequest(f"the {self.name} tier was closed; make a new one")
        if self._is_registered:
            raise InvalidRequest(f"the {self.name} tier serves a cache already; make one tier for each cache")
        num_slots = self.size // self._slot_bytes(pool.frame_bytes)
        if num_slots < 1:
            raise InvalidRequest(
                f"the {self.name} tier has {self.size} bytes and a frame needs {self._slot_bytes(pool.frame_bytes)}; "
                "give it more memory"
            )
        if num_slots >= MOST_SLOTS:
            raise InvalidRequest(
                f"the {self.name} tier has {self.size} bytes for {num_slots} pages, and a tier holds fewer than "
                f"{MOST_SLOTS}; give it less memory"
            )
        self._slots = FramePool(num_slots, key_bytes=KEY_BYTES, policy=self._policy)
        self._jobs: weakref.WeakSet[Job] = weakref.WeakSet()
        self._storing: set[bytes] = set()  # the names
        self._tenants = [b""] * num_slots  # that stored the page in each slot, as `_charged` names them
        self._limited: set[bytes] = set()  # the tenants that have had a quota
        self._ended: deque[Move] = deque()
        try:
            present = self._begin(pool, fingerprint, num_slots)
            self._mover = Mover(self.name, self.num_threads, self._limit)
        except BaseException:
            self._end()
            raise
        # also at exit: a thread must not return from C++ code to an interpreter that has ended
        weakref.finalize(self, self._mover.close, EXITING, finish=False)
        for slot, name, tenant in present:  # those of an older process, the one stored first is evicted first
            self._slots.take([slot])
            self._tenants[slot] = tenant
            if self._slots.publish([slot], [name])[0] != slot:  # stored twice
                self._void([slot])
            self._slots.drop([slot])
        self._pool, self._is_registered = pool, True

    def lookup(self, keys: Sequence[Key]) -> npt.NDArray[np.bool_]:
        """See Tier.lookup."""
        found: npt.NDArray[np.bool_] = self._slots.find([key.name for key in keys]) >= 0
        self._stats.asked += len(keys)
        self._stats.hits += int(found.sum())
        return found

    def submit(self, op: Op, keys: Sequence[Key], frames: Sequence[int]) -> Job:
        """See Tier.submit."""
        job = Job(op, fence=self._pool.fence())
        self._jobs.add(job)
        found = self._slots.find([key.name for key in keys]).tolist() if keys else []
        moves = [Move(job, key, int(frame), slot) for key, frame, slot in zip(keys, frames, found, strict=True)]
        begun = self._begin_loads(moves) if op is Op.LOAD else self._begin_stores(moves)
        size = self._pool.frame_bytes
        num_parts = max(self.num_threads, -(-len(begun) * size // self._part()))
        each = max(1, -(-len(begun) // num_parts))
        for first in range(0, len(begun), each):
            part = begun[first : first + each]
            self._mover.put(
                Task(partial(self._run, part), len(part), len(part) * size, op is Op.LOAD, lambda: job.is_cancelled)
            )
        return job

    def _begin_loads(self, moves: list[Move]) -> list[Move]:
        """Hold the slots of the pages that are there, and end the others. Return those that a thread has to move."""
        there = [move for move in moves if move.slot >= 0]
        for move in moves:
            if move.slot < 0:
                move.why = GONE
                self._ended.append(move)
        self._slots.share([move.slot for move in there])
        return there

    def _begin_stores(self, moves: list[Move]) -> list[Move]:
        """Take slots for the pages that are not there, and end the others. Return those that a thread has to move."""
        if not self.num_pending:
            self._storing.clear()  # of a call that was interrupted before it took slots
        new: dict[bytes, list[Move]] = {}
        for move in moves:
            if move.slot >= 0 or move.key.name in self._storing:
                move.slot = -1  # there already, or on its way
                self._ended.append(move)
            else:
                self._storing.add(move.key.name)
                new.setdefault(self._charged(move.key.tenant), []).append(move)
        begun: list[Move] = []
        for tenant, wanted in new.items():
            slots = self._take_slots(len(wanted), tenant)
            for move, slot in zip(wanted, slots, strict=False):
                move.slot, move.stamp, self._tenants[slot] = slot, self._pool.stamp(move.frame), tenant
                begun.append(move)
            for move in wanted[len(slots) :]:
                self._storing.discard(move.key.name)
                move.why = FULL
                self._ended.append(move)
        self._reuse([move.slot for move in begun])
        return begun

    def _take_slots(self, count: int, tenant: bytes) -> list[int]:
        """Take up to `count` slots for `tenant`: fewer if the rest is being moved, or its share is used up."""
        count = min(count, self._slots.available_to(tenant))
        try:
            taken: list[int] = self._slots.take(count, tenant=tenant).tolist()
            return taken
        except OutOfFrames:
            return []

    def _run(self, moves: list[Move]) -> None:
        """Move pages; called by a thread of the mover. It must not raise."""
        began = time.perf_counter()
        try:
            if moves[0].job.is_cancelled:
                for move in moves:
                    move.why = CANCELLED
            elif moves[0].job.op is Op.LOAD:
                self._load(moves)
            else:
                self._store(moves)
        except Exception as error:  # the thread serves other pages, too
            for move in moves:
                move.why = f"failed: {error}"
        seconds = (time.perf_counter() - began) / len(moves)
        for move in moves:
            move.seconds = seconds
        self._ended.extend(moves)

    def poll(self) -> list[Result]:
        """See Tier.poll."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        held = [move for move in ended if move.slot >= 0]
        stored = [move for move in held if move.job.op is Op.STORE]
        for move in ended:
            if move.job.is_dropped and not move.why:
                move.why = CANCELLED
                if move.job.op is Op.STORE and move.slot >= 0:
                    self._void([move.slot])
        if damaged := [move.slot for move in held if move.why == CORRUPT]:
            self._void(damaged)
            self._slots.unpublish(damaged)
        if whole := [move for move in stored if not move.why]:
            self._slots.publish([move.slot for move in whole], [move.key.name for move in whole])
        if held:
            self._slots.drop([move.slot for move in reversed(held)])  # tails before prefixes
        if vain := [move for move in stored if move.why]:
            self._end_stores(vain)
        self._storing.difference_update([move.key.name for move in stored])
        self._count(ended)
        if not self.num_pending and self._slots.stats().mapped:  # an interrupt lost the reference of a slot
            self._slots.recover(np.zeros(self._slots.num_frames, np.int32))
            self._storing.clear()
        return [Result(move.job.number, move.key, not move.why, move.why) for move in ended]

    @property
    def max_stores(self) -> int:
        """See Tier.max_stores. A part of the slots: pages under way evict others, and may come to nothing."""
        most = min(self._slots.num_frames // 8 + 1, max(MOST_STORES, MOST_BYTES // self._pool.frame_bytes))
        return max(0, most - self.num_pending)

    @property
    def num_pending(self) -> int:
        """See Tier.num_pending."""
        return self._mover.num_pages + len(self._ended)  # in this order: a task ends after its pages are appended

    def _count(self, ended: list[Move]) -> None:
        stats, size = self._stats, self._pool.frame_bytes
        counts = Counter(move.why for move in ended)
        stats.corrupt += counts[CORRUPT]
        stats.refused += counts[FULL]
        stats.changed += counts[CHANGED]
        stats.failed += sum(move.why.startswith("failed") for move in ended)
        loads = [move.seconds for move in ended if not move.why and move.job.op is Op.LOAD]
        stores = [move.seconds for move in ended if not move.why and move.job.op is Op.STORE and move.slot >= 0]
        stats.loaded, stats.stored = stats.loaded + len(loads), stats.stored + len(stores)
        stats.loaded_bytes, stats.stored_bytes = stats.loaded * size, stats.stored * size
        stats.loaded_seconds, stats.stored_seconds = (
            stats.loaded_seconds + sum(loads),
            stats.stored_seconds + sum(stores),
        )

    def touch(self, keys: Sequence[Key]) -> None:
        """See Tier.touch."""
        found = self._slots.find([key.name for key in keys]) if keys else np.empty(0, np.int32)
        found = found[found >= 0]
        if len(found):
            self._slots.share(found)
            self._slots.drop(found)

    def set_quota(self, tenant: bytes, share: float | None) -> None:
        """See Tier.set_quota."""
        if share is not None and not 0.0 <= real(share, "share") <= 1.0:
            raise InvalidRequest(f"share is {share}; it is the part of the tier for a tenant, 0 to 1")
        hard, tenant = None if share is None else int(share * self._slots.num_frames), self._charged(tenant)
        self._slots.set_quota(tenant, hard=hard)
        if tenant not in self._limited:
            self._charge(tenant, hard)
            self._limited.add(tenant)

    def _charge(self, tenant: bytes, hard: int | None) -> None:
        """Charge the pages that `tenant` stored before its first quota. Evict those beyond it. O(slots)."""
        order = self._slots.victims(self._slots.num_frames)
        mine = order[[self._tenants[slot] == tenant for slot in order.tolist()]]
        num_beyond = 0 if hard is None else max(0, len(mine) - hard)
        beyond, kept = mine[:num_beyond], mine[num_beyond:]
        names = [name for name in self._slots.names(kept) if name is not None]
        self._void(beyond.tolist())
        self._slots.unpublish(mine)
        self._slots.take(kept, tenant=tenant)
        self._slots.publish(kept, names)
        self._slots.drop(kept)  # in the order of before

    def _charged(self, tenant: bytes) -> bytes:
        """Return the name of the tenant in the pool of slots."""
        return tenant

    def forget(self) -> None:
        """See Tier.forget. It waits for the page that each thread is moving. The results stay for `poll`."""
        for job in list(self._jobs):
            job.is_dropped = True
            job.cancel()
        self._mover.drain(CLOSING)
        self._slots.forget()
        self._void(list(range(self._slots.num_frames)))

    def stats(self) -> TierStats:
        """See Tier.stats."""
        now = replace(self._stats)
        if self._is_registered:
            of_slots = self._slots.stats()
            now.pages, now.slots = of_slots.cached, self._slots.num_frames
        return now

    def close(self, timeout: float = CLOSING) -> None:
        """See Tier.close. A second call ends a tier whose thread hung, or whose first call was interrupted."""
        self._is_closed = True
        if not self._has_ended and self._is_registered and self._mover.close(timeout):  # else a thread may write
            self._end()
            self._has_ended = True
