"""What every test runs under: argument checks on, one thread a worker; `strict` ones prove the invariants after each commit."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("PAGEDKV_DEBUG", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported


@pytest.fixture(autouse=True)
def _strict(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("strict"):
        monkeypatch.setenv("PAGEDKV_DEBUG", "3")
