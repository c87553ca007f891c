"""The tests of core can fail: they catch each fault of mutants.py, seeded into a copy of core.

A mutant runs uncompiled, in a process and a folder of its own, with fixed seeds and without shrinking; it ends at the
first failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.mutants import CORE, FAULTS, IDENTITY, MACHINE, STEPS, Fault

ROOT = Path(__file__).parents[2]
PROOFS = ("test_laws.py", IDENTITY, STEPS, MACHINE)
QUICK = (
    "published at plan",
    "generations are not compared",
    "the hash is believed",
    "is free at once",
    "not pinned",
    "any order",
)

CONFTEST = """
import signal
from pathlib import Path
import pagedkv
import pytest
from hypothesis import HealthCheck, Phase, settings
assert Path(pagedkv.__file__).parents[1] == Path(__file__).parents[1], "the fault is in this copy"
settings.register_profile(
    "mutant", derandomize=True, database=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck), print_blob=False)
settings.load_profile("mutant")

@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):  # broken code may hang
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"{item.name} hangs"))
    signal.alarm(100 if 'machine' in item.nodeid else 20)
    try:
        return (yield)
    finally:
        signal.alarm(0)
"""


def prove(tree: Path, fault: Fault | None, proofs: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run the test files `proofs` in `tree` against a core with `fault`."""
    skipped = shutil.ignore_patterns("__pycache__", "*.so", "bundled")
    shutil.copytree(CORE, tree / "pagedkv/core", ignore=skipped)
    for path in (ROOT / "pagedkv").glob("*.py"):
        shutil.copy(path, tree / "pagedkv")
    shutil.copytree(ROOT / "tests/core", tree / "tests/core", ignore=skipped)
    (tree / "tests/__init__.py").touch()
    (tree / "tests/conftest.py").write_text(CONFTEST)
    (tree / "pytest.ini").write_text(
        "[pytest]\naddopts = --import-mode=importlib -m 'not slow'\nmarkers =\n    slow\n    strict\npythonpath = .\n"
    )
    if fault:
        (tree / "pagedkv/core" / fault.file).write_text(fault.seeded(), encoding="utf-8")
    env = os.environ | {
        "NUMBA_DISABLE_JIT": "1",
        "PAGEDKV_DEBUG": "3",
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    lean = [
        "-x",
        "-q",
        "--no-header",
        "--tb=line",
        "-W",
        "ignore",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-k",
        "not thousand",
    ]
    command = [sys.executable, "-m", "pytest", *lean, *(f"tests/core/{name}" for name in proofs)]
    return subprocess.run(
        command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )


def in_order(fault: Fault) -> tuple[str, ...]:
    """Return the test files that prove the fault, the expected one first."""
    return (fault.proof, *(name for name in PROOFS if name != fault.proof))


def expensive(fault: Fault) -> bool:
    return not fault.law.endswith(QUICK)


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.slow] * expensive(f), id=f.law) for f in FAULTS])
def test_a_seeded_fault_is_caught(tmp_path: Path, fault: Fault) -> None:
    run = prove(tmp_path, fault, in_order(fault))
    # 0: every test passed; 2 and more: no test ran
    assert run.returncode == 1, f"not caught, or not even run:\n{run.stdout[-3000:]}"
    assert "SyntaxError" not in run.stdout
    assert "NameError" not in run.stdout


def test_without_a_fault_there_is_nothing_to_catch(tmp_path: Path) -> None:
    run = prove(tmp_path, None, tuple(name for name in PROOFS if name != MACHINE))
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.slow
def test_without_a_fault_the_state_machine_passes_with_these_seeds(tmp_path: Path) -> None:
    run = prove(tmp_path, None, (MACHINE,))
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.law)
def test_every_fault_can_still_be_seeded(fault: Fault) -> None:
    assert fault.seeded()


def test_there_are_enough_faults_and_the_quick_ones_exist() -> None:
    assert len({fault.law for fault in FAULTS}) == len(FAULTS) >= 12
    assert sum(not expensive(fault) for fault in FAULTS) == len(QUICK)
