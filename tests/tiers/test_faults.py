"""Faults of tiers that once cost more than pages: wrong bytes, a frozen step, a process that died or did not end."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv import AddressSpace, PagedKVCache
from pagedkv.errors import ConcurrentUse, InvalidRequest
from pagedkv.tiers import DiskTier, HostTier, Job, Key, Op, PoolView, Result, Tier, UsedAgain, disk, level, slots, tier
from pagedkv.tiers.fetch import Fetch
from pagedkv.tiers.mover import Mover, Task
from tests.tiers.test_hostile import Stubborn
from tests.tiers.world import IDS, PAGES, SPEC, World, evicted

FRAME = SPEC.frame_bytes


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


# --- the interface ----------------------------------------------------------------------------------------------------


def test_five_methods_make_a_tier_and_fewer_are_refused_at_once() -> None:
    world = evicted(Five())
    assert world.cache.fetch(IDS).done
    assert world.check_found(IDS) == 40
    world.cache.forget()
    assert world.cache.fetch(IDS).asked == 0  # though the tier has dropped nothing: the names are others now
    world.cache.tiers.close()
    for wrong in (object(), "host:1MiB"):
        with pytest.raises(InvalidRequest, match="is no tier"):
            PagedKVCache(SPEC, num_frames=16, tiers=[wrong])  # type: ignore[list-item]


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


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: HostTier("1MiB", verify="no"),  # type: ignore[arg-type]
        lambda folder: HostTier("1MiB", limit=0),
        lambda folder: HostTier("1MiB", limit=-1),
        lambda folder: HostTier("1PiB"),
        lambda folder: HostTier("1MiB", policy="nonsense"),
        lambda folder: DiskTier(folder, "1MiB", threads=0),
        lambda folder: DiskTier(folder, "1MiB", threads="2"),
        lambda folder: DiskTier(folder, "1MiB", direct=1),
        lambda folder: DiskTier(None, "1MiB"),  # type: ignore[arg-type]
        lambda folder: DiskTier("a\0b", "1MiB"),
    ],
)
def test_a_wrong_option_is_refused_before_the_first_page(make: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        PagedKVCache(SPEC, model="m", num_frames=16, tiers=[make(tmp_path)])
    for wrong in ({"model": None}, {"model": b"m"}, {"rank": "x"}, {"rank": -1}):
        with pytest.raises(InvalidRequest):
            PagedKVCache(SPEC, num_frames=16, tiers=[HostTier("1MiB")], **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [UsedAgain, object()])
def test_a_write_back_that_cannot_choose_pages_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="write_back"):
        PagedKVCache(SPEC, num_frames=16, tiers=[HostTier("1MiB")], write_back=wrong)


def test_a_cache_without_a_model_has_no_tier_that_other_processes_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no name for its weights"):
        PagedKVCache(SPEC, num_frames=16, tiers=[DiskTier(tmp_path, "1MiB")])


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


# --- interrupts, hangs, exits -----------------------------------------------------------------------------------------


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


def hanging() -> tuple[Stubborn, World, Fetch]:
    """Return a tier whose load hangs until `may_load` is set, its world, and the fetch that waits for the load."""
    stubborn = Stubborn("1MiB")
    world = evicted(stubborn, num_frames=24)
    fetch = world.cache.fetch(IDS)
    assert stubborn.is_loading.wait(20)
    return stubborn, world, fetch


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


def test_waits_for_a_tier_that_hangs_end() -> None:
    stubborn, world, _ = hanging()
    began = time.monotonic()
    assert not world.cache.tiers.abandon(0.05)
    assert not world.cache.tiers.quiesce(0.05)
    world.cache.forget()
    assert not world.cache.tiers.close(0.05)
    assert time.monotonic() - began < 3 * tier.CLOSING < 30  # the load hangs for 30 s
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
    assert disk._slots.usage(disk._charged(b"acme")).hard > 0
    world.run(IDS)
    assert world.cache.tiers.flush(20)
    world.cache.forget()
    assert disk.stats().pages == 0
    world.cache.tiers.close()
    PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(tmp_path, "1MiB")]).tiers.close()


def test_a_close_that_was_interrupted_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> bool:
        raise KeyboardInterrupt

    disk = DiskTier(tmp_path, "1MiB")  # held, as a collected one gives its folder back
    cache = PagedKVCache(SPEC, model="m", num_frames=16, tiers=[disk])
    with monkeypatch.context() as patch:
        patch.setattr(Mover, "close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.tiers.close()
    cache.tiers.close()
    PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(tmp_path, "1MiB")]).tiers.close()


@pytest.mark.parametrize("fails", [(threading.Thread, "start"), (os, "posix_fallocate"), (os, "ftruncate")])
def test_a_tier_that_could_not_begin_leaves_its_folder_to_others(
    fails: tuple[object, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: object) -> None:
        raise OSError(errno.EIO, "no such luck")

    num_open = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(*fails, fault)
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
            may_go_on.wait(20)
        return is_held

    monkeypatch.setattr(slots, "CLOSING", 0.05)
    monkeypatch.setattr(PoolView, "holds", slow)
    disk = DiskTier(tmp_path, "1MiB", threads=1)
    world = World(PagedKVCache(SPEC, model="m", num_frames=16, tiers=[disk]))
    world.run(IDS)
    assert looked.wait(20)
    world.cache.forget()
    may_go_on.set()
    while disk._mover.num_pages:
        time.sleep(0.001)
    assert not disk._seals["serial"].any()  # and a process that is killed now leaves no page of the old weights
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


FULL = """
import resource, sys
from pagedkv import AddressSpace, PagedKVCache
from pagedkv.tiers import DiskTier
from tests.tiers.world import SPEC, World
world = World(PagedKVCache(SPEC, model="m", num_frames=600, tiers=[DiskTier(sys.argv[1], 20000 * (4096 + 128))]))
for turn in range(40):
    world.run([turn, *range(120)])
    world.cache.tiers.flush(20)
