"""Tiers that hang, fail or lie, and owners that are interrupted: a fault costs pages, and no byte, frame or step."""

from __future__ import annotations

import errno
import gc
import hashlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pagedkv import AddressSpace, PagedKVCache
from pagedkv.tiers import DiskTier, HostTier, Job, Key, Op, PoolView, Result, Tier, UsedAgain, level, slots
from pagedkv.tiers.checksum import checksum
from pagedkv.tiers.fetch import Fetch
from pagedkv.tiers.pool_view import Numbers
from tests.interrupts import count_instructions, interrupted
from tests.tiers.world import IDS, PAGES, SPEC, Stubborn, World, evicted


class Five(Tier):
    """The smallest tier: five methods, and a dict. fault: raised by `lookup`."""

    name = "five"
    fault: Exception | None = None

    def register(self, pool: PoolView, fingerprint: bytes) -> None:
        self.pool, self.pages, self.ended = pool, dict[bytes, bytes](), list[Result]()

    def lookup(self, keys: Sequence[Key]) -> npt.NDArray[np.bool_]:
        if self.fault:
            raise self.fault
        return np.array([key.name in self.pages for key in keys], np.bool_)

    def submit(self, op: Op, keys: Sequence[Key], frames: Sequence[int]) -> Job:
        job = Job(op)
        for key, frame in zip(keys, frames, strict=True):
            if op is Op.STORE:
                self.pages[key.name] = self.pool.bytes_of(frame).tobytes()
            else:
                self.pool.bytes_of(frame)[:] = np.frombuffer(self.pages[key.name], np.uint8)
            self.ended.append(Result(job.number, key, True))
        return job

    def poll(self) -> list[Result]:
        ended, self.ended = self.ended, []
        return ended

    def close(self, timeout: float = 0) -> None:
        self.pages = {}


def test_five_methods_make_a_tier_and_forget_hides_its_pages() -> None:
    world = evicted(Five())
    assert world.fetched(IDS) == 40
    world.cache.forget()
    assert world.cache.fetch(IDS).asked == 0  # though the tier has dropped nothing: the names are others now


def test_an_exception_of_a_tier_reaches_no_caller_and_the_tier_is_skipped_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(level, "time", SimpleNamespace(monotonic=lambda: now))  # a busy machine shortens no skip
    five = Five()
    world = evicted(five)
    five.fault = ConnectionError("the server is gone")
    for _ in range(level.FAILURES):
        assert world.cache.fetch(IDS).done
    five.fault = None
    now += level.SKIPPED - 0.1
    assert world.cache.fetch(IDS).asked == 0  # not even asked
    now += 0.2
    assert world.fetched(IDS) == 40


def hanging() -> tuple[Stubborn, World, Fetch]:
    """Return a tier whose load hangs until `may_load` is set, its world, and the fetch that waits for the load."""
    stubborn = Stubborn("1MiB")
    world = evicted(stubborn, num_frames=24)
    fetch = world.cache.fetch(IDS)
    assert stubborn.is_loading.wait(300)
    return stubborn, world, fetch


def test_a_tier_that_moves_nothing_is_skipped_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn, world, fetch = hanging()
    now = time.monotonic() + level.STALLED + 1
    with monkeypatch.context() as patch:
        patch.setattr(level, "time", SimpleNamespace(monotonic=lambda: now))
        world.cache.tiers.pump()
        assert not world.cache.tiers._levels[0].is_open
        assert world.cache.fetch(IDS).asked == 0
    stubborn.may_load.set()
    assert fetch.wait(300)
    assert world.cache.tiers.quiesce(300)
    assert world.fetched(IDS) == 40


def test_a_page_that_one_tier_cannot_give_comes_from_the_next(tmp_path: Path) -> None:
    broken = Stubborn("1MiB", OSError(errno.EIO, "no such luck"))
    broken.may_load.set()
    world = evicted(broken, DiskTier(tmp_path, "1MiB"))
    fetch = world.cache.fetch(IDS)
    assert fetch.wait(300)
    assert (fetch.tokens, fetch.source) == (40, {"host": PAGES, "disk": PAGES})
    assert world.check_found(IDS) == 40
    assert world.cache.tiers.stats()["host"].failed == PAGES


class Rude(Five):
    """A tier that raises whatever it is told."""

    def forget(self) -> None:
        raise ConnectionError("the server is gone")

    def set_quota(self, tenant: bytes, share: float | None) -> None:
        raise ConnectionError("the server is gone")

    def close(self, timeout: float = 0) -> None:
        raise ConnectionError("the server is gone")


def test_a_tier_that_raises_keeps_no_other_from_forgetting_and_closing(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, "1MiB")
    world = World(PagedKVCache(SPEC, model="m", num_frames=16, tiers=[Rude(), disk]))
    world.cache.set_quota(b"acme", hard=8)
    assert disk._slots.stats().tenants[disk._charged(b"acme")].hard > 0
    world.store(IDS)
    world.cache.forget()
    assert disk.stats().pages == 0
    world.cache.tiers.close()
    PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(tmp_path, "1MiB")]).tiers.close()


