"""Warming up: another process compiles a step, or this one if it fails; meanwhile the step runs uncompiled.

numba compiles once per machine: a second process loads the machine code of the first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv.core import Group, background, compiled, manager, recovery, warm
from pagedkv.core import state as st
from pagedkv.core.manager import MemoryManager
from pagedkv.core.tables import page_tables, steps
from tests.core.interrupts.test_interrupts import CALLS, Engine
from tests.core.oracle import everything, grown
from tests.interrupts import Interrupter, count_instructions

ROOT = Path(__file__).parents[3]


def sleeper(folder: Path) -> Path:
    """Write a program that is started in place of Python, to compile; it sleeps."""
    path = folder / "python"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a program that is started in place of Python."""
    path = sleeper(tmp_path)
    monkeypatch.setattr(background.sys, "executable", str(path))
    monkeypatch.setattr(warm.MACHINE_CODE, "has", lambda name: False)
    monkeypatch.setenv("PAGEDKV_BACKGROUND", "1")
    yield path
    for compiler in background._compiler:
        compiler.kill()
        compiler.wait()
    background._compiler.clear()


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 1\n", "no program"], ids=["fails", "cannot be started"])
def test_a_step_is_warmed_up_without_the_other_process(program: Path, text: str) -> None:
    program.write_text(text)
    warm.warm_up_step()
    assert not warm.begin_warm_up(), "it has ended"


def test_the_other_process_compiles_all_that_a_step_calls_for_its_types() -> None:
    functions = [function for function, *_ in warm._calls_of_step()]
    assert [function.__name__ for function in functions] == [*background.STEP]
    warm.warm_up_step()
    before = [len(function.signatures) for function in functions]
    warm.compile_step()
    assert min(before) == 1
    assert [len(function.signatures) for function in functions] == before, "a step calls them with other types"


def test_a_function_runs_uncompiled_until_the_other_process_has_ended(program: Path) -> None:
    args = np.array([1, 2]), 9
    assert warm.begin_warm_up()
    assert warm.begin_warm_up(), "it runs already"
    uncompiled = steps.num_tokens._compile_for_args(*args)
    assert isinstance(uncompiled, partial)
    assert uncompiled(*args) == steps.num_tokens(*args) == 3
    if hasattr(os, "fork") and not (child := os.fork()):
        os._exit(len(background._compiler))
    assert os.waitpid(child, 0)[1] == 0, "a fork knows no process that it cannot see"
    for compiler in background._compiler:
        compiler.kill()
        compiler.wait()
    assert not isinstance(steps.num_tokens._compile_for_args(*args), partial)
    assert not warm.begin_warm_up(), "it failed; this process compiles"


@pytest.mark.parametrize("reason", ["on disk", "no folder", "switched off", "frozen"])
def test_no_process_is_started(reason: str, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background.subprocess, "Popen", None)
    if reason == "on disk":
        monkeypatch.setattr(warm.MACHINE_CODE, "has", lambda name: name in background.STEP)
    elif reason == "no folder":
        monkeypatch.setattr(warm.MACHINE_CODE, "folder", None)
    elif reason == "switched off":
        monkeypatch.setenv("PAGEDKV_BACKGROUND", "0")
    else:
        monkeypatch.setattr(background.sys, "executable", "/opt/application")
    assert not warm.begin_warm_up()
    warm.warm_up_step()


def walked() -> str:
    """Return a digest of every number of a manager after some steps; its hashes have a key that is always the same."""
    mm = MemoryManager(num_frames=24, block_size=2, groups=(Group(), Group(window=3)))
    mm.state.reg[st.KEY] = 2**62 + 12345
    first = grown(mm, [-1, 5, 2**31 - 1, 7, 8, 9, 10])
    mm.abort(mm.plan([first], [3]))
    first.fork().release()
    second = mm.open([-1, 5, 2**31 - 1, 7, 8, 1])
    assert len(second) == 4
    mm.awaited([-1, 5, 2**31 - 1, 7, 8, 1])
    assert {type(number) for number in (second.asid, second.generation)} == {int}
    mm.commit(mm.plan([first, second], [2, 5]), [1, 2, 3], [1, 2])
    first.release()
    mm.check()
    return sha256(b"".join(everything(mm))).hexdigest()


COLD = """
import warnings
from numba.core import event
from pagedkv.core import background
from tests.core.cost.test_warm import walked
warnings.simplefilter("error")
background.sys.executable = {!r}
with event.install_recorder("numba:compile") as compiled:
    print(walked(), len(compiled.buffer))
for compiler in background._compiler:
    compiler.kill()
    compiler.wait()
"""


def test_a_cold_machine_says_that_it_compiles_and_runs_the_same_functions_uncompiled(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COLD.format(str(sleeper(tmp_path)))]
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cold"), "PAGEDKV_BACKGROUND": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [walked(), "0"]
    assert done.stderr.count("compiling pagedkv's memory manager for this machine") == 1


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("call", ["open of a prefix", "fork", "rejected drafts", "copied abort", "release"])
def test_an_interrupt_comes_before_or_after_an_uncompiled_function(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", "1")
    for caller, module in product((manager, recovery), (page_tables, steps)):
        of_step = {*background.STEP} & {*vars(module)}
        uncompiled = {name: partial(compiled._run_uncompiled, getattr(module, name).py_func) for name in of_step}
        view = SimpleNamespace(**{**vars(module), **uncompiled})
        monkeypatch.setattr(caller, module.__name__.rpartition(".")[2], view)
    engine = Engine.new("groups")
    total = count_instructions(lambda: CALLS[call](engine))
    assert total > 1000, "functions that run in Python"
    for at in range(1, total * 3 // 4, total // 20):  # the count depends on the hashes
        engine = Engine.new("groups")
        with pytest.raises(KeyboardInterrupt):
            Interrupter(at).run(lambda engine=engine: CALLS[call](engine))
        engine.end()


def test_an_inner_function_is_compiled_once_for_all_integers() -> None:
    @compiled.inner
    def twice(number: int) -> int:
        return 2 * number

    @compiled.compiled
    def every(narrow: int, wide: int) -> int:
        return twice(narrow) + twice(wide) + twice(3)

    assert every(np.int32(1), np.int64(2)) == 2 + 4 + 6
    assert [str(arg) for signature in twice.signatures for arg in signature] == ["int64"]
    assert twice(np.int32(7)) == 14  # in Python it runs uncompiled


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


@pytest.mark.parametrize("program", [WALKS, FRAME_POOL], ids=["walks", "frame pool"])
def test_a_second_process_compiles_nothing(program: str) -> None:
    run(program)
    assert run(program) == "0"


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
