"""Runs of bytes: copied as they are, and summed on the way, with and without the extension.

For copies that have time the threads of a team copy, where they leave no CPU to the copy's own thread. That thread
sleeps for a quarter of its time at least. A team has copied the bytes that arrive earlier.
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

from pagedkv import paged_attention
from pagedkv.kernels import cpu
from pagedkv.kernels.linear import linear
from pagedkv.tiers import pool_view
from tests.cases import Case

LONG = 256 << 10
"""Runs of so many bytes go past the caches, and so many are copied at a time."""
BLOCK = 1024
"""Bytes after which xxh3 scrambles its sums."""
EDGES = [1, 240, 241, BLOCK - 63, BLOCK, BLOCK + 1, BLOCK + 65, LONG - 1, LONG, LONG + 1, LONG + 63, 3 * LONG + 64]


@pytest.fixture(params=[True, False], ids=["extension", "python"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param and cpu.missing():
        pytest.skip(cpu.missing()[0])
    if not request.param:
        monkeypatch.setattr(cpu, "missing", lambda: ["not here"])


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("is_summed", [True, False])
@pytest.mark.parametrize("beyond", [0, 1], ids=["aligned", "odd"])
@pytest.mark.parametrize("size", EDGES)
def test_runs_arrive_with_their_sums_and_nothing_beside_them_changes(size: int, beyond: int, is_summed: bool) -> None:
    """The sums are those that the library computes of the whole run."""
    stride = (size + 2 * 64) // 64 * 64
    source = np.random.default_rng(size).integers(1, 256, (9, stride), np.uint8)
    target = np.zeros((5 * stride + 64,), np.uint8)
    target = target[-target.ctypes.data % 64 :][: 5 * stride].reshape(5, stride)  # begins at a line
    rows, places = np.array([7, 0, 3]), np.array([4, 1, 2])
    to, start = target.ctypes.data + places * stride + beyond, source.ctypes.data + rows * stride + 3
    sums = pool_view._copy_runs(to, start, size, is_summed=is_summed)
    copied, runs = target[places, beyond : beyond + size], source[rows, 3 : 3 + size]
    assert (copied == runs).all()
    assert sums == ([xxhash.xxh3_128_digest(run.tobytes()) for run in runs] if is_summed else [])
    target[places, beyond : beyond + size] = 0
    assert not target.any()


SIZE = 2 * LONG + 65
RUNS = 5
needs_team = pytest.mark.skipif(
    bool(cpu.missing()) or sys.platform != "linux", reason="the extension copies, and the test pins threads"
)
SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Of a copy, and of the next one if a busy machine slept through its first fifth."""


class Copying:
    """A copy of five runs by a thread that may run on one CPU."""

    def __init__(self, seconds: float) -> None:
        self.source = np.random.default_rng(7).integers(1, 256, (RUNS, SIZE), np.uint8)
        self.target = np.zeros((RUNS, SIZE + 64), np.uint8)
        self.seconds, self.began, self.has_time = seconds, time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._copy)
        self._thread.start()

    def _copy(self) -> None:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # of this thread
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
        self._thread.join()
        assert (self.target[:, :SIZE] == self.source).all()
        assert not self.target[:, SIZE:].any()
        assert self.sums == [xxhash.xxh3_128_digest(run.tobytes()) for run in self.source]


def attention() -> Callable[[], Any]:
    built = Case(q_lens=(1,) * 8, kv_lens=(4000,) * 8, heads=(2, 2)).build()
    return lambda: paged_attention(built.q, built.layer, built.batch, backend="cpu", **built.options)


def linear_operation() -> Callable[[], Any]:
    x, weights = torch.randn(2, 512), torch.randn(2048, 512)
    return lambda: linear(x, weights, backend="cpu")


@needs_team
@pytest.mark.parametrize(("team", "num_threads"), [(attention, "1"), (linear_operation, "2")])
def test_a_team_copies_while_the_thread_of_the_copy_sleeps(
    monkeypatch: pytest.MonkeyPatch, team: Callable[[], Callable[[], Any]], num_threads: str
) -> None:
    """The team begins at once, and copies the last run after half of the time."""
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", num_threads)
    compute = team()
    expected = compute()

    def team_copies(seconds: float) -> bool:
        copying, result = Copying(seconds), expected
        while copying.is_asleep and not copying.has_begun():
            result = compute()
        has_begun = copying.has_begun() and copying.is_asleep
        while copying.is_alive:
            result = compute()
            is_last = has_begun and bool(copying.target[-1].any())
            assert not is_last or time.monotonic() > copying.began + 0.5 * seconds
        copying.check()
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        return has_begun

    assert any(map(team_copies, SECONDS))


@needs_team
def test_a_copy_that_no_team_comes_for_is_made_after_a_quarter_of_its_time() -> None:
    copying = Copying(SECONDS[0])
    copying.check()
    assert copying.took >= SECONDS[0] / 4


FORK = """
import os, signal, time
from tests.tiers.test_pool_view import SECONDS, Copying, attention
compute = attention()
for seconds in SECONDS[1:]:
    copying = Copying(seconds)
    copying.has_time.wait(300)
    time.sleep(0.05 * seconds)
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


@needs_team
@pytest.mark.slow
def test_a_child_process_copies_nothing_for_its_parent() -> None:
    """The thread of the copy is not in the child: its memory may hold anything."""
    environment = os.environ | {"PAGEDKV_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", FORK]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=600)
    assert result.returncode == 0
    assert set(result.stdout.splitlines()) == {"the child ended 0", "beside an offer"}
