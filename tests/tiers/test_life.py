"""Random lives of a cache over tiers: whatever is evicted, fetched, damaged, forgotten or resized, a page that a prompt
finds holds its own bytes, and no frame is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pagedkv import KVSpec, PagedKVCache, StateSpec
from pagedkv.core import Places
from pagedkv.errors import OutOfFrames
from pagedkv.tiers import DiskTier, HostTier, tier_names
from tests.tiers.world import IDS, SIZE, SPEC, Stubborn, World, evicted

FRAMES = 24
STATES = StateSpec([{"conv": ((8, 3), "float32"), "recurrent": ((2, 4, 8), "float32")}])
GROUPS = {"one": SPEC, "windowed": [SPEC, KVSpec(1, 1, 16, block_size=SIZE, dtype="float32", window=6)]}
GROUPS |= {f"{name} beside states": spec for name, spec in GROUPS.items()}


def tiers_of(folder: Path, slots: int) -> list[HostTier | DiskTier]:
    return [HostTier(slots * SPEC.frame_bytes), DiskTier(folder, 2 * slots * (4096 + 128), threads=2)]


def damage(tiers: list[HostTier | DiskTier], draw: random.Random) -> None:
    """Flip a bit of a page in some tier."""
    tier = draw.choice(tiers)
    if isinstance(tier, HostTier):
        tier._memory[draw.randrange(len(tier._memory)), draw.randrange(tier._memory.shape[1])] ^= 1
    else:
        with open(tier._path("bytes"), "r+b") as file:
            at = draw.randrange(tier._slots.num_frames) * tier._stride + draw.randrange(SPEC.frame_bytes)
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))


@pytest.mark.many_steps
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_a_page_that_is_found_holds_its_own_bytes(seed: int, groups: str, tmp_path: Path) -> None:
    draw = random.Random(seed)
    tiers, hybrid = tiers_of(tmp_path, 40), {}
    if "states" in groups:
        of_states = HostTier(60 * STATES.frame_bytes)
        places = Places(distances=(4, 8, 16))
        hybrid = {"states": STATES, "state_memory": 12, "state_tiers": [of_states], "places": places}
    cache = PagedKVCache(GROUPS[groups], model="m", num_frames=FRAMES, tiers=tiers, **hybrid)
    tiers += hybrid.get("state_tiers", [])
    world, fetches, fetched = World(cache), [], 0
    trunks = [[draw.randrange(50) for _ in range(30)] for _ in range(6)]
    for turn in range(350):
        ids = draw.choice(trunks)[: draw.randrange(1, 31)] + [draw.randrange(50) for _ in range(draw.randrange(1, 9))]
        tenant, salt = draw.choice([b"", b"acme"]), draw.choice([b"", b"", b"adapter"])
        verb = draw.choices(
            ["run", "fetch", "wait", "damage", "cancel", "forget", "resize"], [40, 20, 20, 5, 5, 0.5, 1]
        )[0]
        if verb == "run":
            try:
                world.run(ids, tenant, salt)
            except OutOfFrames:  # fetches hold frames
                for fetch in fetches:
                    fetch.wait(10)
        elif verb == "fetch":
            fetches.append(cache.fetch(ids, tenant=tenant, salt=salt, hold=draw.random() < 0.3))
        elif verb == "wait" and fetches:
            fetch = fetches.pop(draw.randrange(len(fetches)))
            assert fetch.wait(300)
            assert fetch.tokens <= fetch.asked
            fetched += fetch.tokens
            if draw.random() < 0.7:
                fetch.cancel()  # the other holds end when frames are lacking
        elif verb == "damage":
            damage(tiers, draw)
        elif verb == "cancel" and fetches:
            fetch = fetches.pop()
            fetch.cancel()
            assert fetch.done
        elif verb == "forget":
            cache.forget()
            assert cache.lookup(ids, tenant=tenant, salt=salt) == 0
            assert cache.fetch(ids, tenant=tenant, salt=salt).asked == 0
        elif verb == "resize":
            cache.resize(draw.randrange(FRAMES - 4, FRAMES + 4))
            if "states" in groups:
                cache.resize_states(draw.randrange(10, 14))
        world.check_found(ids, tenant, salt)
        if turn % 10 == 0:
            cache.check()
    assert fetched  # how many depends on how fast the tiers store
    cache.tiers.close()
    cache.check()
    now = cache.stats()
    assert (now.mapped, now.spaces) == (0, 0)
    assert all(now.changed + now.stored for now in [tier.stats() for tier in tiers])


def test_a_fetch_that_is_under_way_is_found_by_nobody() -> None:
    tier = Stubborn("1MiB")
    world = evicted(tier)
    cache, fetch = world.cache, world.cache.fetch(IDS)
    assert (fetch.asked, cache.lookup(IDS)) == (40, 0)
    assert cache.fetch(list(range(99, 130))).done  # the tiers have nothing of it
    with pytest.raises(OutOfFrames):
        world.run(list(range(200, 240)))
    assert not fetch.done
    tier.may_load.set()
    assert fetch.wait(300)
    assert world.check_found(IDS) == 40


def test_a_prompt_is_hashed_once_though_it_waits_for_another_one_and_looks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[int] = []
    real = tier_names.page_digest
    monkeypatch.setattr(tier_names, "page_digest", lambda *page: hashed.append(1) or real(*page))
    tier = Stubborn("1MiB")
    world = evicted(tier)
    hashed.clear()
    fetches = [world.cache.fetch(IDS) for _ in range(2)]
    tier.may_load.set()
    assert all(fetch.wait(300) for fetch in fetches)
    assert [fetch.tokens for fetch in fetches] == [40, 40]
    assert len(hashed) == 20
