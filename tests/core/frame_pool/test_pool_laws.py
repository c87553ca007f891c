"""The laws of FramePool, each told as the shortest story that would break it."""

from __future__ import annotations

import sys
import threading
import time

import numba
import numpy as np
import pytest

from pagedkv.core import FramePool
from pagedkv.core.policies import POLICIES
from pagedkv.errors import ConcurrentUse, InvalidRequest, InvariantViolation, OutOfFrames, QuotaExceeded
from tests.core.frame_pool.oracle import everything, key, named

pytestmark = pytest.mark.strict
compiled_only = pytest.mark.skipif(numba.config.DISABLE_JIT, reason="only a compiled call is atomic, and fast")


@pytest.fixture
def pool() -> FramePool:
    return FramePool(8, key_bytes=8)


# -- references --------------------------------------------------------------------------------------------------------


def test_a_frame_is_free_when_its_last_reference_is_dropped(pool: FramePool) -> None:
    frames = pool.take(3)
    pool.share(frames[:1])
    pool.drop(frames)
    assert pool.references()[frames].tolist() == [1, 0, 0]
    pool.drop(int(frames[0]))
    assert (pool.stats().free, pool.stats().cached) == (8, 0)


def test_frames_that_are_taken_together_form_a_run_after_the_last_one(pool: FramePool) -> None:
    big = FramePool(256)
    first = big.take(5)
    other = big.take(5)
    more = big.take(4, after=int(first[-1]))
    assert [*first, *more] == list(range(first[0], first[0] + 9))
    assert not set(other.tolist()) & set(more.tolist())
    assert big.take_one(after=int(more[-1])) == more[-1] + 1


def test_free_frames_are_taken_by_number_all_or_none(pool: FramePool) -> None:
    assert pool.take([0, 7]).tolist() == [0, 7]
    for wanted in ([1, 0], [1, 1], [8], [-1]):
        before = everything(pool)
        with pytest.raises(InvalidRequest, match="is not free|no frame of this pool"):
            pool.take(wanted)
        assert everything(pool) == before
    assert sorted(pool.take(6).tolist()) == [1, 2, 3, 4, 5, 6]


def test_the_answer_of_a_take_by_number_is_not_the_callers_array(pool: FramePool) -> None:
    wanted = np.array([3, 4], np.int32)
    assert pool.take(wanted) is not wanted


def test_a_take_beyond_the_pool_changes_nothing_and_says_what_there_is(pool: FramePool) -> None:
    held = named(pool, 1, 2, 3)
    pool.drop(held[:2])
    before = everything(pool)
    with pytest.raises(OutOfFrames) as short:
        pool.take(8)
    assert (short.value.needed, short.value.free, short.value.evictable) == (8, 5, 2)
    assert everything(pool) == before
    assert len(pool.take(7)) == 7


def test_a_reference_that_is_not_there_cannot_be_dropped(pool: FramePool) -> None:
    frames = pool.take(2).tolist()
    for wrong in ([frames[0], frames[0]], [frames[1], 5], 5, 8, [-1], -2, 2**40):
        before = everything(pool)
        with pytest.raises(InvalidRequest):
            pool.drop(wrong)
        assert everything(pool) == before


def test_a_frame_has_at_most_65535_references(pool: FramePool) -> None:
    frame = pool.take_one()
    pool.share(np.full(65534, frame, np.int32))
    before = everything(pool)
    with pytest.raises(InvalidRequest, match="65535 references"):
        pool.share([frame])
    assert everything(pool) == before
    pool.drop(np.full(65535, frame, np.int32))
    assert pool.stats().free == 8


def test_a_free_frame_cannot_be_shared(pool: FramePool) -> None:
    with pytest.raises(InvalidRequest, match="share of frame 5, number 0 of 1: it is free"):
        pool.share(5)


