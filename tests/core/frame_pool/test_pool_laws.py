"""The laws of FramePool, each told as the shortest story that would break it.

The laws of keys come last: a key finds its frame, a wrong key is refused, and of two equal keys the first counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numba
import numpy as np
import pytest

from pagedkv.core import FramePool
from pagedkv.core.policies import POLICIES
from pagedkv.errors import ConcurrentUse, InvalidRequest, InvariantViolation, QuotaExceeded
from tests.core.frame_pool.oracle import everything, key, named
from tests.core.interrupts.concurrency import at_once
from tests.core.oracle import refused

pytestmark = pytest.mark.strict
compiled_only = pytest.mark.skipif(numba.config.DISABLE_JIT, reason="only a compiled call is atomic, and fast")


@pytest.fixture
def pool() -> FramePool:
    return FramePool(8, key_bytes=8)


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
        with refused(pool, InvalidRequest, "is not free|no frame of this pool"):
            pool.take(wanted)
    assert sorted(pool.take(6).tolist()) == [1, 2, 3, 4, 5, 6]


def test_a_frame_has_at_most_65535_references(pool: FramePool) -> None:
    frame = pool.take_one()
    pool.share(np.full(65534, frame, np.int32))
    with refused(pool, InvalidRequest, "65535 references"):
        pool.share([frame])
    pool.drop(np.full(65535, frame, np.int32))
    assert pool.stats().free == 8


def test_references_that_no_table_holds_are_dropped_after_an_interrupt(pool: FramePool) -> None:
    kept, lost = named(pool, 1, 2), pool.take(3)
    tables = np.zeros(8, np.int64)
    tables[kept] = 1
    assert pool.recover(tables) == 3
    assert pool.references().tolist() == tables.tolist()
    assert set(lost.tolist()) <= set(pool.take(6).tolist())


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


def test_a_retired_frame_that_is_shared_again_counts_among_the_most_ever_mapped(pool: FramePool) -> None:
    frame = pool.take_one()
    pool.retire(1)
    pool.drop(frame)
    pool.take_one()
    pool.share(frame)  # its contents may still be read, and are wanted again
    assert (pool.stats().retired, pool.stats().peak_mapped, pool.stats().mapped) == (0, 2, 2)
    pool.check()


def test_a_tenant_holds_no_more_than_its_quota_and_makes_room_itself(pool: FramePool) -> None:
    pool.set_quota(b"acme", hard=3)
    frames = pool.take(3, tenant=b"acme")
    for call in (
        lambda: pool.take(1, tenant=b"acme"),
        lambda: pool.take_one(tenant=b"acme"),
        lambda: pool.take([7], tenant=b"acme"),
    ):
        with refused(pool, QuotaExceeded) as over:
            call()
        assert (over.value.tenant, over.value.needed, over.value.used) == (b"acme", 1, 3)
    pool.publish(frames, [key(number) for number in range(3)])
    pool.drop(frames)
    assert pool.take([7], tenant=b"acme").tolist() == [7]
    assert (pool.stats().tenants[b"acme"].used, pool.stats().cached, pool.available_to(b"acme")) == (3, 2, 2)
    assert pool.take(5).shape == (5,), "other tenants take what is free"


@pytest.mark.parametrize("options", [{"num_frames": 0}, {"key_bytes": 0}, {"policy": "mru"}, {"twins": 1}], ids=str)
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        FramePool(**{"num_frames": 8, **options})  # type: ignore[arg-type]


WRONG: dict[str, Callable[[FramePool], object]] = {
    "a reference dropped twice": lambda pool: pool.drop([0, 0]),
    "a reference and a free frame dropped": lambda pool: pool.drop([1, 5]),
    "a free frame dropped": lambda pool: pool.drop(5),
    "no frame dropped": lambda pool: pool.drop([-1]),
    "a number beyond int32 dropped": lambda pool: pool.drop(2**40),
    "a free frame shared": lambda pool: pool.share(5),
    "more taken than there are": lambda pool: pool.take(9),
    "less than nothing taken": lambda pool: pool.take(-1),
    "frames taken after none": lambda pool: pool.take(1, after=-2),
    "a frame taken after none": lambda pool: pool.take_one(after=8),
    "a frame taken after half of one": lambda pool: pool.take_one(after=1.5),  # type: ignore[arg-type]
    "a frame taken for text": lambda pool: pool.take(1, tenant="acme"),  # type: ignore[arg-type]
    "recovery to more references": lambda pool: pool.recover(np.full(8, 2)),
    "recovery to other frames": lambda pool: pool.recover(np.zeros(3, np.int64)),
    **{
        f"{verb} of {wrong!r}": lambda pool, verb=verb, wrong=wrong: getattr(pool, verb)(wrong)
        for verb in ("share", "drop", "unpublish", "names", "take")
        for wrong in (True, 1.5, [1.0], [[1]], None, [2**31], [[1], [1, 2]])
    },
}


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_call_is_refused_and_changes_nothing(pool: FramePool, call: str) -> None:
    pool.take(4)
    with refused(pool, InvalidRequest):
        WRONG[call](pool)


@compiled_only
def test_threads_that_take_and_drop_at_once_lose_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")
    busy = FramePool(64, key_bytes=8)

    def work(seed: int) -> None:
        for number in range(100):
            frames = busy.take(3)
            busy.publish(frames, [key(1000 * seed + 3 * number + i) for i in range(3)])
            busy.drop(frames)
            busy.drop(busy.take_one())

    at_once(*(partial(work, seed) for seed in range(4)))
    busy.check()
    assert (busy.stats().mapped, busy.references().sum()) == (0, 0)


def test_a_call_during_a_guarded_call_of_another_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")
    small = FramePool(8, key_bytes=8)
    inside, leave = threading.Event(), threading.Event()

    class Slow:
        def __index__(self) -> int:
            inside.set()
            leave.wait()
            return 0

    thread = threading.Thread(target=lambda: small.evict(Slow()))  # type: ignore[arg-type]
    thread.start()
    inside.wait()
    try:
        with pytest.raises(ConcurrentUse, match=r"FramePool\.take was called while another call"):
            small.take(1)
    finally:
        leave.set()
        thread.join()


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


def test_a_dropped_frame_is_found_by_its_key_until_it_is_evicted(pool: FramePool) -> None:
    frames = named(pool, 1, 2, 3)
    pool.drop(frames)
    assert pool.find([key(2), key(9), key(3)]).tolist() == [frames[1], -1, frames[2]]
    pool.take(6)  # evicts the first one
    assert pool.find([key(1), key(2)]).tolist() == [-1, frames[1]]


def test_a_key_is_compared_byte_for_byte_and_not_by_its_hash(pool: FramePool) -> None:
    """All keys are made to collide in one bucket with one hash; each is still found alone."""
    numbers = [1, 1 << 32, 1 << 63, (1 << 63) + 1]
    frames = named(pool, *numbers)
    pool.state.frames["prefix_hash"][frames] = pool.state.frames["prefix_hash"][frames[0]]
    pool.state.bucket[:] = -1
    pool.state.bucket[int(pool.state.frames["prefix_hash"][frames[0]]) & 7] = frames[0]
    pool.state.frames["chain"][frames] = [*frames[1:], -1]
    assert pool.find([key(numbers[0])]).tolist() == [frames[0]]
    assert pool.names(frames) == [key(number) for number in numbers]
    pool.state.tokens[frames[0], 1] ^= 1
    assert pool.find([key(numbers[0])]).tolist() == [-1]


def test_keys_come_as_bytes_or_as_rows_of_memory() -> None:
    frames = np.arange(3)
    keys = [key(number) for number in (7, 8, 9)]
    forms = [
        keys,
        tuple(keys),
        [bytearray(one) for one in keys],
        np.frombuffer(b"".join(keys), np.uint8).reshape(3, 8),
        np.array([7, 8, 9], np.uint64),
        np.array([7, 8, 9, 0, 0, 0], np.int64)[:3],
        np.array([7, 0, 8, 0, 9, 0], np.int32).reshape(3, 2),
        np.array([[7, 0, 0, 0, 0, 0, 0, 0, 1], [8] + 7 * [0] + [1], [9] + 7 * [0] + [1]], np.uint8)[:, :8],
        np.frombuffer(b"x" + b"".join(keys), np.uint8)[1:].reshape(3, 8),  # not aligned, and read-only
    ]
    for form in forms:
        small = FramePool(4, key_bytes=8)
        small.take(3)
        assert small.publish(frames, form).tolist() == [0, 1, 2]  # type: ignore[arg-type]
        assert small.find(form).tolist() == [0, 1, 2]  # type: ignore[arg-type]
        assert small.names(frames) == keys
    assert small.find([]).tolist() == small.find(np.empty((0, 8), np.uint8)).tolist() == []


@pytest.mark.parametrize(
    "wrong",
    [
        [b"short"],
        [key(1)[:7], key(1) + b"x"],  # 16 bytes together, as two keys have
        (key(1)[:7], key(1) + b"x"),
        [key(1), key(1)[:7]],
        [key(1), None],
        [memoryview(np.zeros(8, np.int64))],  # of length 8, and 64 bytes
        [np.arange(8, dtype=np.int64)],
        [memoryview(bytes(16))[::2]],
        [1],
        b"12345678",
        ["12345678"],
        np.zeros((1, 9), np.uint8),
        np.zeros((1, 1), np.float64),
        np.zeros(1, np.int32),
        np.zeros((1, 1, 8), np.uint8),
        None,
    ],
)
def test_keys_of_another_form_are_refused(pool: FramePool, wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="keys"):
        pool.find(wrong)  # type: ignore[arg-type]


def test_the_second_frame_with_a_key_is_told_which_frame_has_it(pool: FramePool) -> None:
    first, second = named(pool, 1)[0], pool.take_one()
    assert pool.publish([second], [key(1)]).tolist() == [first]
    assert pool.names([second]) == [None]
    third, fourth = pool.take(2).tolist()
    assert pool.publish([third, fourth], [key(2), key(2)]).tolist() == [third, third]


def test_twins_are_found_until_the_last_one_is_gone() -> None:
    twins = FramePool(8, key_bytes=8, twins=True)
    frames = twins.take(2)
    assert twins.publish(frames, [key(1), key(1)]).tolist() == frames.tolist()
    assert twins.find([key(1)]).tolist() == [frames[1]]
    twins.unpublish(int(frames[1]))
    assert twins.find([key(1)]).tolist() == [frames[0]]
    twins.unpublish(frames)
    assert twins.find([key(1)]).tolist() == [-1]


def test_a_frame_is_published_while_it_has_references_and_under_one_key(pool: FramePool) -> None:
    frame, other = named(pool, 1)[0], pool.take_one()
    assert pool.publish([frame], [key(1)]).tolist() == [frame], "the same key again changes nothing"
    for frames, keys, why in (
        ([other, frame], [key(3), key(2)], "has another key; unpublish it first"),
        ([other, other], [key(3), key(4)], "was named before in this call"),
        ([other, 7], [key(3), key(4)], "has no references"),
        ([other, 8], [key(3), key(4)], "no frame of this pool"),
    ):
        with refused(pool, InvalidRequest, why):
            pool.publish(frames, keys)
    with pytest.raises(InvalidRequest, match="2 frames and 1 keys"):
        pool.publish([frame, other], [key(1)])
    pool.unpublish(frame)
    with pytest.raises(InvalidRequest, match="was named before in this call"):
        pool.publish([frame, frame], [key(2), key(1)])  # the second key is the one that the frame had
    assert pool.publish([frame], [key(2)]).tolist() == [frame]
    assert pool.find([key(1), key(2)]).tolist() == [-1, frame]


def test_a_name_that_is_taken_away_frees_a_cached_frame_and_no_other(pool: FramePool) -> None:
    cached, held = named(pool, 1, 2)
    pool.drop(cached)
    pool.unpublish([cached, held, 7])
    assert pool.find([key(1), key(2)]).tolist() == [-1, -1]
    assert (pool.stats().free, pool.stats().mapped) == (7, 1)
