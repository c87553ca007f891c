"""Warming up: the functions are compiled even if the other processes fail; each inner function is compiled once."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.registry import CPUDispatcher

from pagedkv.core import Group, compiled, manager, recovery, warm
from pagedkv.core import state as st
from pagedkv.core.manager import MemoryManager
from tests.core.oracle import everything, grown


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the program that is started in place of Python, to compile; it sleeps."""
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o755)
    monkeypatch.setattr(warm.sys, "executable", str(path))
    monkeypatch.setattr(warm.MACHINE_CODE, "has", lambda name: False)
    return path


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 1\n", "no program"], ids=["fails", "cannot be started"])
def test_a_step_is_warmed_up_without_the_other_processes(program: Path, text: str) -> None:
    program.write_text(text)
    warm.warm_up_step()
    assert not warm._compilers


def test_the_other_processes_compile_all_that_a_step_calls_for_its_types() -> None:
    parts = {"plan_step": ["open_space", "fork_space", "num_tokens", "plan_step"]}
    parts |= {"commit_step": ["release_space", "abort_step", "commit_step"]}
    state, rows, counts = MemoryManager(num_frames=8, block_size=2).state, np.zeros(1, np.int32), np.zeros(1, np.int64)
    functions = [function for part in warm.PARTS.values() for function, *_ in part(state, rows, counts)]
    assert [function.__name__ for function in functions] == [name for part in parts.values() for name in part]
    warm.warm_up_step()
    before = [len(function.signatures) for function in functions]
    for last in warm.PARTS:
        warm.compile_part(last)
    assert min(before) == 1
    assert [len(function.signatures) for function in functions] == before, "a step calls them with other types"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Return the list of the processes that are started from now on."""
    processes: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def recorded(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        processes.append(start(*args, **kwargs))
        return processes[-1]

    monkeypatch.setattr(warm.subprocess, "Popen", recorded)
    return processes


def test_an_interrupt_ends_the_other_processes(
    program: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warm.begin_warm_up()
    assert warm.begin_warm_up(), "they run already"

    interrupts, wait = [KeyboardInterrupt()], started[0].wait

    def interrupted(*args: Any, **kwargs: Any) -> int:
        if interrupts:
            raise interrupts.pop()
        return wait(*args, **kwargs)

    monkeypatch.setattr(started[0], "wait", interrupted)
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        warm.warm_up_step()
    assert time.perf_counter() - began < 30
    assert [process.poll() for process in started] == [-signal.SIGKILL] * 2


def test_the_other_processes_end_with_this_one(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeping = warm._PROGRAM.replace("warm.compile_part(sys.argv[1])", "import time; time.sleep(60)")
    assert sleeping != warm._PROGRAM
    monkeypatch.setattr(warm, "_PROGRAM", sleeping)
    monkeypatch.setattr(warm.MACHINE_CODE, "has", lambda name: False)
    assert warm.begin_warm_up()
    for process in started:  # the end of this process closes the pipes
        process.stdin.close()
    assert [process.wait(30) for process in started] == [1, 1]
    warm._compilers.clear()


@pytest.fixture
def views() -> Iterator[None]:
    """End the processes and show the compiled functions again after the test."""
    yield
    for process in warm._compilers:
        process.kill()
        process.communicate()
    warm._compilers.clear()
    while warm._uncompiled:
        caller, name, module = warm._uncompiled.pop()
        setattr(caller, name, module)


def walked() -> tuple[bytes, ...]:
    """Return every number of a manager after some calls; its hashes have a key that is always the same."""
    mm = MemoryManager(num_frames=24, block_size=2, groups=(Group(), Group(window=3)))
    mm.state.reg[st.KEY] = 2**62 + 12345
    first = grown(mm, [-1, 5, 2**31 - 1, 7, 8, 9, 10])
    mm.abort(mm.plan([first], [3]))
    first.fork().release()
    second = mm.open([-1, 5, 2**31 - 1, 7, 8, 1])
    assert len(second) == 4
    mm.commit(mm.plan([first, second], [2, 5]), [1, 2, 3], [1, 2])
    first.release()
    mm.retire(3, [second])
    mm.advance(3)
    mm.check()
    return everything(mm)


@pytest.mark.parametrize("interpreter", ["#!/bin/sh\nexec sleep 60\n", "#!/bin/sh\nexit 1\n"])
def test_python_runs_the_same_functions_until_they_are_compiled(
    program: Path, views: None, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_result = walked()
    program.write_text(interpreter)
    with monkeypatch.context() as at_most:  # the sources that a process would compile
        at_most.setattr(CPUDispatcher, "compile", lambda self, sig: pytest.fail(f"{self} is compiled here"))
        assert warm.begin_warm_up(uncompiled=True)
        assert not isinstance(manager.steps.plan_step, CPUDispatcher)
        began = time.perf_counter()
        warm.warm_up_step()
        assert time.perf_counter() - began < 5
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert walked() == compiled_result


def test_the_compiled_functions_are_taken_when_all_are_there(program: Path, views: None) -> None:
    program.write_text("#!/bin/sh\nexit 0\n")
    modules = manager.steps, manager.page_tables, recovery.steps, recovery.page_tables
    warm.begin_warm_up(uncompiled=True)
    for thread in threading.enumerate():
        if thread.name == "pagedkv-compile":
            thread.join(30)
    assert (manager.steps, manager.page_tables, recovery.steps, recovery.page_tables) == modules
    assert isinstance(manager.steps.plan_step, CPUDispatcher)


def test_no_process_is_started_for_what_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm.MACHINE_CODE, "has", lambda name: name in ("plan_step", "commit_step"))
    monkeypatch.setattr(warm.subprocess, "Popen", None)
    assert not warm.begin_warm_up()
    warm.warm_up_step()


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
