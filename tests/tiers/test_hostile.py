"""Tiers that hang, fail, lie or lose power: each fault is a counted miss, no frame is lost, nothing waits for it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from pagedkv import PagedKVCache
from pagedkv.errors import InvalidRequest
from pagedkv.tiers import DiskTier, HostTier, PoolView, UsedAgain, disk
from pagedkv.tiers.checksum import checksum
from pagedkv.tiers.pool_view import Numbers
from pagedkv.tiers.slots import Move
from tests.interrupts import Interrupter, count_instructions
from tests.tiers.world import IDS, PAGES, SPEC, World, evicted


class Stubborn(HostTier):
    """A host tier whose loads wait for `may_load`, or raise `fault`. is_loading: set when one waits."""

    def __init__(self, size: str, fault: Exception | None = None) -> None:
        super().__init__(size)
        self.may_load, self.fault = threading.Event(), fault
        self.is_loading = threading.Event()

    def _load(self, moves: Sequence[Move]) -> None:
        self.is_loading.set()
        self.may_load.wait(30)
        if self.fault:
            raise self.fault
        super()._load(moves)


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


def test_a_load_that_hangs_ends_at_its_deadline_and_its_frames_wait_for_it() -> None:
    tier = Stubborn("1MiB")
    world = evicted(tier, num_frames=24)
    cache = world.cache
    fetch = cache.fetch(IDS, timeout=1)
    assert not fetch.wait(0.02)
    assert fetch.wait(20)  # `may_load` is set after 30
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


def test_a_disk_that_is_full_costs_only_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    tier = DiskTier(tmp_path, "1MiB")
    cache = PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier])
    world = World(cache)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        world.run(IDS)
        assert cache.tiers.flush(20)
    assert (tier.stats().failed, tier.stats().stored, tier.stats().pages) == (PAGES, 0, 0)
    world.run(IDS[:9] + [7] * 30)
    assert cache.tiers.flush(20)
    assert tier.stats().stored > 0
    cache.tiers.close()


def test_a_small_tier_keeps_what_was_used_last_and_a_tenant_keeps_within_its_share() -> None:
    tier = HostTier(20 * SPEC.frame_bytes)
    cache = PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier])
    cache.set_quota(b"small", hard=4)  # a quarter of the pool, so a quarter of the tier
    world = World(cache)
    for turn in range(6):
        world.run(list(range(100 * turn, 100 * turn + 13)), b"small")
        assert cache.tiers.flush(20)
    used = tier._slots.usage(tier._charged(b"small")).used
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
            assert tier._slots.usage(tier._charged(b"acme")).used == 10
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


# --- the folder of a disk tier ----------------------------------------------------------------------------------------


def reopened(folder: Path, key: bytes | None = None, model: str = "m", rank: int = 0) -> tuple[int, int]:
    """Return (tokens of IDS fetched from the folder, loads that were corrupt)."""
    tier = DiskTier(folder, "1MiB", key=key)
    world = World(PagedKVCache(SPEC, model=model, rank=rank, num_frames=16, tiers=[tier]))
    fetch = world.cache.fetch(IDS)
    assert fetch.wait(20)
    assert world.check_found(IDS) == fetch.tokens
    world.cache.tiers.close()
    return fetch.tokens, tier.stats().corrupt


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    evicted(DiskTier(tmp_path, "1MiB")).cache.tiers.close()
    assert reopened(tmp_path) == (40, 0)
    return tmp_path


def test_pages_of_another_model_rank_or_size_are_not_found(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for options in ({"model": "other"}, {"rank": 1}, {"key": bytes(16)}):
        with caplog.at_level(logging.WARNING, logger="pagedkv"):
            assert reopened(folder, **options) == (0, 0)  # type: ignore[arg-type]
        assert "held pages of another cache" in caplog.text
        caplog.clear()
        evicted(DiskTier(folder, "1MiB")).cache.tiers.close()
    assert reopened(folder) == (40, 0)


def test_pages_that_were_written_with_another_key_are_misses(tmp_path: Path) -> None:
    evicted(DiskTier(tmp_path, "1MiB", key=b"k" * 16)).cache.tiers.close()
    assert reopened(tmp_path, key=b"K" * 16) == (0, PAGES)
    assert reopened(tmp_path, key=b"k" * 16) == (0, 0)  # a page that does not fit is dropped


def test_any_damage_to_the_files_is_a_miss(folder: Path) -> None:
    draw = random.Random(1)
    whole = {path: path.read_bytes() for path in folder.glob("pagedkv-tier.*") if path.suffix != ".lock"}
    for _ in range(60):
        path = draw.choice(sorted(whole))
        content = bytearray(whole[path])
        kind = draw.randrange(4)
        if kind == 0:
            content = content[: draw.randrange(len(content))]
        elif kind == 1:
            at = draw.randrange(len(content))
            content[at : at + 64] = draw.randbytes(64)
        elif kind == 2:
            content[draw.randrange(min(len(content), 16 * 4096))] ^= 1 << draw.randrange(8)
        else:
            content = bytearray(len(content))
        path.write_bytes(content)
        reopened(folder)
        for other, old in whole.items():
            other.write_bytes(old)
    assert reopened(folder) == (40, 0)


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_seal_with_the_last_serial_costs_its_own_page_alone(is_planted: bool, folder: Path) -> None:
    path = folder / "pagedkv-tier.seals"
    seals = np.fromfile(path, disk.SEAL)
    seals["serial"][-1] = 2**64 - 1
    if is_planted:
        seals["check"][-1] = xxhash.xxh3_64_intdigest(seals[-1].tobytes()[: disk.SEAL.fields["check"][1]])
    seals.tofile(path)
    tier = DiskTier(folder, "1MiB")
    world = World(PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier]))
    assert tier.stats().pages == PAGES
    world.run([7, *IDS])
    assert world.cache.tiers.flush(20)
    assert (tier.stats().stored, tier.stats().failed) == (PAGES, 0)
    world.cache.tiers.close()


CUT = """
import os, sys
from tests.tiers.world import IDS, evicted
from pagedkv.tiers import DiskTier
world = evicted(DiskTier(sys.argv[1], "64MiB"))
for end in ("seals", "bytes", "json"):
    os.truncate(f"{sys.argv[1]}/pagedkv-tier.{end}", 0)
