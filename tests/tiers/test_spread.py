"""Copies that have time: the threads of a team copy for them, where they leave no CPU to the copy's own thread.

That thread sleeps for a quarter of its time at least. A team has copied the bytes that arrive earlier.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from pagedkv import PagedKVCache, paged_attention
from pagedkv.kernels import cpu
from pagedkv.kernels.linear import linear
from pagedkv.tiers import host, pool_view, slots
from pagedkv.tiers.host import HostTier
from tests.cases import Case
from tests.tiers.world import IDS, PAGES, SPEC, World

pytestmark = [
    pytest.mark.skipif(bool(cpu.missing()), reason="the extension copies"),
    pytest.mark.skipif(sys.platform != "linux", reason="pins threads"),
]

PIECE = 256 << 10
SIZE = 2 * PIECE + 65
RUNS = 5
LONG = 2.0
"""Seconds of a copy."""


class Copying:
    """A copy of five runs by a thread that may run on `num_cpus` CPUs."""

    def __init__(self, seconds: float, num_cpus: int = 1) -> None:
        self.source = np.random.default_rng(7).integers(1, 256, (RUNS, SIZE), np.uint8)
        self.target = np.zeros((RUNS, SIZE + 64), np.uint8)
        self.seconds, self.began, self.has_time = seconds, time.monotonic(), threading.Event()
        self._cpus = sorted(os.sched_getaffinity(0))[:num_cpus]
        self._thread = threading.Thread(target=self._copy)
        self._thread.start()

    def _copy(self) -> None:
        os.sched_setaffinity(0, self._cpus)  # of this thread
        self.began = time.monotonic()
        rows = np.arange(RUNS)
        to, start = self.target.ctypes.data + rows * (SIZE + 64), self.source.ctypes.data + rows * SIZE
        self.has_time.set()
        self.sums = pool_view._copy_runs(to, start, SIZE, is_summed=True, seconds=self.seconds)
        self.took = time.monotonic() - self.began

    @property
    def is_asleep(self) -> bool:
        return time.monotonic() < self.began + 0.2 * self.seconds

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def has_begun(self) -> bool:
        return bool(self.target.any())

    def check(self) -> None:
        """Wait for the copy, and look at all of it."""
        self._thread.join(60)
        assert (self.target[:, :SIZE] == self.source).all()
        assert not self.target[:, SIZE:].any()
        assert self.sums == [xxhash.xxh3_128_digest(run.tobytes()) for run in self.source]


def attention(num_tokens: int = 4000) -> Callable[[], Any]:
    built = Case(q_lens=(1,) * 8, kv_lens=(num_tokens,) * 8, heads=(2, 2)).build()
    return lambda: paged_attention(built.q, built.layer, built.batch, backend="cpu", **built.options)


def linear_operation() -> Callable[[], Any]:
    x, weights = torch.randn(2, 512), torch.randn(2048, 512)
    return lambda: linear(x, weights, backend="cpu")


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "1")


@pytest.mark.parametrize("num_threads", ["1", "2"])
@pytest.mark.parametrize("team", [attention, linear_operation])
def test_a_team_copies_while_the_thread_of_the_copy_sleeps(
    monkeypatch: pytest.MonkeyPatch, team: Callable[[], Callable[[], Any]], num_threads: str
) -> None:
    """The team begins at once, and copies the last run after half of the time."""
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", num_threads)
    compute = team()
    expected = compute()

    def team_copies() -> bool:
        copying = Copying(LONG)
        while copying.is_asleep and not copying.has_begun():
            result = compute()
        has_begun = copying.has_begun() and copying.is_asleep
        while copying.is_alive:
            result = compute()
            is_last = has_begun and bool(copying.target[-1].any())
            assert not is_last or time.monotonic() > copying.began + 0.5 * LONG
        copying.check()
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        return has_begun

    assert any(team_copies() for _ in range(5))  # a machine that is busy may sleep through all of the time


def test_a_copy_that_no_team_comes_for_is_made_after_a_quarter_of_its_time() -> None:
    copying = Copying(8.0)
    copying.check()
    assert 2 <= copying.took < 7


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("num_cpus", "num_tokens"), [(2, 4000), (1, 20)], ids=["a CPU is idle", "little work"])
def test_a_team_does_not_copy(num_cpus: int, num_tokens: int) -> None:
    """A thread that copies beside little work would make the others wait."""
    if len(os.sched_getaffinity(0)) < num_cpus:
        pytest.skip("needs two CPUs")
    compute, copying = attention(num_tokens), Copying(1.0, num_cpus)
    while copying.is_asleep:
        compute()
        assert not copying.has_begun() or not copying.is_asleep
    copying.check()


@pytest.mark.usefixtures("one_thread")
def test_a_copy_beside_another_one_is_made_at_once() -> None:
    def is_made_at_once() -> bool:
        first = Copying(LONG)
        while first.is_asleep and not first.has_begun():
            compute()  # it is offered now
        second = Copying(LONG)
        second.check()
        was_offered = first.is_alive
        while first.is_alive:
            compute()
        first.check()
        return was_offered and second.took < LONG / 4

    compute = attention()
    assert any(is_made_at_once() for _ in range(5))


def test_copies_without_time_are_made_at_once() -> None:
    copying = Copying(0.0)
    copying.check()
    assert copying.took < 20


FORK = """
import os, signal, time
from tests.tiers.test_spread import Copying, attention
compute = attention()
for _ in range(5):
    copying = Copying(4.0)
    copying.has_time.wait(20)
    time.sleep(0.2)
    before = copying.target.copy()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        compute()
        assert (copying.target == before).all(), "the child copied for its parent"
        Copying(0.2).check()
        os._exit(0)
    while copying.is_asleep and not copying.has_begun():
        compute()
    was_offered = copying.is_asleep and not before.any()
    print("the child ended", os.waitpid(pid, 0)[1])
    while copying.is_alive:
        compute()
    copying.check()
    if was_offered:
        print("beside an offer")
        break
