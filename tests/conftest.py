"""What every test runs under: argument checks on, one thread a worker; `strict` ones prove the invariants after each commit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("PAGEDKV_DEBUG", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

CORE = Path(__file__).parents[1] / "pagedkv" / "core"
sources = [path.stat().st_mtime for path in CORE.glob("*.py")]
for compiled in (*CORE.glob("__pycache__/*.nbi"), *CORE.glob("__pycache__/*.nbc")):
    if compiled.exists() and compiled.stat().st_mtime < max(sources):  # numba sees changes of the function's own file only,
        compiled.unlink(missing_ok=True)  # not of those it calls


@pytest.fixture(autouse=True)
def _strict(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("strict"):
        monkeypatch.setenv("PAGEDKV_DEBUG", "3")