fetch = world.cache.fetch(IDS)
assert fetch.wait(20) and world.check_found(IDS) == fetch.tokens == 0
world.run([7, *IDS])
assert world.cache.tiers.flush(20)
world.cache.evict(16)
assert world.cache.fetch([7, *IDS]).wait(20) and world.check_found([7, *IDS]) == 40
world.cache.tiers.close()
"""


def test_files_that_are_cut_short_while_they_are_in_use_cost_their_pages_and_no_process(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", CUT, tmp_path], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert reopened(tmp_path) == (0, 0)


def test_seals_that_cannot_be_written_hide_all_pages_from_later_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    tier = DiskTier(folder, "1MiB")
    world = World(PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails)
        world.cache.forget()
    assert tier.stats().pages == 0
    world.cache.tiers.close()
    assert reopened(folder) == (0, 0)


def test_a_second_process_and_a_special_file_are_refused(folder: Path) -> None:
    tier = DiskTier(folder, "1MiB")
    first = PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier])
    with pytest.raises(BlockingIOError, match="another process uses"):
        PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(folder, "1MiB")])
    with pytest.raises(InvalidRequest, match="serves a cache already"):
        PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier])
    first.tiers.close()
    (folder / "pagedkv-tier.bytes").unlink()
    os.mkfifo(folder / "pagedkv-tier.bytes")
    with pytest.raises(OSError, match="not a regular file"):
        PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(folder, "1MiB")])


CHILD = """
import sys
from pagedkv import PagedKVCache
from pagedkv.tiers import DiskTier
from tests.tiers.world import SPEC, World
world = World(PagedKVCache(SPEC, model='m', num_frames=64, tiers=[DiskTier(sys.argv[1], 100 * 4224)]))
world.run(list(range(41)))
world.cache.tiers.flush()
print("begun", flush=True)
turn = 0
while True:
    world.run([turn % 40] + list(range(turn, turn + 40)))
    turn = (turn + 7) % 2100  # the parent looks for all of these, and a fast machine computes more
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 15))])
def test_a_process_that_is_killed_leaves_no_torn_page(seed: int, tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "begun\n"
    time.sleep(random.Random(seed).uniform(0.2, 1.0))
    run.send_signal(signal.SIGKILL)
    run.wait()
    tier = DiskTier(tmp_path, 100 * 4224)
    world = World(PagedKVCache(SPEC, model="m", num_frames=64, tiers=[tier]))
    assert tier.stats().pages > 0
    found = 0
    first = list(range(41))  # stored before all others, which a busy machine may not come to
    for ids in (first, *([turn % 40, *range(turn, turn + 40)] for turn in range(0, 2100, 7))):
        fetch = world.cache.fetch(ids)
        assert fetch.wait(20)
        found += world.check_found(ids)
    assert found > 0
    assert tier.stats().corrupt == 0
    world.cache.tiers.close()


# --- interrupts -------------------------------------------------------------------------------------------------------


def prepared() -> World:
    return evicted(HostTier("1MiB"), num_frames=16)


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
    world, draw = prepared(), random.Random(seed)
    total = count_instructions(lambda: life(world, hold))
    for at in [draw.randrange(1, total) for _ in range(6)]:
        world.cache.tiers.close()
        world = prepared()
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


@pytest.mark.parametrize("verb", ["flush", "quiesce", "close"])
def test_a_wrong_timeout_is_refused_in_words_and_changes_nothing(verb: str) -> None:
    cache = PagedKVCache(SPEC, num_frames=PAGES, tiers=[HostTier("1MiB")])
    assert cache.tiers is not None
    for timeout in ("x", float("nan"), []):
        with pytest.raises(InvalidRequest, match="timeout"):
            getattr(cache.tiers, verb)(timeout)
    assert cache.tiers.close()
