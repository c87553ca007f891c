"""The tests of kernels can fail: each seeded fault of mutants.py is caught by the test that it names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.mutants import FAULTS, VARIABLE, Fault

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.law)
def test_every_fault_can_still_be_seeded(fault: Fault) -> None:
    assert compile(fault.seeded(), fault.file, "exec")
    path, _, name = fault.proof.partition("::")
    assert f"def {name}(" in (Path(__file__).parent / path).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FAULTS)), ids=lambda number: FAULTS[number].law)
def test_a_seeded_fault_is_caught(number: int) -> None:
    options = ["-x", "-q", "--tb=line", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "tests.kernels.mutants"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"tests/kernels/{FAULTS[number].proof}"],
        cwd=ROOT, env=os.environ | {VARIABLE: str(number)}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if "skipped" in run.stdout and run.returncode == 0:
        pytest.skip("a package that the proof needs is not installed")
    assert run.returncode == 1, f"not caught, or not even run:\n{run.stdout[-3000:]}"
