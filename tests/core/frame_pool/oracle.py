"""The oracle of a frame pool: its promises as plain dicts and lists. Slow, obviously right, independent of its code.

The oracle does not choose the frames that a call takes, and of policies it knows the order of LRU only: for the others
it believes `victims`, and demands that evictions keep to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pagedkv.core import FramePool


@dataclass
class Frame:
    """The beliefs of the engine about one frame."""

    refs: int = 0
    key: bytes | None = None
    kept: bool = False  # without references, the frame is cached
    epoch: int | None = None  # the fence
    tenant: bytes = b""
    named_at: int = 0

    @property
    def status(self) -> str:
        if self.refs:
            return "mapped"
        if self.kept:
            return "cached"
        return "retired" if self.epoch is not None else "free"

    @property
    def evictable(self) -> bool:
        return self.status == "cached" and self.epoch is None


@dataclass
class Quota:
    hard: int | None
    protected: int


@dataclass
class PoolOracle:
    """The model of one FramePool: tests tell it each call, and `verify` compares the pool with it."""

    pool: FramePool
    frames: list[Frame] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # the evictable frames, in the order of LRU
    fences: list[int] = field(default_factory=list)  # in the order in which they fall
    epoch: int | None = None  # the newest one that has not passed
    quotas: dict[bytes, Quota] = field(default_factory=dict)
    namings: int = 0

    def __post_init__(self) -> None:
        self.frames = [Frame() for _ in range(self.pool.num_frames)]

    # -- calls ---------------------------------------------------------------------------------------------------------

    def take(self, taken: list[int], tenant: bytes) -> None:
        for frame in taken:
            assert self.frames[frame].status == "free", f"frame {frame} was not free"
            self.frames[frame] = Frame(refs=1, tenant=tenant if tenant in self.quotas else b"")

    def share(self, frame: int) -> None:
        self.unlist(frame)
        self.frames[frame].refs += 1
        self.frames[frame].kept = False

    def drop(self, frame: int, *, last: bool) -> None:
        its = self.frames[frame]
        its.refs -= 1
        if its.refs:
            return
        its.kept = last or its.key is not None
        if self.epoch is not None:
            if its.epoch is not None:
                self.fences.remove(frame)
            its.epoch = self.epoch
            self.fences.append(frame)
        self.enlist(frame)

    def publish(self, frame: int, key: bytes, twins: bool) -> int:
        others = self.holders(key)
        if self.frames[frame].key == key:
            return frame
        if others and not twins:
            return others[-1]
        self.namings += 1
        self.frames[frame].key, self.frames[frame].named_at = key, self.namings
        return frame

    def unpublish(self, frame: int) -> None:
        self.frames[frame].key = None
        self.unlist(frame)
        self.frames[frame].kept = False

    def evict(self, frame: int) -> None:
        assert self.frames[frame].evictable, f"frame {frame} was evicted, but {self.frames[frame]}"
        self.unpublish(frame)

    def advance(self, epoch: int) -> int:
        passed = [frame for frame in self.fences if (self.frames[frame].epoch or 0) <= epoch]
        for frame in passed:
            self.fences.remove(frame)
            self.frames[frame].epoch = None
            self.enlist(frame)
        if self.epoch is not None and self.epoch <= epoch:
            self.epoch = None
        return len(passed)

    def forget(self) -> None:
        for frame, its in enumerate(self.frames):
            if its.key is not None:
                self.unpublish(frame)

    # -- figures -------------------------------------------------------------------------------------------------------

    def unlist(self, frame: int) -> None:
        if frame in self.order:
            self.order.remove(frame)

    def enlist(self, frame: int) -> None:
        if self.frames[frame].evictable:
            self.order.append(frame)

    def holders(self, key: bytes) -> list[int]:
        """Return the frames that have the key, in the order in which they got it."""
        having = [frame for frame, its in enumerate(self.frames) if its.key == key]
        return sorted(having, key=lambda frame: self.frames[frame].named_at)

    def those(self, status: str) -> list[int]:
        return [frame for frame, its in enumerate(self.frames) if its.status == status]

    def used(self, tenant: bytes) -> int:
        return sum(its.status != "free" and its.tenant == tenant for its in self.frames)

    def may_take(self, count: int, tenant: bytes) -> bool:
        """Return whether the quotas and the pool leave `count` frames to `tenant`."""
        gives = 0
        for name in {b"", *self.quotas}:
            evictable = sum(its.evictable and its.tenant == name for its in self.frames)
            quota = self.quotas.get(name, Quota(None, 0))
            mine = count if name == (tenant if tenant in self.quotas else b"") else 0
            if mine and quota.hard is not None and self.used(name) + mine - evictable > quota.hard:
                return False
            gives += min(evictable, max(mine, self.used(name) + mine - quota.protected))
        return count <= len(self.those("free")) + gives

    # -- verification --------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        pool, now = self.pool, self.pool.stats()
        pool.check(3)
        assert pool.references().tolist() == [its.refs for its in self.frames]
        assert pool.names(range(pool.num_frames)) == [its.key for its in self.frames]
        counted = {name: len(self.those(name)) for name in ("free", "mapped", "cached", "retired")}
        assert (now.free, now.mapped, now.cached, now.retired) == tuple(counted.values())
        assert now.named == sum(its.key is not None for its in self.frames)
        waiting = [its for its in self.frames if its.status == "cached" and its.epoch is not None]
        assert now.pending == counted["retired"] + len(waiting)
        victims = pool.victims(pool.num_frames).tolist()
        assert sorted(victims) == sorted(self.order)
        if pool.policy.name == "lru" and not self.quotas:
            assert victims == self.order
        for tenant in self.quotas:
            assert pool.stats().tenants[tenant].used == self.used(tenant)
        self.verify_keys()

    def verify_keys(self) -> None:
        keys = sorted({its.key for its in self.frames if its.key is not None})
        before = [array.tobytes() for array in self.pool.state]
        found = self.pool.find(keys).tolist()
        assert [array.tobytes() for array in self.pool.state] == before, "find changes something"
        assert found == [self.holders(key)[-1] for key in keys]


def everything(pool: FramePool) -> list[bytes]:
    """Return the contents of all arrays but the scratch registers of quotas."""
    reg = pool.state.reg.copy()
    for block in reg[len(reg) - 140 * (len(pool._accounts) + bool(pool._accounts)) :].reshape(-1, 140):
        block[136:138] = 0
    return [
        *(array.tobytes() for name, array in zip(pool.state._fields, pool.state, strict=True) if name != "reg"),
        np.ascontiguousarray(reg).tobytes(),
    ]


def key(number: int, size: int = 8) -> bytes:
    return number.to_bytes(size, "little")


def named(pool: FramePool, *numbers: int) -> list[int]:
    """Return frames that were taken and published under the keys with these numbers."""
    frames = pool.take(len(numbers))
    assert (pool.publish(frames, [key(number) for number in numbers]) == frames).all()
    return frames.tolist()
