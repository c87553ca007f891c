"""What every test runs under: argument checks on, one thread a worker; `strict` ones prove the invariants after each commit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("PAGEDKV_DEBUG", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

for layer in ("core", "kernels"):
    folder = Path(__file__).parents[1] / "pagedkv" / layer
    newest = max(path.stat().st_mtime for path in folder.glob("*.py"))
    for compiled in (*folder.glob("__pycache__/*.nbi"), *folder.glob("__pycache__/*.nbc")):
        if compiled.exists() and compiled.stat().st_mtime < newest:  # numba sees changes of the function's own file only,
            compiled.unlink(missing_ok=True)  # not of those it calls


@pytest.fixture(autouse=True)
def _strict(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("strict"):
        monkeypatch.setenv("PAGEDKV_DEBUG", "3")