def test_references_that_no_table_holds_are_dropped_after_an_interrupt(pool: FramePool) -> None:
    kept, lost = named(pool, 1, 2), pool.take(3)
    tables = np.zeros(8, np.int64)
    tables[kept] = 1
    assert pool.recover(tables) == 3
    assert pool.references().tolist() == tables.tolist()
    assert set(lost.tolist()) <= set(pool.take(6).tolist())
    with pytest.raises(InvalidRequest, match="holds? .* references of frame|references of frame"):
        pool.recover(np.full(8, 2))
    with pytest.raises(InvalidRequest, match="one number for each of 8"):
        pool.recover(np.zeros(3, np.int64))


# -- eviction ----------------------------------------------------------------------------------------------------------


def test_frames_are_evicted_in_the_order_in_which_they_were_dropped(pool: FramePool) -> None:
    frames = named(pool, 1, 2, 3, 4)
    pool.drop(frames[::-1])
    assert pool.victims(3).tolist() == frames[:0:-1]
    assert pool.evict(2) == 2
    assert pool.find([key(number) for number in (1, 2, 3, 4)]).tolist() == [frames[0], frames[1], -1, -1]


def test_a_frame_without_a_key_can_be_kept_until_last(pool: FramePool) -> None:
    first, (scratch,) = named(pool, 1), pool.take(1).tolist()
    pool.drop(first)
    pool.drop([scratch], last=True)
    assert scratch not in pool.take(6).tolist(), "its contents may still be read"
    assert pool.victims(8).tolist() == [*first, scratch]
    pool.share(scratch)
    pool.drop(scratch)
    assert pool.stats().free == 1, "dropped without last=, a frame without a key is free"


def test_each_policy_ranks_by_what_it_knows() -> None:
    def order(policy: str, *drops: tuple[int, dict[str, object]], used: int = -1) -> list[int]:
        small = FramePool(8, key_bytes=8, policy=policy)
        frames = small.take(3)
        small.publish(frames, [key(number) for number in range(3)])
        if used >= 0:
            small.share(used)
            small.drop(used)
        for frame, options in drops:
            small.drop([frame], **options)  # type: ignore[arg-type]
        return small.victims(3).tolist()

    plain: tuple[tuple[int, dict[str, object]], ...] = ((0, {}), (1, {}), (2, {}))
    assert order("lru", *plain, used=0) == [0, 1, 2]
    assert order("2q", *plain, used=0) == [1, 2, 0]
    assert order("lfu", *plain, used=0) == [1, 2, 0]
    assert order("cost", (0, {"positions": [100_000]}), (1, {}), (2, {"positions": np.array([0])})) == [1, 2, 0]
    for wrong in ([1, 2], [-1], [0.5], [[1]]):
        with pytest.raises(InvalidRequest, match="positions of shape"):
            order("cost", (0, {"positions": wrong}))


def test_each_take_is_a_tick_of_the_clock() -> None:
    """Two lists compete by the time that their oldest frames have waited; without a clock, pages used once go first."""
    small = FramePool(8, key_bytes=8, policy="2q")
    again = named(small, *range(5))
    small.share(again)
    small.drop(again + again)
    once = named(small, 9)
    small.drop(small.take(1))
    small.drop(small.take_one())
    small.drop(once)
    assert small.victims(1).tolist() == again[:1]


def test_victims_changes_nothing_and_is_what_eviction_does_next() -> None:
    for policy in POLICIES:
        small = FramePool(32, key_bytes=8, policy=policy)
        small.set_quota(b"acme", soft=3, protected=2)
        for number in range(24):
            (frame,) = small.take(1, tenant=b"acme" if number % 3 else b"").tolist()
            small.publish([frame], [key(number)])
            if number % 4 == 0:
                small.share(frame)
                small.drop(frame)
            small.drop(frame)
        before = everything(small)
        expected = small.victims(100).tolist()
        assert len(expected) == 24
        assert everything(small) == before
        small.check()
        for frame in expected:
            assert small.evict(1) == 1
            assert small.names([frame]) == [None], f"{policy}: {expected}"


