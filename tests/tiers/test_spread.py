"""Copies that have time: the threads of a team copy for them, where they leave no CPU to the copy's own thread.

That thread sleeps for half of its time at least. A team has copied all that arrives before.
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
from pagedkv.tiers import host, pool_view
from pagedkv.tiers.host import HostTier
from pagedkv.tiers.pool_view import copy_runs
from tests.cases import Case
from tests.tiers.world import IDS, SPEC, World

pytestmark = [
    pytest.mark.skipif(bool(cpu.missing()), reason="the extension copies"),
    pytest.mark.skipif(sys.platform != "linux", reason="pins threads"),
]

PIECE = 256 << 10
SIZE = 2 * PIECE + 65
RUNS = 5
LONG = 2.0
SHORT = 0.3
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
        self.sums = copy_runs(to, start, SIZE, is_summed=True, seconds=self.seconds)
        self.took = time.monotonic() - self.began

    @property
    def is_asleep(self) -> bool:
        return time.monotonic() < self.began + 0.4 * self.seconds

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


def attention() -> Callable[[], Any]:
    built = Case(q_lens=(1,) * 8, kv_lens=(300,) * 8, heads=(2, 2)).build()
    return lambda: paged_attention(built.q, built.layer, built.batch, backend="cpu", **built.options)


def linear_operation() -> Callable[[], Any]:
    x, weights = torch.randn(2, 512), torch.randn(1024, 512)
    return lambda: linear(x, weights, backend="cpu")


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "1")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("team", [attention, linear_operation])
def test_a_team_copies_while_the_thread_of_the_copy_sleeps(team: Callable[[], Callable[[], Any]]) -> None:
    compute = team()
    expected = compute()
    for _ in range(5):  # a machine that is busy may sleep through all of the time
        copying = Copying(LONG)
        while copying.is_asleep and not copying.has_begun():
            result = compute()
        has_begun = copying.has_begun() and copying.is_asleep
        while copying.is_alive:
            result = compute()
        copying.check()
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        if has_begun:
            return
    raise AssertionError("no team copied")


def test_a_copy_that_no_team_comes_for_is_made_after_half_of_its_time() -> None:
    copying = Copying(SHORT)
    copying.check()
    assert copying.took >= SHORT / 2


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_team_that_leaves_a_cpu_idle_does_not_copy() -> None:
    compute, copying = attention(), Copying(1.0, num_cpus=2)
    while copying.is_asleep:
        compute()
        assert not copying.has_begun() or not copying.is_asleep
    copying.check()


def test_a_copy_beside_another_one_is_made_at_once() -> None:
    first = Copying(LONG)
    assert first.has_time.wait(20)
    time.sleep(0.1 * LONG)
    second = Copying(60.0)
    second.check()
    assert second.took < 30
    first.check()


def test_copies_without_time_are_made_at_once() -> None:
    copying = Copying(0.0)
    copying.check()


FORK = """
import os, signal, time
from tests.tiers.test_spread import Copying, attention
compute, copying = attention(), Copying(2.0)
copying.has_time.wait(20)
time.sleep(0.2)
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    compute()
    assert not copying.has_begun(), "the child copied for its parent"
    own = Copying(0.2)
    own.check()
    os._exit(0)
print("the child ended", os.waitpid(pid, 0)[1])
copying.check()
"""


def test_a_child_process_copies_nothing_for_its_parent() -> None:
    """The thread of the copy is not in the child: its memory may hold anything."""
    environment = os.environ | {"PAGEDKV_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(
        [sys.executable, "-c", FORK], env=environment, stdout=subprocess.PIPE, text=True, timeout=240
    )
    assert (result.stdout.strip(), result.returncode) == ("the child ended 0", 0)


@pytest.mark.parametrize(
    ("limit", "speed"),
    [(None, None), ("2GB", 2e9), ("20MB", host.LEAST_SPEED)],
)
def test_a_limit_gives_a_copy_time(monkeypatch: pytest.MonkeyPatch, limit: str | None, speed: float | None) -> None:
    """A copy takes no longer than at LEAST_SPEED: an owner that cancels it or closes the tier waits for it."""
    given = list[tuple[int, float]]()

    def copy(targets: Any, sources: Any, size: int, *, is_summed: bool, seconds: float) -> list[bytes]:
        given.append((len(targets) * size, seconds))
        return copy_runs(targets, sources, size, is_summed=is_summed)

    monkeypatch.setattr(pool_view, "copy_runs", copy)
    world = World(PagedKVCache(SPEC, num_frames=16, tiers=[HostTier("1MiB", limit=limit)]))
    world.run(IDS)
    assert world.cache.tiers.flush(20)
    assert given
    for num_bytes, seconds in given:
        assert seconds == pytest.approx(0.0 if speed is None else host.OF_LIMIT * num_bytes / speed)
    world.cache.tiers.close()
