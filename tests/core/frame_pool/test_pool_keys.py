"""The laws of keys in a FramePool: what is found, what is refused, which of two equal keys counts."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.core import FramePool
from pagedkv.errors import InvalidRequest
from tests.core.frame_pool.oracle import key, named
from tests.core.oracle import refused

pytestmark = pytest.mark.strict


@pytest.fixture
def pool() -> FramePool:
    return FramePool(8, key_bytes=8)


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
