"""The laws of free runs: which free frame a space gets; the bits and lists equal a plain set of free frames."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from pagedkv.core import AddressSpace, Group, MemoryManager
from pagedkv.core import state as st
from pagedkv.core.pool import free_runs


def grow(mm: MemoryManager, spaces: list[AddressSpace], tokens: int = 1) -> None:
    mm.commit(mm.plan(spaces, [tokens] * len(spaces)), [0] * tokens * len(spaces))


@pytest.mark.many_steps
def test_sequences_that_grow_in_turn_do_not_interleave() -> None:
    mm = MemoryManager(num_frames=4096, block_size=1, prefix_cache=False)
    spaces = [mm.open() for _ in range(48)]
    for _ in range(40):
        grow(mm, spaces)
    assert mm.mean_run() == 40
    mm.check()


@pytest.mark.many_steps
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


@settings(max_examples=40, deadline=None)
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
