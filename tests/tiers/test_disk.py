"""The folder of a disk tier: damage, a full disk, a process that is killed or hangs, and what another process finds."""

from __future__ import annotations

import errno
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from pagedkv import PagedKVCache
from pagedkv.errors import InvalidRequest
from pagedkv.tiers import DiskTier, PoolView, disk, slots
from tests.tiers.world import IDS, PAGES, SPEC, World, evicted


def reopened(folder: Path, key: bytes | None = None, model: str = "m", rank: int = 0) -> tuple[int, int]:
    """Return (tokens of IDS fetched from the folder, loads that were corrupt)."""
    tier = DiskTier(folder, "1MiB", key=key)
    world = World(PagedKVCache(SPEC, model=model, rank=rank, num_frames=16, tiers=[tier]))
    found = world.fetched(IDS)
    world.cache.tiers.close()
    return found, tier.stats().corrupt


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
    for _ in range(16):
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


def test_files_that_are_cut_short_while_they_are_in_use_cost_their_pages(tmp_path: Path) -> None:
    world = evicted(DiskTier(tmp_path, "64MiB"))
    for end in ("seals", "bytes", "json"):
        os.truncate(tmp_path / f"pagedkv-tier.{end}", 0)
    assert world.fetched(IDS) == 0
    world.store([7, *IDS])
    world.cache.evict(16)
    assert world.fetched([7, *IDS]) == 40
    world.cache.tiers.close()
    assert reopened(tmp_path) == (0, 0)


def test_seals_that_cannot_be_written_hide_all_pages_from_later_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(folder, "1MiB")
    world = World(PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        world.cache.forget()
    assert tier.stats().pages == 0
    world.cache.tiers.close()
    assert reopened(folder) == (0, 0)


def test_a_second_process_and_a_second_cache_are_refused(folder: Path) -> None:
    tier = DiskTier(folder, "1MiB")
    first = PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier])
    with pytest.raises(BlockingIOError, match="another process uses"):
        PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(folder, "1MiB")])
    with pytest.raises(InvalidRequest, match="serves a cache already"):
        PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier])
    first.tiers.close()


CHILD = """
import sys
from pagedkv import PagedKVCache
from pagedkv.tiers import DiskTier
from tests.tiers.world import SPEC, World
world = World(PagedKVCache(SPEC, model='m', num_frames=64, tiers=[DiskTier(sys.argv[1], 100 * 4224)]))
world.run(list(range(41)))
world.cache.tiers.flush()
turn = 0
while True:
    print("goes on", flush=True)
    world.run([turn % 40] + list(range(turn, turn + 40)))
    turn = (turn + 7) % 420  # the parent looks for all of these, and a fast machine computes more
"""


@pytest.mark.many_steps
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 15))])
def test_a_process_that_is_killed_leaves_no_torn_page(seed: int, tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    for _ in range(random.Random(seed).randrange(1, 120)):
        assert run.stdout.readline() == "goes on\n"
    run.send_signal(signal.SIGKILL)
    run.wait()
    tier = DiskTier(tmp_path, 100 * 4224)
    world = World(PagedKVCache(SPEC, model="m", num_frames=64, tiers=[tier]))
    assert tier.stats().pages > 0
    found = 0
    first = list(range(41))  # stored before all others, which a busy machine may not come to
    for ids in (first, *([turn % 40, *range(turn, turn + 40)] for turn in range(0, 420, 7))):
        found += world.fetched(ids)
    assert found > 0
    assert tier.stats().corrupt == 0


def test_a_disk_that_is_full_costs_only_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, "1MiB")
    world = World(PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        world.store(IDS)
    assert (tier.stats().failed, tier.stats().stored, tier.stats().pages) == (PAGES, 0, 0)
    world.store(IDS[:9] + [7] * 30)
    assert tier.stats().stored > 0


@pytest.mark.parametrize("fails", [(threading.Thread, "start"), (os, "posix_fallocate"), (os, "ftruncate")])
def test_a_tier_that_could_not_begin_leaves_its_folder_to_others(
    fails: tuple[object, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(*fails, Mock(side_effect=OSError(errno.EIO, "no such luck")))
        with pytest.raises(OSError, match="no such luck"):
            PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(tmp_path, "1MiB")])
    assert len(os.listdir("/proc/self/fd")) == num_open
    PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(tmp_path, "1MiB")]).tiers.close()


def test_a_page_that_is_written_while_the_tiers_forget_is_not_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, may_go_on, holds = threading.Event(), threading.Event(), PoolView.holds

    def slow(self: PoolView, frame: int, stamp: int) -> bool:
        is_held = holds(self, frame, stamp)
        if threading.current_thread() is not threading.main_thread():
            looked.set()
            may_go_on.wait(300)
        return is_held

    for module in (slots, disk):
        monkeypatch.setattr(module, "CLOSING", 0.05)
    monkeypatch.setattr(PoolView, "holds", slow)
    tier = DiskTier(tmp_path, "1MiB", threads=1)
    world = World(PagedKVCache(SPEC, model="m", num_frames=16, tiers=[tier]))
    world.run(IDS)
    assert looked.wait(300)
    world.cache.forget()
    may_go_on.set()
    while tier._mover.num_pages:
        time.sleep(0.001)
    assert not tier._seals["serial"].any()  # and a process that is killed now leaves no page of the old weights


@pytest.mark.parametrize("verb", ["commit", "forget"])
def test_a_disk_that_hangs_while_a_seal_is_written_keeps_no_caller(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, may_go_on, write, was_let_go = threading.Event(), threading.Event(), os.pwrite, list[bool]()

    def slow(file: int, content: bytes, at: int) -> int:
        if len(content) == disk.SEAL.itemsize:
            hangs.set()
            was_let_go.append(may_go_on.wait(60))  # False: the caller below waited for the disk
        return write(file, content, at)

    monkeypatch.setattr(slots, "CLOSING", 0.05)
    monkeypatch.setattr(disk, "CLOSING", 0.05)
    world = World(PagedKVCache(SPEC, model="m", num_frames=24, tiers=[DiskTier(tmp_path, "1MiB")]))
    monkeypatch.setattr(os, "pwrite", slow)
    world.run(IDS)
    assert hangs.wait(300)
    if verb == "commit":
        world.run([7, *IDS])
    else:
        world.cache.forget()
    may_go_on.set()
    assert world.cache.tiers.close()
    assert all(was_let_go)
    again = World(PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(tmp_path, "1MiB")]))
    assert again.cache.fetch([7, *IDS]).asked == (40 if verb == "commit" else 0)


@pytest.mark.parametrize("closes", [True, False])
def test_a_tier_that_another_thread_closes_or_collects_leaves_its_folder(closes: bool, tmp_path: Path) -> None:
    caches = [PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(tmp_path, "1MiB")])]
    other = threading.Thread(target=lambda: caches.pop().tiers.close() if closes else (caches.clear(), gc.collect()))
    other.start()
    other.join()
    PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(tmp_path, "1MiB")]).tiers.close()
