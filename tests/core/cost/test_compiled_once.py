"""numba's compile time is paid once per machine: what one process compiled, the next one loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SEEN = """
from numba.core import event
with event.install_recorder("numba:compile") as seen:
    live()
print(len(seen.buffer) and sorted({kept.data["dispatcher"].py_func.__name__ for _, kept in seen.buffer}))
"""
WARM = "from pagedkv.core.warm import warm_up as live" + SEEN
LIVE = (
    """
from tests.core.walks import WORLDS, Walk
walks = [Walk(9, world) for world in WORLDS.values()]
def live():
    for walk in walks:
        for _ in range(400):
            walk.step()
"""
    + SEEN
)


def run(program: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def test_a_second_process_compiles_nothing() -> None:
    run(LIVE)
    assert run(LIVE) == "0"


@pytest.mark.slow
def test_what_warm_up_compiled_serves_all_that_follows(tmp_path: Path) -> None:
    assert "commit_step" in run(WARM, NUMBA_CACHE_DIR=str(tmp_path))
    assert run(LIVE, NUMBA_CACHE_DIR=str(tmp_path)) == "0"
