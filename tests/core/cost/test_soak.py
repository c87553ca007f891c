"""A long random walk: the invariants hold all along, and memory stays flat."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from pagedkv.core.policies import POLICIES
from tests.core.walks import WORLDS, Walk

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Return the resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def run_walk(walk: Walk, steps: int, every: int) -> None:
    for number in range(steps):
        walk.step()
        if number % every == 0:
            walk.mm.check()
    walk.mm.check()


def release_all(walk: Walk) -> None:
    """Release every space, finish all work, and drop every pin, in any state of the walk."""
    for space in walk.spaces:
        space.release()
    walk.finish_work()
    for pin in walk.pins:
        walk.mm.unpin(pin)
    walk.mm.advise(None, "release", now=float("inf"))


SOME = zip([*sorted(POLICIES), "lru"], WORLDS, strict=True)  # each policy in one world
FURTHER = product(sorted(POLICIES), WORLDS)


@pytest.mark.parametrize(
    ("policy", "world", "steps"),
    [*((*each, 400) for each in SOME), *(pytest.param(*each, 2000, marks=pytest.mark.slow) for each in FURTHER)],
)
def test_no_frame_is_lost_in_a_random_walk(policy: str, world: str, steps: int) -> None:
    walk = Walk(5, replace(WORLDS[world], policy=policy))
    run_walk(walk, steps, every=50)
    assert walk.refused > 0  # the pool was too small at times
    assert walk.conflicts > 0  # and some calls came at the wrong moment
    release_all(walk)
    now = walk.mm.stats()
    assert (now.mapped, now.retired, now.pending, now.pinned, now.spaces) == (0, 0, 0, 0, 0)
    assert now.free + now.cached == now.num_frames
    assert walk.mm.evict(now.num_frames) == now.cached
    walk.mm.check()


@pytest.mark.slow
@pytest.mark.many_steps
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_million_operations_leave_memory_flat() -> None:
    walk = Walk(7, replace(WORLDS["groups"], num_frames=4096, max_spaces=64))
    run_walk(walk, 160_000, every=5_000)
    objects, held = memory_at_rest(walk)
    run_walk(walk, 840_000, every=20_000)
    more_objects, more_held = memory_at_rest(walk)
    assert more_objects - objects < 1000, f"{more_objects - objects} objects more after 840,000 operations"
    assert more_held - held < 4 << 20, f"{more_held - held} bytes more after 840,000 operations"
    assert walk.mm.stats().mapped == walk.mm.stats().retired == 0


def memory_at_rest(walk: Walk) -> tuple[int, int]:
    """Release all, empty the pool, and return the blocks of Python objects and the resident bytes.

    Memory in use differs from step to step. Events name evicted pages until they are read, and the C library keeps
    memory that was freed: tens of megabytes here.
    """
    release_all(walk)
    for released in (walk.spaces, walk.plans, walk.pins):
        released.clear()
    walk.mm.evict(walk.mm.num_frames)
    walk.last_event = walk.mm.events_snapshot().sequence
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    return sys.getallocatedblocks(), resident()
