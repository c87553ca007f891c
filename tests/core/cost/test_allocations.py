"""A step leaves no object and no work for the garbage collector behind. Counted, not timed."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pagedkv.core import MemoryManager
from tests.core.cost.memory import IS_THERE

ROOT = Path(__file__).parents[3]
BATCH, STEPS = 64, 1000

pytestmark = pytest.mark.many_steps


@pytest.fixture
def thousand_steps() -> Callable[[], None]:
    """Return a thousand decode steps, plan and commit: pages fill, are published, and evict those of the run before."""
    mm = MemoryManager(num_frames=BATCH * STEPS // 16 + 4 * BATCH, block_size=16)
    spaces = [mm.open() for _ in range(BATCH)]
    asids, ones = np.array([space.asid for space in spaces], np.int32), np.ones(BATCH, np.int64)
    words = np.random.default_rng(0).integers(0, 1000, (STEPS, BATCH)).astype(np.int32)

    def run() -> None:
        for space in spaces:
            space.truncate(0)
        words[:] += 1  # else the second run would find the pages that the first has published
        for ids in words:
            mm.commit(mm.plan(asids, ones), ids)

    run()  # tables grow, functions are compiled
    run()  # some functions are called in a second run only
    return run


def least(measure: Callable[[], int]) -> int:
    """Return the least of three measurements: other threads of the process allocate too, a leak is in all three."""
    return min(measure() for _ in range(3))


def test_a_thousand_steps_leave_no_object_and_ask_nothing_of_the_garbage_collector(
    thousand_steps: Callable[[], None],
) -> None:
    collections: list[object] = []
    counted: list[int] = []

    def grown() -> int:
        gc.collect()
        before = sys.getallocatedblocks()
        collections.clear()
        thousand_steps()
        counted.append(len(collections))
        gc.collect()  # Python keeps a hundred freed tuples for reuse until then
        return sys.getallocatedblocks() - before

    def count(phase: str, info: dict[str, int]) -> None:
        collections.append((phase, info))

    assert gc.isenabled()
    gc.callbacks.append(count)
    try:
        assert least(grown) < 100  # an object for each frame would be 4,000, for each step 1,000
    finally:
        gc.callbacks.remove(count)
    assert min(counted) == 0


def test_there_is_no_object_for_a_frame() -> None:
    def objects(num_frames: int) -> int:
        gc.collect()
        before = sys.getallocatedblocks()
        mm = MemoryManager(num_frames, 16)
        created = sys.getallocatedblocks() - before
        del mm
        return created

    objects(8)
    assert least(lambda: abs(objects(100_000) - objects(1000))) < 20


BEGUN = """
import tracemalloc
import numpy as np
from pagedkv.core import MemoryManager
from tests.core.cost.memory import resident
tracemalloc.start()
mm = MemoryManager(1_000_000, 16)
allocated = tracemalloc.get_traced_memory()[0]
untouched = sum(map(resident, mm.state))
mm.state.frames.view(np.uint8)[: 20 << 20] = 0
print(sum(array.nbytes for array in mm.state), allocated, untouched, sum(map(resident, mm.state)))
"""


@pytest.mark.skipif(not IS_THERE, reason="reads /proc of Linux")
def test_a_pool_takes_no_memory_for_frames_that_were_never_used() -> None:
    """A pool of a million frames takes a few ms to make in a process that has just begun.

    In an older process, malloc may have free memory that is large enough. It serves the arrays then, filled with zeros.
    """
    run = subprocess.run([sys.executable, "-c", BEGUN], cwd=ROOT, capture_output=True, text=True, check=True)
    size, allocated, untouched, touched = map(int, run.stdout.split())
    assert 100e6 < size < allocated + 1e6
    assert allocated < size + 1e6
    assert untouched < 16e6 < touched
