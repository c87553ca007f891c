"""A long random life: the invariants hold all along, and memory stays flat."""

from __future__ import annotations

import gc
import os
import tracemalloc
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from pagedkv.core.policies import POLICIES
from tests.core.walks import WORLDS, Walk

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def live(walk: Walk, steps: int, every: int) -> None:
    for number in range(steps):
        walk.step()
        if number % every == 0:
            walk.mm.check()
    walk.mm.check()


def let_go(walk: Walk) -> None:
    """Everything is given back, in whatever state it is."""
    for space in walk.spaces:
        space.release()
    walk.calm()
    for pin in walk.pins:
        walk.mm.unpin(pin)


LIVES = list(zip(sorted(POLICIES), WORLDS, strict=True))
"""Each policy in a world; in all others when there is time."""


@pytest.mark.parametrize(("policy", "world"), LIVES)
def test_nothing_is_lost_in_a_random_life(policy: str, world: str) -> None:
    lose_nothing(policy, world)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "world"), [life for life in product(sorted(POLICIES), WORLDS) if life not in LIVES])
def test_nothing_is_lost_in_any_random_life(policy: str, world: str) -> None:
    lose_nothing(policy, world)


def lose_nothing(policy: str, world: str) -> None:
    walk = Walk(5, replace(WORLDS[world], policy=policy))
    live(walk, 3000, every=50)
    assert walk.refused > 0  # the pool was too small at times,
    assert walk.conflicts > 0  # and things came at the wrong moment
    let_go(walk)
    now = walk.mm.stats()
    assert (now.mapped, now.retired, now.pending, now.pinned, now.spaces) == (0, 0, 0, 0, 0)
    assert now.free + now.cached == now.num_frames
    assert walk.mm.evict(now.num_frames) == now.cached
    walk.mm.check()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_million_operations_leave_memory_flat() -> None:
    walk = Walk(7, replace(WORLDS["groups"], num_frames=4096, max_spaces=64))
    live(walk, 100_000, every=5_000)
    gc.collect()
    tracemalloc.start()
    try:
        live(walk, 10_000, every=5_000)
        before = tracemalloc.get_traced_memory()[0]
        live(walk, 50_000, every=5_000)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 64 * 1024, f"{grown} bytes more after 50,000 operations"
    gc.collect()
    rss = resident()
    live(walk, 840_000, every=20_000)
    gc.collect()
    assert resident() - rss < 4 << 20, f"{resident() - rss} bytes more after 840,000 operations"
    let_go(walk)
    assert walk.mm.stats().mapped == walk.mm.stats().retired == 0
