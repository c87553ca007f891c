"""Fetches that hold: their pages outlive cached ones, and no plan lacks a frame that it would have without the hold."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pagedkv import PagedKVCache
from pagedkv.errors import OutOfFrames
from pagedkv.tiers import Fetch, HostTier
from tests.tiers.world import SIZE, SPEC, World

FRAMES = 16
PROMPT = list(range(25))
PAGES = 6


def world_with(*prompts: list[int], tenant: bytes = b"", num_frames: int = FRAMES) -> World:
    """Return a world whose pool is empty, and whose tier has the pages of `prompts`."""
    world = World(PagedKVCache(SPEC, num_frames=num_frames, tiers=[HostTier("1MiB")]))
    for prompt in prompts:
        world.store(prompt, tenant)
    world.cache.evict(num_frames)
    return world


def fetched(world: World, ids: list[int], *, hold: bool = True, tenant: bytes = b"") -> Fetch:
    fetch = world.cache.fetch(ids, hold=hold, tenant=tenant)
    assert fetch.wait(300)
    assert fetch.tokens == fetch.asked > 0
    return fetch


def others(world: World, count: int = 4) -> None:
    """Compute prompts of 8 pages each, one after the other: together they take the pool twice."""
    for turn in range(count):
        world.run([100 + turn] * 32)


def test_held_pages_outlive_prompts_that_evict_others() -> None:
    for hold, found in ((True, 24), (False, 0)):
        world = world_with(PROMPT)
        fetch = fetched(world, PROMPT, hold=hold)
        others(world)
        assert world.check_found(PROMPT) == found
        fetch.cancel()
        assert world.cache.stats().mapped == 0
        assert world.check_found(PROMPT) == found  # cached
        others(world)
        assert world.cache.lookup(PROMPT) == 0
        world.cache.check()


def test_prefetch_loads_what_tiers_have_of_the_prompt_of_a_space() -> None:
    world = world_with(PROMPT)
    space, other = world.cache.open(PROMPT), world.cache.open([7] * 9)
    assert world.cache.advise(space, "prefetch") == "accepted"
    assert world.cache.advise(other, "prefetch") == "missing"
    while world.cache.tiers.num_fetches:
        world.cache.tiers.pump()
    space.release()
    other.release()
    assert world.check_found(PROMPT) == 24
    short = world.cache.open([1])
    assert world.cache.advise(short, "prefetch") == "missing"
    short.release()
    world.cache.check()


def test_a_plan_that_lacks_frames_takes_the_pages_that_were_held_last() -> None:
    old, new = PROMPT, [*range(200, 225)]
    world = world_with(old, new)
    for prompt in (old, new):
        fetched(world, prompt)
    space = world.cache.open()
    world.cache.plan([space], [4 * SIZE])  # those that are free
    assert (world.cache.lookup(old), world.cache.lookup(new)) == (24, 24)
    other = world.cache.open()
    batch = world.cache.plan([other], [SIZE])
    assert (world.cache.lookup(old), world.cache.tiers.num_holds) == (24, 1)
    assert world.cache.lookup(new) == 20  # its last page
    world.cache.abort(batch)
    world.cache.plan([other], [12 * SIZE])
    assert (world.cache.lookup(old), world.cache.tiers.num_holds) == (0, 0)
    with pytest.raises(OutOfFrames):
        world.cache.plan([world.cache.open()], [1])


@pytest.mark.many_steps
@pytest.mark.parametrize("quota", [None, 10])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_a_cache_says_and_gives_the_same_frames_with_holds_and_without(seed: int, quota: int | None) -> None:
    draw, pair = random.Random(seed), list[World]()
    prompts = [[turn] * draw.randrange(5, 40) for turn in range(8)]
    for _ in range(2):
        world = World(PagedKVCache(SPEC, num_frames=FRAMES, tiers=[HostTier("1MiB")], watermark=0.1))
        if quota:
            world.cache.set_quota(b"acme", hard=quota)
        for prompt in prompts:
            world.run(prompt, b"acme") if not quota or len(prompt) <= quota * SIZE else None
            assert world.cache.tiers.flush(300)
        world.cache.evict(FRAMES)
        pair.append(world)
    for _ in range(60):
        verb, ids = draw.choice(["fetch", "fetch", "plan", "release"]), draw.choice(prompts)
        count = draw.randrange(1, 50)
        outcomes = [turn(world, verb, ids, count, hold) for world, hold in zip(pair, (True, False), strict=True)]
        assert outcomes[0] == outcomes[1]
    for world in pair:
        world.cache.tiers.quiesce()
        world.cache.check()
        assert world.cache.tiers.num_holds == world.cache.tiers.num_held() == 0


def turn(world: World, verb: str, ids: list[int], count: int, hold: bool) -> tuple[object, ...]:
    """Take one turn of a life. Return what the cache says of its frames, and whether a plan had enough."""
    cache, tenant = world.cache, b"acme"
    said = cache.available, cache.available_to(tenant), [cache.admits(n, tenant=tenant) for n in range(FRAMES + 2)]
    if verb == "fetch":
        cache.fetch(ids, tenant=tenant, hold=hold).wait(300)
    elif verb == "plan":
        space = cache.open(tenant=tenant)
        try:
            batch = cache.plan([space], [count])
        except OutOfFrames as lack:
            space.release()
            return *said, type(lack)
        cache.abort(batch)
        space.release()
    elif verb == "release":
        for fetch in cache.tiers._loader.holds:
            fetch.cancel()
    return said


ENDS: dict[str, Callable[[World], object]] = {
    "forget": lambda world: world.cache.forget(),
    "resize": lambda world: world.cache.resize(7),
    "quiesce": lambda world: world.cache.tiers.quiesce(),
    "release_holds": lambda world: world.cache.tiers.release_holds(),
    "close": lambda world: world.cache.tiers.close(),
}


@pytest.mark.parametrize("end", ENDS)
def test_each_end_of_a_cache_or_its_tiers_ends_the_holds(end: str) -> None:
    world = world_with(PROMPT)
    fetched(world, PROMPT)
    assert (world.cache.stats().mapped, world.cache.tiers.num_held()) == (PAGES, PAGES)
    ENDS[end](world)
    assert (world.cache.stats().mapped, world.cache.stats().spaces, world.cache.tiers.num_holds) == (0, 0, 0)
    world.cache.check()
