"""What a step leaves behind for Python: nothing. Counted, not timed."""

from __future__ import annotations

import gc
import resource
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pagedkv.core import MemoryManager

BATCH, STEPS = 64, 1000

pytestmark = pytest.mark.many_steps


@pytest.fixture
def thousand_steps() -> Callable[[], None]:
    """plan + commit of a decode step, a thousand times; pages fill, are published, and those of the last time are evicted on the way."""
    mm = MemoryManager(num_frames=BATCH * STEPS // 16 + 4 * BATCH, block_size=16)
    spaces = [mm.open() for _ in range(BATCH)]
    asids, ones = np.array([space.asid for space in spaces], np.int32), np.ones(BATCH, np.int64)
    words = np.random.default_rng(0).integers(0, 1000, (STEPS, BATCH)).astype(np.int32)

    def run() -> None:
        for space in spaces:
            space.truncate(0)
        words[:] += 1  # else the second time would find what the first has published
        for ids in words:
            mm.commit(mm.plan(asids, ones), ids)

    run()  # tables grow, functions are compiled
    run()  # and those that only a second time calls
    return run


def test_a_thousand_steps_ask_nothing_of_the_garbage_collector(thousand_steps: Callable[[], None]) -> None:
    collections: list[object] = []

    def count(phase: str, info: dict[str, int]) -> None:
        collections.append((phase, info))

    assert gc.isenabled()
    gc.collect()
    gc.callbacks.append(count)
    try:
        thousand_steps()
    finally:
        gc.callbacks.remove(count)
    assert not collections


def test_a_thousand_steps_leave_no_object(thousand_steps: Callable[[], None]) -> None:
    gc.collect()
    before = sys.getallocatedblocks()
    thousand_steps()
    assert sys.getallocatedblocks() - before < 100  # one for each frame would be 4,000; for each step 1,000


def test_a_thousand_steps_hold_no_more_memory(thousand_steps: Callable[[], None]) -> None:
    tracemalloc.start()
    try:
        thousand_steps()
        before = tracemalloc.get_traced_memory()[0]
        thousand_steps()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 4096


def test_there_is_no_object_for_a_frame() -> None:
    def objects(num_frames: int) -> int:
        gc.collect()
        before = sys.getallocatedblocks()
        mm = MemoryManager(num_frames, 16)
        made = sys.getallocatedblocks() - before
        del mm
        return made

    objects(8)
    assert abs(objects(100_000) - objects(1000)) < 20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads what this process holds where Linux tells it")
def test_a_pool_takes_no_memory_for_frames_that_nobody_has_used() -> None:
    """So that a million of them are made in a few ms in a process that has just begun, too."""

    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = held()
    mm = MemoryManager(1_000_000, 16)
    made = held() - before
    assert sum(array.nbytes for array in mm.state) > 100e6
    assert made < 16e6
