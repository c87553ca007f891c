"""Settings of every test: argument checks on, one thread a worker, equal random numbers in each run.

Tests marked `strict` check the invariants after each commit, tests marked `many_steps` never.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

os.environ.setdefault("PAGEDKV_DEBUG", "1")
os.environ.setdefault("PAGEDKV_BACKGROUND", "0")  # tests of what is compiled compile it themselves
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

with suppress(ModuleNotFoundError):  # environments of hosts lack it
    from hypothesis import HealthCheck, settings

    # On a busy machine an example may take seconds, and so may the making of examples.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


@pytest.fixture(autouse=True)
def _debug_level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for marker, level in (("strict", "3"), ("many_steps", "1")):
        if request.node.get_closest_marker(marker):
            monkeypatch.setenv("PAGEDKV_DEBUG", level)


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C reach child processes, even if the tests run as a job of a shell that ignores it for its jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Seed torch: a test of an error bound on random numbers passes in every run, or fails in every run."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    """Hide from the garbage collector all objects that are older than this file's tests.

    A worker has a million objects of torch and of transformers: `gc.collect()` in a test would look at each of them,
    for half a second.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # the interpreter's end frees all objects: else libraries print that theirs leak
