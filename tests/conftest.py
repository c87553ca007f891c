"""What every test runs under: argument checks on, one thread a worker, the same draws each time.

`strict` tests prove the invariants after each commit, `many_steps` ones never.
"""

from __future__ import annotations

import os
import sys

import pytest

os.environ.setdefault("PAGEDKV_DEBUG", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported


@pytest.fixture(autouse=True)
def _level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for marker, level in (("strict", "3"), ("many_steps", "1")):
        if request.node.get_closest_marker(marker):
            monkeypatch.setenv("PAGEDKV_DEBUG", level)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """A bound on an error of random numbers holds for these or fails every time."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
