"""`scripts/compare_checkouts.py` with stand-ins for checkouts: engines that sleep, and no model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from scripts.compare_checkouts import interval

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_checkouts.py"
STAND_IN = """
import time
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, **options): assert options["ignore_eos"]

class Engine:
    cache = SimpleNamespace(kernel=SimpleNamespace(name="{kernel}"))

    @classmethod
    def load(cls, folder):
        print("a library prints")
        engine = cls()
        engine.requests = []
        return engine

    def submit(self, prompt, params):
        request = SimpleNamespace(completions=[SimpleNamespace(token_ids=[])])
        self.requests.append(request)
        return request

    def cancel(self, request): self.requests.remove(request)

    def step(self):
        for request in self.requests:
            request.completions[0].token_ids.append(7)
        time.sleep({seconds} * len(self.requests))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[..., Path]:
    def made(name: str, seconds: float = 0.0, kernel: str = "a kernel") -> Path:
        package = tmp_path / name / "pagedkv" / "model"
        package.mkdir(parents=True)
        for folder in (package, package.parent):
            (folder / "__init__.py").touch()
        (package / "engine.py").write_text(STAND_IN.format(seconds=seconds, kernel=kernel))
        return tmp_path / name

    return made


def compared(*arguments: object) -> subprocess.CompletedProcess[str]:
    few = ("--sequences", "1", "2", "--steps", "3", "--turns", "4", "--processes", "2")
    command = [sys.executable, str(SCRIPT), *map(str, arguments), *few]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_checkout_that_takes_three_times_as_long_is_slower(checkout: Callable[..., Path]) -> None:
    run = compared(checkout("old", 0.02), checkout("new", 0.06))
    assert (run.returncode, run.stderr.count("a library prints")) == (1, 4)
    lines = re.findall(
        r"^ +(\d) sequences: \d+\.\d+ -> \d+\.\d+ ms, x (\d\.\d+) \((\d\.\d+) to (\d\.\d+); ", run.stdout, re.M
    )
    assert [line[0] for line in lines] == ["1", "2"]
    for _, middle, low, high in lines:
        assert 2 < float(low) <= float(middle) <= float(high) < 4


def test_a_checkout_that_is_faster_is_not_slower(checkout: Callable[..., Path]) -> None:
    run = compared(checkout("old", 0.03), checkout("new", 0.01))
    assert run.returncode == 0, run.stderr


def test_checkouts_with_other_kernels_are_refused(checkout: Callable[..., Path]) -> None:
    run = compared(checkout("old"), checkout("new", kernel="another kernel"))
    assert run.returncode == 1
    assert "old has a kernel" in run.stderr
    assert "new has another kernel; run `python setup.py build_ext --inplace` in both checkouts" in run.stderr


def test_a_folder_that_is_no_checkout_is_refused(checkout: Callable[..., Path], tmp_path: Path) -> None:
    run = compared(checkout("old"), tmp_path)
    assert run.returncode == 1
    assert f"{tmp_path} is no checkout: its pagedkv is " in run.stderr


def test_the_interval_knows_that_turns_of_one_pair_of_processes_are_alike() -> None:
    """Two pairs whose ratios differ by far more than the turns of each: either may be all that is drawn."""
    low, high = interval([[1.0, 1.001, 0.999] * 10, [1.1, 1.101, 1.099] * 10])
    assert low < 1.01 < 1.09 < high
    low, high = interval([[1.02, 1.021, 1.019] * 10] * 2)
    assert 1.019 <= low <= high <= 1.021
