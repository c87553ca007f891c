"""Tiers that hang, fail or lie, and owners that are interrupted: a fault costs pages, and no byte, frame or step."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pagedkv import AddressSpace, PagedKVCache
from pagedkv.errors import ConcurrentUse, InvalidRequest
from pagedkv.tiers import DiskTier, HostTier, Job, Key, Op, PoolView, Result, Tier, UsedAgain, level, slots
from pagedkv.tiers.checksum import checksum
from pagedkv.tiers.fetch import Fetch
from pagedkv.tiers.pool_view import Numbers
from tests.interrupts import Interrupter, count_instructions
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
    assert world.cache.fetch(IDS).done
    assert world.check_found(IDS) == 40
    world.cache.forget()
    assert world.cache.fetch(IDS).asked == 0  # though the tier has dropped nothing: the names are others now
    world.cache.tiers.close()


def test_a_cache_without_tiers_fetches_nothing() -> None:
    cache = PagedKVCache(SPEC, model="m", num_frames=16)
    for _ in range(2):
        fetch = cache.fetch(IDS)
        assert (fetch.done, fetch.asked, fetch.tokens) == (True, 0, 0)
        cache.set_quota(b"some", hard=3)
        cache.forget()
        cache.resize(17)
        cache.tiers.pump()
        cache.tiers.close()  # also twice, and with nothing in it


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
    assert world.cache.fetch(IDS).done
    assert world.check_found(IDS) == 40


def test_a_tier_that_moves_nothing_is_skipped_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = Stubborn("1MiB")
    world = evicted(stubborn, num_frames=24)
    monkeypatch.setattr(level, "STALLED", 0.1)
    fetch = world.cache.fetch(IDS, timeout=0.01)
    assert stubborn.is_loading.wait(20)  # else the late fetch takes its load back
    fetch.wait(20)
    time.sleep(0.15)
    world.cache.tiers.pump()
    assert not world.cache.tiers._levels[0].is_open
    assert world.cache.fetch(IDS).asked == 0
    monkeypatch.undo()  # a busy machine may take longer to move a page
    stubborn.may_load.set()
    assert world.cache.tiers.quiesce(20)
    assert world.cache.fetch(IDS).wait(20)
    assert world.check_found(IDS) == 40
    world.cache.tiers.close()


def test_a_page_that_one_tier_cannot_give_comes_from_the_next(tmp_path: Path) -> None:
    broken = Stubborn("1MiB", OSError(errno.EIO, "no such luck"))
    broken.may_load.set()
    world = evicted(broken, DiskTier(tmp_path, "1MiB"))
    fetch = world.cache.fetch(IDS)
    assert fetch.wait(20)
    assert (fetch.tokens, fetch.source) == (40, {"host": PAGES, "disk": PAGES})
    assert world.check_found(IDS) == 40
    assert world.cache.tiers.stats()["host"].failed == PAGES
    world.cache.tiers.close()


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
    world.run(IDS)
    assert world.cache.tiers.flush(20)
    world.cache.forget()
    assert disk.stats().pages == 0
    world.cache.tiers.close()
    PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(tmp_path, "1MiB")]).tiers.close()


def test_a_cache_that_was_not_made_leaves_no_tier_open(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="has 1 bytes"):
        PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(tmp_path, "1MiB"), HostTier(1)])
    PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(tmp_path, "1MiB")]).tiers.close()


def test_a_second_thread_is_refused_while_the_first_is_in_a_call() -> None:
    inside, may_go_on = threading.Event(), threading.Event()

    class Waits(Five):
        def lookup(self, keys: Sequence[Key]) -> npt.NDArray[np.bool_]:
            inside.set()
            may_go_on.wait(20)
            return super().lookup(keys)

    world = World(PagedKVCache(SPEC, num_frames=16, tiers=[Waits()]))
    other = threading.Thread(target=world.cache.fetch, args=(IDS,))
    other.start()
    assert inside.wait(20)
    with pytest.raises(ConcurrentUse):
        world.cache.tiers.pump()
    may_go_on.set()
    other.join()


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
        may_go_on.wait(20)
        into[there, half:] = self.frames[at, half:]
        return [checksum(into[row].numpy(), b"") for row in rows.tolist()]  # of the torn page, so that it fits

    monkeypatch.setattr(PoolView, "read", slow)
    tier = HostTier("1MiB")
    world = World(PagedKVCache(SPEC, model="m", num_frames=12, tiers=[tier]))
    world.run(IDS)
    world.cache.tiers.pump()
    assert reading.wait(20)
    world.cache.evict(12)
    world.run(list(range(500, 541)))  # writes into the frame that is being read
    monkeypatch.setattr(PoolView, "read", copy)
    may_go_on.set()
    assert world.cache.tiers.flush(20)
    assert tier.stats().changed >= 1
    fetch = world.cache.fetch(IDS)
    assert fetch.wait(20)
    assert world.check_found(IDS) == fetch.tokens < 40
    world.cache.tiers.close()


# --- hangs and exits --------------------------------------------------------------------------------------------------


def hanging() -> tuple[Stubborn, World, Fetch]:
    """Return a tier whose load hangs until `may_load` is set, its world, and the fetch that waits for the load."""
    stubborn = Stubborn("1MiB")
    world = evicted(stubborn, num_frames=24)
    fetch = world.cache.fetch(IDS)
    assert stubborn.is_loading.wait(20)
    return stubborn, world, fetch


def test_a_load_that_hangs_ends_at_its_deadline_and_its_frames_wait_for_it() -> None:
    tier = Stubborn("1MiB")
    world = evicted(tier, num_frames=24)
    cache = world.cache
    fetch = cache.fetch(IDS, timeout=1)
    assert not fetch.wait(0.02)
    assert fetch.wait(20)  # the load goes on
    assert (fetch.tokens, cache.stats().mapped) == (0, PAGES)  # the tier may still write there
    world.run(list(range(100, 140)))  # others go on
    tier.may_load.set()
    cache.tiers.quiesce()
    assert cache.stats().mapped == 0
    cache.check()
    assert cache.fetch(IDS).wait(20)
    assert world.check_found(IDS) == 40
    cache.tiers.close()


def test_a_cancelled_fetch_is_done_at_once_and_a_lost_one_gives_its_frames_back() -> None:
    tier = Stubborn("1MiB")
    world = evicted(tier, num_frames=24)
    fetch = world.cache.fetch(IDS)
    fetch.cancel()
    assert fetch.done
    world.cache.fetch(list(range(20)))  # dropped by its caller
    tier.may_load.set()
    world.cache.tiers.quiesce()
    assert world.cache.stats().mapped == 0
    world.check_found(IDS)
    world.cache.tiers.close()


def test_waits_for_a_tier_that_hangs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "CLOSING", 0.05)
    stubborn, world, _ = hanging()
    began = time.monotonic()
    assert not world.cache.tiers.abandon(0.05)
    assert not world.cache.tiers.quiesce(0.05)
    world.cache.forget()
    assert not world.cache.tiers.close(0.05)
    assert time.monotonic() - began < 30  # the load hangs for longer
    stubborn.may_load.set()


def test_frames_that_a_load_still_writes_at_the_close_come_back_when_it_has_ended() -> None:
    stubborn, world, _ = hanging()
    assert not world.cache.tiers.close(0.05)
    other = list(range(200, 241))
    world.run(other)
    assert world.cache.stats().mapped == PAGES
    assert world.cache.fetch(IDS).asked == 0
    stubborn.may_load.set()
    until = time.monotonic() + 20
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
    assert world.cache.tiers.quiesce(20)
    assert (fetch.tokens, world.check_found(IDS)) == (0, 0)
    world.cache.tiers.close()


EXITS = """
import time
from pagedkv.tiers import HostTier
from tests.tiers.world import IDS, evicted
class Hangs(HostTier):
    def _load(self, moves): time.sleep(60)
