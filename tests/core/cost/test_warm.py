"""Warming up: the functions are compiled even if the other processes fail; each inner function is compiled once."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.core import compiled, warm
from pagedkv.core.manager import MemoryManager


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