def test_a_dropped_frame_waits_for_its_epoch(pool: FramePool) -> None:
    (first, second), scratch = named(pool, 1, 2), pool.take_one()
    pool.retire(7)
    pool.drop([first, scratch])
    assert (pool.stats().pending, pool.stats().retired, pool.available) == (2, 1, 5)
    assert pool.find([key(1)]).tolist() == [first], "work in flight does not hide a key"
    with pytest.raises(InvalidRequest, match="epoch 7 was opened already"):
        pool.retire(7)
    with pytest.raises(InvalidRequest, match="the newest one is 7"):
        pool.advance(8)
    assert pool.advance(7) == 2
    assert (pool.stats().pending, pool.available) == (0, 7)
    pool.drop(second)
    assert pool.stats().cached == 2


def test_a_retired_frame_that_is_shared_again_counts_among_the_most_ever_mapped(pool: FramePool) -> None:
    frame = pool.take_one()
    pool.retire(1)
    pool.drop(frame)
    pool.take_one()
    pool.share(frame)  # its contents may still be read, and are wanted again
    assert (pool.stats().retired, pool.stats().peak_mapped, pool.stats().mapped) == (0, 2, 2)
    pool.check()


# -- tenants, safety ---------------------------------------------------------------------------------------------------


def test_a_tenant_holds_no_more_than_its_quota_and_makes_room_itself(pool: FramePool) -> None:
    pool.set_quota(b"acme", hard=3)
    frames = pool.take(3, tenant=b"acme")
    before = everything(pool)
    for call in (
        lambda: pool.take(1, tenant=b"acme"),
        lambda: pool.take_one(tenant=b"acme"),
        lambda: pool.take([7], tenant=b"acme"),
    ):
        with pytest.raises(QuotaExceeded) as refused:
            call()
        assert (refused.value.tenant, refused.value.needed, refused.value.used) == (b"acme", 1, 3)
        assert everything(pool) == before
    pool.publish(frames, [key(number) for number in range(3)])
    pool.drop(frames)
    assert pool.take([7], tenant=b"acme").tolist() == [7]
    assert (pool.stats().tenants[b"acme"].used, pool.stats().cached, pool.available_to(b"acme")) == (3, 2, 2)
    assert pool.take(5).shape == (5,), "other tenants take what is free"


