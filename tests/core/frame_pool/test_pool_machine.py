"""A state machine compares the frame pool with its oracle: any order of calls, small pools, batches to be refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedkv.core import FramePool
from pagedkv.core.policies import POLICIES
from pagedkv.errors import InvalidRequest, OutOfFrames, QuotaExceeded
from tests.core.frame_pool.oracle import PoolOracle, Quota, everything
from tests.core.oracle import refused

TENANTS = some.sampled_from([b"", b"", b"acme", b"umbra"])
KEYS = some.integers(0, 7)  # few, so that they meet
FRAMES = some.integers(0, 30)


class PoolMachine(RuleBasedStateMachine):
    """A rule for each call; `verify` runs after each rule."""

    @initialize(
        num_frames=some.integers(1, 24),
        key_bytes=some.sampled_from([1, 4, 7, 8]),
        policy=some.sampled_from(["lru", "lru", *sorted(POLICIES)]),
        twins=some.booleans(),
    )
    def build(self, num_frames: int, key_bytes: int, policy: str, twins: bool) -> None:
        self.pool = FramePool(num_frames, key_bytes=key_bytes, policy=policy, twins=twins)
        self.oracle = PoolOracle(self.pool)
        self.twins, self.opened = twins, 2**31 - 3  # epochs are kept modulo 2**31

    def key(self, number: int) -> bytes:
        return bytes([number]) + bytes(self.pool.key_bytes - 1)

    def refused(self, error: type[Exception], call: object) -> None:
        with refused(self.pool, error):
            call()  # type: ignore[operator]

    def evicted(self) -> list[int]:
        """Tell the oracle which cached frames a call has freed; return them."""
        status = self.pool.state.frames["status"]
        gone = [frame for frame in self.oracle.those("cached") if status[frame] in (0, 1)]
        for frame in gone:
            self.oracle.evict(frame)
        return gone

    # -- references ----------------------------------------------------------------------------------------------------

    @rule(count=some.integers(0, 26), after=some.integers(-1, 23), tenant=TENANTS, one=some.booleans())
    def take(self, count: int, after: int, tenant: bytes, one: bool) -> None:
        after, count = min(after, self.pool.num_frames - 1), 1 if one else count
        call = (
            (lambda: [self.pool.take_one(after=after, tenant=tenant)])
            if one
            else lambda: self.pool.take(count, after=after, tenant=tenant).tolist()
        )
        if count > self.pool.num_frames:
            self.refused(InvalidRequest, call)
            return
        if not self.oracle.may_take(count, tenant):
            self.refused(OutOfFrames, call)
            return
        free, before = len(self.oracle.those("free")), list(self.oracle.order)
        next_one = after + 1 if after >= 0 and after + 1 in self.oracle.those("free") else None
        taken = call()
        gone = self.evicted()
        assert len(set(taken)) == len(taken) == count
        if tenant not in self.oracle.quotas:
            assert len(gone) == max(0, count - free)
        if self.pool.policy.name == "lru" and not self.oracle.quotas:
            assert sorted(gone) == sorted(before[: len(gone)])
        if next_one is not None and count and not gone:
            assert taken[0] == next_one
        self.oracle.take(taken, tenant)

    @rule(wanted=some.lists(FRAMES, max_size=4), tenant=TENANTS)
    def take_these(self, wanted: list[int], tenant: bytes) -> None:
        free = self.oracle.those("free")
        if len(set(wanted)) < len(wanted) or not set(wanted) <= set(free):
            self.refused(InvalidRequest, lambda: self.pool.take(wanted, tenant=tenant))
        elif tenant in self.oracle.quotas and not self.oracle.may_take(len(wanted), tenant):
            self.refused(QuotaExceeded, lambda: self.pool.take(wanted, tenant=tenant))
        else:
            assert self.pool.take(wanted, tenant=tenant).tolist() == wanted
            if self.evicted():
                assert tenant in self.oracle.quotas
            self.oracle.take(wanted, tenant)

    @rule(shared=some.lists(FRAMES, max_size=4))
    def share(self, shared: list[int]) -> None:
        if any(frame >= self.pool.num_frames or self.oracle.frames[frame].status == "free" for frame in shared):
            self.refused(InvalidRequest, lambda: self.pool.share(shared))
            return
        self.pool.share(np.array(shared, np.int32))
        for frame in shared:
            self.oracle.share(frame)

    @rule(data=some.data(), wrong=some.lists(FRAMES, max_size=1), last=some.booleans(), single=some.booleans())
    def drop(self, data: some.DataObject, wrong: list[int], last: bool, single: bool) -> None:
        held = [frame for frame, its in enumerate(self.oracle.frames) for _ in range(its.refs)]
        dropped = data.draw(some.lists(some.sampled_from(held), max_size=6)) + wrong if held else wrong
        given = dropped[0] if single and len(dropped) == 1 else dropped
        if any(frame >= len(self.oracle.frames) or dropped.count(frame) > held.count(frame) for frame in dropped):
            self.refused(InvalidRequest, lambda: self.pool.drop(given, last=last))
            return
        self.pool.drop(given, last=last)
        for frame in dropped:
            self.oracle.drop(frame, last=last)

    @rule(data=some.data(), lost=some.lists(FRAMES, max_size=4))
    def recover(self, data: some.DataObject, lost: list[int]) -> None:
        counts = self.pool.references()
        gone = [frame for frame in lost if frame < len(counts)]
        for frame in gone:
            counts[frame] = max(0, counts[frame] - 1)
        over = counts.copy()
        over[0] += self.oracle.frames[0].refs - over[0] + 1
        self.refused(InvalidRequest, lambda: self.pool.recover(over))
        expected = sum(its.refs for its in self.oracle.frames) - int(counts.sum())
        assert self.pool.recover(counts) == expected
        for frame, its in enumerate(self.oracle.frames):
            while its.refs > counts[frame]:
                self.oracle.drop(frame, last=False)

    # -- keys ----------------------------------------------------------------------------------------------------------

    @rule(named=some.lists(some.tuples(FRAMES, KEYS), max_size=4), data=some.data(), rows=some.booleans())
    def publish(self, named: list[tuple[int, int]], data: some.DataObject, rows: bool) -> None:
        if mapped := self.oracle.those("mapped"):  # else most batches would be refused
            named = [(data.draw(some.sampled_from(mapped)), key) for _, key in named]
        frames, keys = [frame for frame, _ in named], [self.key(number) for _, number in named]
        given = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, self.pool.key_bytes) if rows and keys else keys
        wrong = len(set(frames)) < len(frames) or any(
            frame >= len(self.oracle.frames)
            or not self.oracle.frames[frame].refs
            or self.oracle.frames[frame].key not in (None, key)
            for frame, key in zip(frames, keys, strict=True)
        )
        if wrong:
            self.refused(InvalidRequest, lambda: self.pool.publish(frames, given))
            return
        expected = [self.oracle.publish(frame, key, self.twins) for frame, key in zip(frames, keys, strict=True)]
        assert self.pool.publish(frames, given).tolist() == expected

    @rule(some_frames=some.lists(FRAMES, max_size=3))
    def unpublish(self, some_frames: list[int]) -> None:
        if any(frame >= self.pool.num_frames for frame in some_frames):
            self.refused(InvalidRequest, lambda: self.pool.unpublish(some_frames))
            return
        self.pool.unpublish(some_frames)
        for frame in some_frames:
            self.oracle.unpublish(frame)

    @rule(numbers=some.lists(KEYS, max_size=5))
    def find(self, numbers: list[int]) -> None:
        expected = [(self.oracle.holders(self.key(number)) or [-1])[-1] for number in numbers]
        assert self.pool.find([self.key(number) for number in numbers]).tolist() == expected

    @rule()
    def forget(self) -> None:
        free = len(self.oracle.those("free"))
        freed = self.pool.forget()
        self.oracle.forget()
        assert freed == len(self.oracle.those("free")) - free

    # -- eviction ------------------------------------------------------------------------------------------------------

    @rule(count=some.integers(0, 6))
    def evict(self, count: int) -> None:
        """Evictions follow `victims`, which changes nothing."""
        before = everything(self.pool)
        expected = self.pool.victims(count).tolist()
        assert everything(self.pool) == before
        assert self.pool.evict(count) == len(expected) == min(count, len(list(self.oracle.order)))
        assert sorted(self.evicted()) == sorted(expected)

    @rule(more=some.integers(1, 3))
    def retire(self, more: int) -> None:
        self.opened += more
        self.pool.retire(self.opened)
        self.oracle.epoch = self.opened

    @precondition(lambda self: self.oracle.epoch is not None)
    @rule(back=some.integers(0, 4))
    def advance(self, back: int) -> None:
        assert self.pool.advance(self.opened - back) == self.oracle.advance(self.opened - back)

    # -- tenants -------------------------------------------------------------------------------------------------------

    @rule(
        tenant=some.sampled_from([b"acme", b"umbra"]),
        hard=some.sampled_from([None, 1, 4, 9]),
        protected=some.integers(0, 3),
    )
    def set_quota(self, tenant: bytes, hard: int | None, protected: int) -> None:
        protected = protected if hard is None else min(protected, hard)
        others = sum(quota.protected for name, quota in self.oracle.quotas.items() if name != tenant)
        if others + protected > self.pool.num_frames:
            self.refused(InvalidRequest, lambda: self.pool.set_quota(tenant, hard=hard, protected=protected))
            return
        self.pool.set_quota(tenant, hard=hard, protected=protected)
        self.oracle.quotas[tenant] = Quota(hard, protected)

    @invariant()
    def verify(self) -> None:
        if hasattr(self, "oracle"):
            self.oracle.verify()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestPoolMachine.pytestmark = [pytest.mark.strict]


@pytest.mark.slow
@pytest.mark.strict
def test_the_pool_keeps_its_promises_in_many_more_orders() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=1500, stateful_step_count=80, deadline=None))
