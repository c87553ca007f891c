"""Warming up: whatever becomes of the second process, the functions are compiled; and each inner one only once."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from pagedkv.core import compiled, warm
from pagedkv.core.manager import MemoryManager


@pytest.fixture
def second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the program that is started as the second process; it sleeps."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(warm.sys, "executable", str(program))
    monkeypatch.setattr(warm.MACHINE_CODE, "has", lambda name: False)
    return program


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 1\n", "no program"], ids=["fails", "cannot be started"])
def test_a_step_is_warmed_up_without_the_second_process(second: Path, text: str) -> None:
    second.write_text(text)
    warm.warm_up_step()


def test_the_second_process_compiles_the_functions_that_end_a_step() -> None:
    mm = MemoryManager(num_frames=8, block_size=2)
    mm.commit(mm.plan([mm.open()], [1]), [1])
    settling = (warm.steps.commit_step, warm.steps.abort_step, warm.page_tables.release_space)
    before = [len(function.signatures) for function in settling]
    warm.compile_settling()
    after = [len(function.signatures) for function in settling]
    assert after[0] == before[0], "it compiles for other types than a commit has"
    assert min(after) == 1


def test_an_interrupt_ends_the_second_process(second: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen
    monkeypatch.setattr(warm.subprocess, "Popen", lambda *a, **k: started.append(start(*a, **k)) or started[0])
    monkeypatch.setattr(MemoryManager, "plan", interrupted)
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        warm.warm_up_step()
    assert time.perf_counter() - began < 30
    assert started[0].poll() is not None


def test_the_second_process_is_not_started_for_what_is_on_disk(second: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm.MACHINE_CODE, "has", lambda name: name == "commit_step")
    monkeypatch.setattr(warm.subprocess, "Popen", None)
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
