"""numba compiles once per machine: a second process loads the machine code of the first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RECORDED = """
from numba.core import event
with event.install_recorder("numba:compile") as compiled:
    work()
print(len(compiled.buffer) and sorted({record.data["dispatcher"].py_func.__name__ for _, record in compiled.buffer}))
"""
ENGINE = (
    """
from pagedkv.engine.step.engine import Engine
from pagedkv.engine.checkpoint.demo import DEMO_PROMPT
engine = Engine.load(num_frames=64)
engine.cache.set_quota(b"small", hard=40, protected=4)
def work():
    for tenant in (b"", b"small"):
        requests = [engine.submit(DEMO_PROMPT, num_samples=3, tenant=tenant) for _ in range(3)]
        engine.step()
        engine.cancel(requests[0])
        engine._is_whole = False  # as after an interrupt
        engine.step()
        engine.scheduler.preempt(engine.scheduler.running[-1])
        engine.run()
"""
    + RECORDED
)
WARM = "from pagedkv.core.warm import warm_up as work" + RECORDED
FRAME_POOL = "from pagedkv.core.warm import warm_up_frame_pool as work" + RECORDED
WALKS = (
    """
from tests.core.walks import WORLDS, Walk
walks = [Walk(9, world) for world in WORLDS.values()]
def work():
    for walk in walks:
        for _ in range(400):
            walk.step()
"""
    + RECORDED
)


def run(program: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def test_a_second_process_compiles_nothing() -> None:
    run(WALKS)
    assert run(WALKS) == "0"


def test_a_second_process_compiles_no_call_of_a_frame_pool() -> None:
    run(FRAME_POOL)
    assert run(FRAME_POOL) == "0"


@pytest.mark.slow
def test_a_step_of_a_loaded_engine_compiles_nothing(tmp_path: Path) -> None:
    """Requests of two tenants, with forks, preemptions, a cancellation and a restart."""
    assert run(ENGINE, NUMBA_CACHE_DIR=str(tmp_path)) == "0"


@pytest.mark.slow
def test_another_process_compiles_a_step(tmp_path: Path) -> None:
    program = WARM.replace("warm_up ", "warm_up_step ")
    assert run(program, NUMBA_CACHE_DIR=str(tmp_path), PAGEDKV_BACKGROUND="1") == "0"


@pytest.mark.slow
def test_warm_up_compiles_all_that_later_calls_need(tmp_path: Path) -> None:
    assert "truncate_space" in run(WARM, NUMBA_CACHE_DIR=str(tmp_path))
    assert run(WALKS, NUMBA_CACHE_DIR=str(tmp_path)) == "0"