print(world.cache.tiers.stats()["disk"].failed > 0)
"""


@pytest.mark.slow
def test_a_full_disk_does_not_end_the_process(tmp_path: Path) -> None:
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path]).returncode:
        pytest.skip("a file system of 4 MiB can be mounted by root only")
    try:
        run = subprocess.run([sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, timeout=300)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert (run.returncode, run.stdout) == (0, "True\n"), run.stderr


def test_the_seals_of_a_disk_tier_have_their_blocks_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(tmp_path / "a", "8MiB")]).tiers.close()
    seals = (tmp_path / "a" / "pagedkv-tier.seals").stat()
    assert 512 * seals.st_blocks >= seals.st_size > 100_000
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(tmp_path / "b", "8MiB")])


@pytest.mark.parametrize("verb", ["commit", "forget"])
def test_a_disk_that_hangs_while_a_seal_is_written_keeps_no_caller(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, may_go_on, write = threading.Event(), threading.Event(), os.pwrite

    def slow(file: int, content: bytes, at: int) -> int:
        if len(content) == disk.SEAL.itemsize:
            hangs.set()
            may_go_on.wait(20)
        return write(file, content, at)

    monkeypatch.setattr(slots, "CLOSING", 0.05)
    monkeypatch.setattr(disk, "CLOSING", 0.05)
    world = World(PagedKVCache(SPEC, model="m", num_frames=24, tiers=[DiskTier(tmp_path, "1MiB")]))
    monkeypatch.setattr(os, "pwrite", slow)
    world.run(IDS)
    assert hangs.wait(20)
    began = time.monotonic()
    if verb == "commit":
        world.run([7, *IDS])
    else:
        world.cache.forget()
    assert time.monotonic() - began < 10
    may_go_on.set()
    assert world.cache.tiers.close()
    again = World(PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(tmp_path, "1MiB")]))
    assert again.cache.fetch([7, *IDS]).asked == (40 if verb == "commit" else 0)
    again.cache.tiers.close()


@pytest.mark.parametrize("closes", [True, False])
def test_a_tier_that_another_thread_closes_or_collects_leaves_its_folder(closes: bool, tmp_path: Path) -> None:
    caches = [PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(tmp_path, "1MiB")])]
    other = threading.Thread(target=lambda: caches.pop().tiers.close() if closes else (caches.clear(), gc.collect()))
    other.start()
    other.join()
    PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(tmp_path, "1MiB")]).tiers.close()


def test_the_facts_of_a_disk_tier_are_not_written_through_a_link(tmp_path: Path) -> None:
    folder, other = tmp_path / "tier", tmp_path / "other"
    folder.mkdir()
    other.write_text("mine")
    (folder / "pagedkv-tier.json.part").symlink_to(other)
    PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(folder, "1MiB")]).tiers.close()
    assert other.read_text() == "mine"


# --- fetches, quotas, limits ------------------------------------------------------------------------------------------


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


def test_a_fetch_that_forget_ends_has_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn, world, fetch = hanging()
    monkeypatch.setattr(slots, "CLOSING", 0.05)  # the seconds that `forget` waits for the load
    world.cache.forget()
    assert fetch.done
    stubborn.may_load.set()
    assert world.cache.tiers.quiesce(20)
    assert (fetch.tokens, world.check_found(IDS)) == (0, 0)
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
    host = HostTier(160 * FRAME, limit=FRAME * 2000)
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
    assert host._slots.usage(b"a").hard == 160 // 8
    world.cache.tiers.close()


def test_a_task_that_is_cancelled_uses_nothing_of_the_limit() -> None:
    mover, ran, cancelled = Mover("test", 1, 1000.0), threading.Event(), threading.Event()
    for is_last in (False, False, False, True):  # 10 s each
        is_cancelled = (lambda: False) if is_last else cancelled.is_set
        run = ran.set if is_last else (lambda: None)
        mover.put(Task(run, 1, 10_000, is_urgent=False, is_cancelled=is_cancelled))
    cancelled.set()
    assert ran.wait(9)  # a task that is not cancelled takes 10 s
    mover.close(1)