"""


def test_a_child_process_copies_nothing_for_its_parent() -> None:
    """The thread of the copy is not in the child: its memory may hold anything."""
    environment = os.environ | {"PAGEDKV_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", FORK]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=240)
    assert result.returncode == 0
    assert set(result.stdout.splitlines()) == {"the child ended 0", "beside an offer"}


@pytest.mark.parametrize(
    ("limit", "speed", "part"),
    [
        (None, None, slots.PART),
        ("20MB", host.LEAST_SPEED, slots.PART),
        ("2GB", 2e9, 2_000_000_000 // host.PARTS_PER_SECOND),
        ("20GB", 20e9, host.MOST_PART),
    ],
)
def test_a_limit_gives_a_copy_time(
    monkeypatch: pytest.MonkeyPatch, limit: str | None, speed: float | None, part: int
) -> None:
    """A copy takes no longer than at LEAST_SPEED: an owner that cancels it or closes the tier waits for it."""
    given, original = list[tuple[int, float]](), pool_view._copy_runs

    def copy(targets: Any, sources: Any, size: int, *, is_summed: bool, seconds: float) -> list[bytes]:
        given.append((len(targets) * size, seconds))
        return original(targets, sources, size, is_summed=is_summed)

    monkeypatch.setattr(pool_view, "_copy_runs", copy)
    tier = HostTier("1MiB", limit=limit)
    world = World(PagedKVCache(SPEC, num_frames=16, tiers=[tier]))
    world.run(IDS)
    assert world.cache.tiers.flush(20)
    assert given
    world.run([7] * 61)  # evicts the prompt
    assert world.cache.tiers.flush(20)
    num_stores = len(given)
    assert world.cache.fetch(IDS).wait(20)
    assert len(given) > num_stores
    for num_bytes, seconds in given:
        assert seconds == pytest.approx(0.0 if speed is None else host.OF_LIMIT * num_bytes / speed)
    assert tier._part() == part
    world.cache.tiers.close()


def test_parts_have_about_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[int]()
    monkeypatch.setattr(HostTier, "_part", lambda self: 9 * SPEC.frame_bytes)
    monkeypatch.setattr(HostTier, "_store", lambda self, moves: given.append(len(moves)))
    world = World(PagedKVCache(SPEC, num_frames=16, tiers=[HostTier("1MiB")]))
    world.run(IDS)
    assert world.cache.tiers.flush(20)
    assert given == [PAGES // 2] * 2
    world.cache.tiers.close()