def test_a_protected_share_is_not_evicted_for_others(pool: FramePool) -> None:
    pool.set_quota(b"acme", protected=2)
    frames = pool.take(3, tenant=b"acme")
    pool.publish(frames, [key(number) for number in range(3)])
    pool.drop(frames)
    with pytest.raises(OutOfFrames) as short:
        pool.take(7)
    assert short.value.evictable == 1
    assert pool.take(6).shape == (6,)
    assert pool.stats().tenants[b"acme"].used == 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_frames": 0}, "num_frames"),
        ({"key_bytes": 0}, "key_bytes"),
        ({"policy": "mru"}, "policy"),
        ({"twins": 1}, "twins"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        FramePool(**{"num_frames": 8, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [True, 1.5, "3", [1.0], [[1]], [True], None, [2**31], [2**70], [[1], [1, 2]]])
def test_frames_of_another_form_are_refused(pool: FramePool, wrong: object) -> None:
    pool.take(8)
    for call in (pool.share, pool.drop, pool.unpublish, pool.names, pool.take):
        before = everything(pool)
        with pytest.raises(InvalidRequest):
            call(wrong)  # type: ignore[operator]
        assert everything(pool) == before


def test_a_count_that_makes_no_sense_is_refused(pool: FramePool) -> None:
    for wrong in (-1, 9, np.int64(9)):
        with pytest.raises(InvalidRequest, match="wanted is"):
            pool.take(wrong)  # type: ignore[arg-type]
    for after in (-2, 8):
        with pytest.raises(InvalidRequest, match=f"after is {after}"):
            pool.take(1, after=after)
        with pytest.raises(InvalidRequest, match=f"after is {after}"):
            pool.take_one(after=after)
    with pytest.raises(InvalidRequest, match="tenant is"):
        pool.take(1, tenant="acme")  # type: ignore[arg-type]
    assert pool.take(np.int64(2)).shape == (2,)  # type: ignore[arg-type]
    assert pool.take(0).shape == (0,)


def test_the_first_caller_owns_the_pool_while_debugging(pool: FramePool) -> None:
    pool.take_one()
    refused: list[Exception] = []

    def intrude() -> None:
        for call in (lambda: pool.take(1), lambda: pool.find([key(1)]), lambda: pool.evict(1), pool.take_one):
            try:
                call()
            except ConcurrentUse as error:
                refused.append(error)

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    assert len(refused) == 4
    assert "FramePool.take was called from thread" in str(refused[0])


@compiled_only
def test_threads_that_take_and_drop_at_once_lose_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")
    busy = FramePool(64, key_bytes=8)

    def work(seed: int) -> None:
        for number in range(300):
            frames = busy.take(3)
            busy.publish(frames, [key(1000 * seed + 3 * number + i) for i in range(3)])
            busy.drop(frames)
            busy.drop(busy.take_one())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    busy.check()
    assert (busy.stats().mapped, busy.references().sum()) == (0, 0)


def test_a_call_during_a_guarded_call_of_another_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")
    small = FramePool(8, key_bytes=8)
    inside, leave = threading.Event(), threading.Event()

    class Slow:
        def __index__(self) -> int:
            inside.set()
            leave.wait(10)
            return 0

    thread = threading.Thread(target=lambda: small.evict(Slow()))  # type: ignore[arg-type]
    thread.start()
    assert inside.wait(10)
    with pytest.raises(ConcurrentUse, match=r"FramePool\.take was called while another call"):
        small.take(1)
    leave.set()
    thread.join()
    small._calls[0] = [0]  # of a thread that a signal ended: it stands in the way of no call
    assert small.take(1).shape == (1,)
    assert not small._calls


def test_a_corrupted_pool_is_seen(pool: FramePool) -> None:
    frames = named(pool, 1, 2, 3)
    pool.drop(frames[:2])
    changes = [
        (pool.state.frames["refs"], frames[0], 1),
        (pool.state.frames["pins"], frames[1], 1),
        (pool.state.frames["parent"], frames[0], 1),
        (pool.state.frames["status"], frames[2], 1),
        (pool.state.tokens, (frames[0], 0), 1),
        (pool.state.table, (0, 0), 1),
        (pool.state.spaces["status"], 0, 1),
        (pool.state.roots, (0, 0), 1),
    ]
    for array, place, change in changes:
        array[place] += change
        with pytest.raises(InvariantViolation):
            pool.check()
        array[place] -= change
    pool.check()
    pool.state.tokens[frames[1]] = pool.state.tokens[frames[0]]
    with pytest.raises(InvariantViolation):
        pool.check()


@compiled_only
def test_a_call_costs_no_more_in_a_larger_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")

    def seconds(num_frames: int) -> float:
        large = FramePool(num_frames)
        large.drop(large.take_one())
        best = 1.0
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(200):
                large.drop(large.take_one())
            best = min(best, time.perf_counter() - began)
        return best

    assert seconds(1_000_000) < 5 * seconds(1000)


@pytest.mark.parametrize("after", [None, 1.5, "1", True, [1], -2, 8])
def test_the_frame_to_follow_is_a_frame_number(after: object) -> None:
    pool = FramePool(8, key_bytes=4)
    for take in (lambda: pool.take(1, after=after), lambda: pool.take_one(after=after)):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="after is"):
            take()
    assert pool.stats().free == 8
    assert pool.take_one(after=np.int64(1)) == 2  # type: ignore[arg-type]
    assert pool.take(1, after=np.int32(5)).tolist() == [6]  # type: ignore[arg-type]