evicted(Hangs("1MiB")).cache.fetch(IDS, timeout=0).wait()
print("ends", flush=True)
"""


def test_a_load_that_hangs_does_not_keep_the_process() -> None:
    run = subprocess.Popen([sys.executable, "-W", "ignore", "-c", EXITS], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "ends\n"
    assert run.wait(30) == 0


# --- interrupts -------------------------------------------------------------------------------------------------------


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
    assert world.cache.tiers.quiesce(20)
    assert world.cache.stats().mapped == 0


def test_frames_of_a_fetch_that_was_interrupted_early_come_back_without_a_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    world = evicted(HostTier("1MiB"))
    gc.disable()
    try:
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(AddressSpace, "pages_in", interrupt)  # the first thing after the plan
            world.cache.fetch(IDS)
        world.cache.recover()
        assert (world.cache.stats().mapped, world.cache.stats().spaces) == (0, 0)
    finally:
        gc.enable()
    world.cache.tiers.close()


def test_pages_whose_store_was_interrupted_are_stored_when_they_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> list[int]:
        raise KeyboardInterrupt

    host = HostTier("1MiB")
    world = World(PagedKVCache(SPEC, model="m", num_frames=16, tiers=[host]))
    with monkeypatch.context() as patch:
        patch.setattr(HostTier, "_take_slots", interrupt)
        with pytest.raises(KeyboardInterrupt):
            world.run(IDS)
    world.cache.evict(16)
    world.run(IDS)
    assert world.cache.tiers.flush(20)
    assert host.stats().pages == PAGES
    world.cache.tiers.close()


def life(world: World, hold: bool) -> None:
    """Fetch, open, compute another prompt, and store it."""
    fetch = world.cache.fetch(IDS, hold=hold)
    fetch.wait(20)
    world.check_found(IDS)
    fetch.cancel()
    world.run(IDS[:9] + [7] * 5)
    world.cache.tiers.flush(20)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_an_interrupt_leaves_a_cache_that_goes_on(seed: int, hold: bool) -> None:
    world, draw = evicted(HostTier("1MiB")), random.Random(seed)
    total = count_instructions(lambda: life(world, hold))
    for at in [draw.randrange(1, total) for _ in range(6)]:
        world.cache.tiers.close()
        world = evicted(HostTier("1MiB"))
        with contextlib.suppress(KeyboardInterrupt):
            Interrupter(at).run(partial(life, world, hold))
        deadline = time.monotonic() + 20
        while world.cache.tiers.num_pending or world.cache.tiers.num_fetches:
            world.cache.tiers.pump(0.001)
            assert time.monotonic() < deadline
        world.cache.tiers.release_holds()  # their owner was interrupted, and has lost them
        world.cache.recover()
        world.cache.check()
        assert world.cache.stats().mapped == 0
        life(world, hold)
        assert world.cache.stats().mapped == 0
    world.cache.tiers.close()


# --- fetches and quotas -----------------------------------------------------------------------------------------------


def test_prompts_with_one_prefix_load_it_once() -> None:
    host = Stubborn("1MiB")
    world = evicted(host, num_frames=64)
    prompts = [IDS, IDS, [*IDS[:40], 7, 7, 7, 7, 7], IDS[:21]]
    fetches = [world.cache.fetch(ids) for ids in prompts]
    assert world.cache.stats().mapped == PAGES
    host.may_load.set()
    assert all(fetch.wait(20) for fetch in fetches)
    assert [fetch.tokens for fetch in fetches] == [fetch.asked for fetch in fetches] == [40, 40, 40, 20]
    assert host.stats().loaded == PAGES
    assert world.check_found(IDS) == 40
    assert world.cache.stats().mapped == 0
    host.may_load.clear()
    first, second = (world.cache.fetch(IDS) for _ in range(2)) if world.cache.evict(64) else (None, None)
    assert first is not None
    assert second is not None
    second.cancel()  # it has no frames, and the first goes on
    assert second.done
    assert not first.done
    host.may_load.set()
    assert first.wait(20)
    assert first.tokens == 40
    world.cache.tiers.close()


def test_a_prompt_that_no_tier_knows_is_hashed_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    host = HostTier("1MiB")
    world = World(PagedKVCache(SPEC, num_frames=16, tiers=[host]))
    look = HostTier.lookup
    monkeypatch.setattr(HostTier, "lookup", lambda self, keys: asked.append(len(keys)) or look(self, keys))
    assert world.cache.fetch(list(range(20_000))).done
    assert asked == [64]
    world.cache.tiers.close()


def test_a_resize_that_fails_drops_no_page_and_one_that_succeeds_moves_the_quotas() -> None:
    host = HostTier(160 * SPEC.frame_bytes, limit=SPEC.frame_bytes * 2000)
    world = World(PagedKVCache(SPEC, num_frames=400, tiers=[host]))
    world.cache.set_quota(b"a", hard=100)
    for turn in range(2):
        world.run([turn] * 161)
    waiting = len(world.cache.tiers._levels[0].backlog)
    assert waiting > 0
    with pytest.raises(InvalidRequest):
        world.cache.resize(2**30)
    assert len(world.cache.tiers._levels[0].backlog) == waiting
    world.cache.resize(800)
    assert world.cache.tiers.flush(20)
    assert host.stats().stored == 80
    assert host._slots.stats().tenants[b"a"].hard == 160 // 8
    world.cache.tiers.close()


def test_a_small_tier_keeps_what_was_used_last_and_a_tenant_keeps_within_its_share() -> None:
    tier = HostTier(20 * SPEC.frame_bytes)
    cache = PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier])
    cache.set_quota(b"small", hard=4)  # a quarter of the pool, so a quarter of the tier
    world = World(cache)
    for turn in range(6):
        world.run(list(range(100 * turn, 100 * turn + 13)), b"small")
        assert cache.tiers.flush(20)
    used = tier._slots.stats().tenants[tier._charged(b"small")].used
    assert 1 <= used <= 5
    cache.tiers.close()


def test_the_first_quota_of_a_tenant_charges_what_it_has_stored_and_keeps_the_last_used(tmp_path: Path) -> None:
    def begun(kind: str) -> tuple[HostTier | DiskTier, World]:
        tier = HostTier(40 * SPEC.frame_bytes) if kind == "host" else DiskTier(tmp_path, 40 * (4096 + 128))
        return tier, World(PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier]))

    digest = hashlib.blake2b(b"acme", digest_size=16).digest()  # no tenant is another one whose digest is its name
    for kind in ("host", "disk"):
        tier, world = begun(kind)
        prompts = [(list(range(at, at + 37)), tenant) for at, tenant in ((0, b"acme"), (100, b"acme"), (200, digest))]
        for ids, tenant in prompts:
            world.run(ids, tenant)
            assert world.cache.tiers.flush(20)
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
            assert world.cache.fetch(ids, tenant=tenant).wait(20)
            found = world.check_found(ids, tenant)
        assert found == 36
        world.cache.tiers.close()


def test_what_came_back_is_stored_and_what_came_once_is_not() -> None:
    tier = HostTier("1MiB")
    world = World(PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier], write_back=UsedAgain()))
    world.run(IDS)
    assert world.cache.tiers.flush(20)
    assert tier.stats().stored == 0
    world.cache.evict(16)
    world.run(IDS)
    assert world.cache.tiers.flush(20)
    assert 1 <= tier.stats().stored <= PAGES  # some are forgotten: a small pool remembers few, see index.remember
    world.cache.tiers.close()