def test_a_frame_that_is_reused_while_it_is_stored_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, may_go_on = threading.Event(), threading.Event()
    copy = PoolView.read

    def slow(
        self: PoolView,
        frames: Numbers,
        into: torch.Tensor,
        rows: Numbers,
        fence: object = None,
        *,
        is_summed: bool,
        seconds: float,
    ) -> list[bytes]:
        half, at, there = self.frame_bytes // 2, torch.from_numpy(frames), torch.from_numpy(rows)
        into[there, :half] = self.frames[at, :half]
        reading.set()
        may_go_on.wait(300)
        into[there, half:] = self.frames[at, half:]
        return [checksum(into[row].numpy(), b"") for row in rows.tolist()]  # of the torn page, so that it fits

    monkeypatch.setattr(PoolView, "read", slow)
    tier = HostTier("1MiB")
    world = World(PagedKVCache(SPEC, model="m", num_frames=12, tiers=[tier]))
    world.run(IDS)
    world.cache.tiers.pump()
    assert reading.wait(300)
    world.cache.evict(12)
    world.run(list(range(500, 541)))  # writes into the frame that is being read
    monkeypatch.setattr(PoolView, "read", copy)
    may_go_on.set()
    assert world.cache.tiers.flush(300)
    assert tier.stats().changed >= 1
    assert world.fetched(IDS) < 40


def test_a_load_that_hangs_ends_at_its_deadline_and_its_frames_wait_for_it() -> None:
    tier = Stubborn("1MiB")
    world = evicted(tier, num_frames=24)
    cache = world.cache
    fetch = cache.fetch(IDS, timeout=0)
    assert tier.is_loading.wait(300)
    assert fetch.wait(300)  # the load goes on
    assert (fetch.tokens, cache.stats().mapped) == (0, PAGES)  # the tier may still write there
    world.run(list(range(100, 140)))  # others go on
    tier.may_load.set()
    cache.tiers.quiesce()
    assert cache.stats().mapped == 0
    cache.check()
    assert world.fetched(IDS) == 40


def test_a_cancelled_fetch_is_done_at_once_and_a_lost_one_gives_its_frames_back() -> None:
    tier, world, fetch = hanging()
    fetch.cancel()
    assert fetch.done
    world.cache.fetch(list(range(20)))  # dropped by its caller
    tier.may_load.set()
    world.cache.tiers.quiesce()
    assert world.cache.stats().mapped == 0
    world.check_found(IDS)


def test_frames_that_a_load_still_writes_at_the_close_come_back_when_it_has_ended() -> None:
    stubborn, world, _ = hanging()
    assert not world.cache.tiers.close(0.05)
    other = list(range(200, 241))
    world.run(other)
    assert world.cache.stats().mapped == PAGES
    assert world.cache.fetch(IDS).asked == 0
    stubborn.may_load.set()
    until = time.monotonic() + 300
    while world.cache.stats().mapped and time.monotonic() < until:
        world.cache.tiers.pump(0.001)
    assert (world.cache.stats().mapped, len(world.cache.tiers)) == (0, 0)
    assert world.check_found(other) == 40


def test_a_fetch_that_forget_ends_has_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn, world, fetch = hanging()
    monkeypatch.setattr(slots, "CLOSING", 0.05)  # the seconds that `forget` waits for the load
    world.cache.forget()
    assert fetch.done
    stubborn.may_load.set()
    assert world.cache.tiers.quiesce(300)
    assert (fetch.tokens, world.check_found(IDS)) == (0, 0)


class Interrupted(Stubborn):
    """A tier that is interrupted when it has begun to load, and before its caller knows."""

    def submit(self, op: Op, keys: Sequence[Key], frames: Sequence[int]) -> Job:
        job = super().submit(op, keys, frames)
        if op is Op.LOAD:
            raise KeyboardInterrupt
        return job


