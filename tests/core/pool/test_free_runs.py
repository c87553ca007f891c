"""The laws of free runs: which free frame a space gets; the bits and lists equal a plain set of free frames."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from pagedkv.core import AddressSpace, Group, MemoryManager
from pagedkv.core import state as st
from pagedkv.core.pool import free_runs
from tests.core.oracle import grown


def grow(mm: MemoryManager, spaces: list[AddressSpace], tokens: int = 1) -> None:
    mm.commit(mm.plan(spaces, [tokens] * len(spaces)), [0] * tokens * len(spaces))


def test_sequences_that_grow_in_turn_do_not_interleave() -> None:
    mm = MemoryManager(num_frames=4096, block_size=1, prefix_cache=False)
    spaces = [mm.open() for _ in range(48)]
    for _ in range(40):
        grow(mm, spaces)
    assert mm.mean_run() == 40
    mm.check()


def test_forks_that_grow_in_turn_keep_runs_of_their_own() -> None:
    mm = MemoryManager(num_frames=4096, block_size=2, prefix_cache=False)
    parent = mm.open()
    grow(mm, [parent], 2 * 30 + 1)
    beams = [parent, *(parent.fork() for _ in range(7))]
    for _ in range(60):
        grow(mm, beams)
    for beam in beams:
        assert len(beam.runs) <= 2
    mm.check()


def test_runs_stay_long_while_sequences_come_and_go() -> None:
    """The mean run stays above 32 frames. With a stack of free frames, as in most managers, it is 1.0 here."""
    rng = np.random.default_rng(0)
    mm = MemoryManager(num_frames=8192, block_size=1, prefix_cache=False)
    spaces: list[AddressSpace] = []
    means = []
    for step in range(301):
        while len(spaces) < 48:
            spaces.append(mm.open())
            grow(mm, spaces[-1:], int(rng.integers(1, 80)))
        grow(mm, spaces)
        for leaver in sorted(rng.choice(48, rng.integers(0, 3), replace=False), reverse=True):
            spaces.pop(leaver).release()
        if step > 100 and step % 50 == 0:
            means.append(mm.mean_run())
    assert min(means) > 32
    mm.check()


def test_a_prompt_that_must_evict_gets_runs(mm: MemoryManager) -> None:
    for first in range(4):
        grown(mm, [first] * 16).release()
    assert mm.stats().free <= 4
    assert len(grown(mm, [9] * 56).runs) <= 2


def test_a_new_run_begins_in_a_group_of_its_own() -> None:
    mm = MemoryManager(num_frames=63, block_size=1)
    assert [int(grown(mm, [first]).pages[0]) for first in range(4)] == [0, 16, 32, 1]


def test_runs_are_listed_without_holes() -> None:
    mm = MemoryManager(16, 4, groups=(Group(window=8, sinks=4),))
    space = grown(mm, list(range(20)))
    first = int(space.pages[0])
    assert space.runs.tolist() == [[first, 1], [first + 3, 2]]
    assert mm.mean_run() == 1.5
    space.release()
    assert mm.mean_run() == 0.0


@settings(deadline=None)
@given(some.lists(some.integers(-1, 9), max_size=12))
@example([-1, 0])
@example([5, -1, 0, 1])
def test_runs_are_consecutive_frames_and_holes_end_them(pages: list[int]) -> None:
    found, before = [], -1
    for frame in pages:
        if frame >= 0 and before >= 0 and frame == before + 1:
            found[-1][1] += 1
        elif frame >= 0:
            found.append([frame, 1])
        before = frame
    assert free_runs.runs_in(np.array(pages, np.int32)).tolist() == found


def test_frame_0_behind_a_hole_begins_a_run() -> None:
    mm = MemoryManager(4, 1, groups=(Group(window=3),), prefix_cache=False)
    first, space = mm.open(), mm.open()
    grow(mm, [first])
    grow(mm, [space])
    first.release()
    while space.pages[-2:].tolist() != [0, 1]:
        grow(mm, [space])
    assert space.pages[-3] == -1
    assert space.runs[:, 1].sum() == (space.pages >= 0).sum()
    assert mm.mean_run() > 0


@pytest.mark.parametrize("num_frames", [1, 15, 16, 63, 64, 65, 128, 200])
def test_every_frame_of_a_pool_can_be_taken_and_given_back(num_frames: int) -> None:
    mm = MemoryManager(num_frames, 1, prefix_cache=False)
    mm.check()
    spaces = [mm.open() for _ in range(num_frames)]
    grow(mm, spaces)
    assert sorted(int(space.pages[0]) for space in spaces) == list(range(num_frames))
    mm.check()
    for space in spaces[::2] + spaces[1::2]:
        space.release()
    mm.check()
    assert mm.available == num_frames


@settings(deadline=None)
@given(
    num_frames=some.integers(1, 150),
    calls=some.lists(some.tuples(some.integers(-1, 150), some.integers(1, 70)), max_size=30),
)
def test_bits_and_lists_equal_a_set_of_free_frames(num_frames: int, calls: list[tuple[int, int]]) -> None:
    mm = MemoryManager(num_frames, 1)
    s, free, held = mm.state, set(range(num_frames)), []
    for last, wanted in calls:
        if free and (wanted % 3 or not held):
            last = min(last, num_frames - 1)
            first, count = free_runs.take(s.chunks, s.reg, last, wanted)
            got = set(range(first, first + count))
            assert 1 <= count <= wanted
            assert got <= free
            assert first // 64 == (first + count - 1) // 64
            assert last < 0 or last + 1 not in free or first == last + 1
            free -= got
            held.append((first, count))
        elif held:
            first, count = held.pop(wanted % len(held))
            free_runs.put(s.chunks, s.reg, first, count)
            free |= set(range(first, first + count))
        s.frames["status"] = st.MAPPED
        s.frames["status"][list(free)] = st.FREE
        s.frames["refs"] = s.frames["status"] == st.MAPPED
        s.reg[st.PEAK] = num_frames
        mm.check(2)