def test_frames_that_a_tier_writes_go_to_nobody_after_an_interrupt() -> None:
    stubborn = Interrupted("1MiB")
    world = evicted(stubborn, num_frames=24)
    with pytest.raises(KeyboardInterrupt):
        world.cache.fetch(IDS)
    world.cache.tiers.pump()
    other = list(range(200, 241))
    world.run(other)
    stubborn.may_load.set()
    while stubborn.num_pending:
        world.cache.tiers.pump(0.001)
    assert world.check_found(other) == 40
    assert world.cache.tiers.quiesce(300)
    assert world.cache.stats().mapped == 0


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (AddressSpace, "pages_in", lambda world: world.cache.fetch(IDS)),  # the first thing after its plan
        (HostTier, "_take_slots", lambda world: world.run([7, *IDS])),
    ],
    ids=["fetch", "store"],
)
def test_pages_and_frames_of_an_interrupted_call_come_back_without_a_collection(
    owner: type, name: str, call: Callable[[World], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostTier("1MiB")
    world = evicted(host)
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                call(world)
        world.cache.recover()
        assert (world.cache.stats().mapped, world.cache.stats().spaces) == (0, 0)
    finally:
        gc.enable()
    world.cache.evict(16)
    world.store([7, *IDS])
    assert host.stats().pages == 2 * PAGES


def life(world: World, hold: bool) -> None:
    """Fetch, open, compute another prompt, and store it."""
    fetch = world.cache.fetch(IDS, hold=hold)
    fetch.wait(300)
    world.check_found(IDS)
    fetch.cancel()
    world.store(IDS[:9] + [7] * 5)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_an_interrupt_leaves_a_cache_that_goes_on(seed: int) -> None:
    world, draw, hold = evicted(HostTier("1MiB")), random.Random(seed), seed % 2 == 0
    total = count_instructions(lambda: life(world, hold))
    for at in [draw.randrange(1, total) for _ in range(4)]:
        world.cache.tiers.close()
        world = evicted(HostTier("1MiB"))
        interrupted(at, partial(life, world, hold))
        deadline = time.monotonic() + 300
        while world.cache.tiers.num_pending or world.cache.tiers.num_fetches:
            world.cache.tiers.pump(0.001)
            assert time.monotonic() < deadline
        world.cache.tiers.release_holds()  # their owner was interrupted, and has lost them
        world.cache.recover()
        world.cache.check()
        assert world.cache.stats().mapped == 0
        life(world, hold)
        assert world.cache.stats().mapped == 0


def test_prompts_with_one_prefix_load_it_once() -> None:
    host = Stubborn("1MiB")
    world = evicted(host, num_frames=64)
    prompts = [IDS, IDS, [*IDS[:40], 7, 7, 7, 7, 7], IDS[:21]]
    fetches = [world.cache.fetch(ids) for ids in prompts]
    assert world.cache.stats().mapped == PAGES
    host.may_load.set()
    assert all(fetch.wait(300) for fetch in fetches)
    assert [fetch.tokens for fetch in fetches] == [fetch.asked for fetch in fetches] == [40, 40, 40, 20]
    assert host.stats().loaded == PAGES
    assert world.check_found(IDS) == 40
    assert world.cache.stats().mapped == 0
    host.may_load.clear()
    assert world.cache.evict(64)
    first, second = (world.cache.fetch(IDS) for _ in range(2))
    second.cancel()  # it has no frames, and the first goes on
    assert second.done
    assert not first.done
    host.may_load.set()
    assert first.wait(300)
    assert first.tokens == 40


def test_the_first_quota_of_a_tenant_charges_what_it_has_stored_and_keeps_the_last_used(tmp_path: Path) -> None:
    def begun(kind: str) -> tuple[HostTier | DiskTier, World]:
        tier = HostTier(40 * SPEC.frame_bytes) if kind == "host" else DiskTier(tmp_path, 40 * (4096 + 128))
        return tier, World(PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier]))

    digest = hashlib.blake2b(b"acme", digest_size=16).digest()  # no tenant is another one whose digest is its name
    for kind in ("host", "disk"):
        tier, world = begun(kind)
        prompts = [(list(range(at, at + 37)), tenant) for at, tenant in ((0, b"acme"), (100, b"acme"), (200, digest))]
        for ids, tenant in prompts:
            world.store(ids, tenant)
        world.cache.evict(16)
        if kind == "disk":
            world.cache.tiers.close()
            tier, world = begun(kind)
        order = [slot for slot in tier._slots.victims(40).tolist() if tier._tenants[slot] == tier._charged(b"acme")]
        last = tier._slots.names(order[-10:])
        for _ in range(2):  # a second quota charges no page twice
            world.cache.set_quota(b"acme", hard=4)  # a quarter of the pool, so ten slots
            assert tier._slots.stats().tenants[tier._charged(b"acme")].used == 10
        tier._slots.check()
        assert tier.stats().pages == 10 + 9
        kept = [slot for slot in tier._slots.victims(40).tolist() if slot in order]
        assert tier._slots.names(kept) == last
        for ids, tenant in prompts:
            found = world.fetched(ids, tenant)
        assert found == 36
        world.cache.tiers.close()


def test_what_came_back_is_stored_and_what_came_once_is_not() -> None:
    tier = HostTier("1MiB")
    world = World(PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier], write_back=UsedAgain()))
    world.store(IDS)
    assert tier.stats().stored == 0
    world.cache.evict(16)
    world.store(IDS)
    assert 1 <= tier.stats().stored <= PAGES  # some are forgotten: a small pool remembers few, see index.remember
