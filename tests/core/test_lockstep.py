"""The compiled functions and their slow twins, the same sources run uncompiled, agree in every number after every call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def digests(seed: int, steps: int, policy: str, *, compiled: bool) -> subprocess.Popen[str]:
    program = f"from tests.core.walks import main; main({seed}, {steps}, {policy!r})"
    env = os.environ | {"NUMBA_DISABLE_JIT": "0" if compiled else "1", "PAGEDKV_DEBUG": "0", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


def test_both_ways_hold_the_same_after_every_call() -> None:
    in_lockstep(seed=1, steps=1500, policy="2q")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "2q", "lfu", "cost", "priority"])
@pytest.mark.parametrize("seed", [2, 3])
def test_both_ways_hold_the_same_under_every_policy(seed: int, policy: str) -> None:
    in_lockstep(seed, 10_000, policy)


def in_lockstep(seed: int, steps: int, policy: str) -> None:
    runs = [digests(seed, steps, policy, compiled=compiled) for compiled in (True, False)]
    fast, slow = (run.communicate(timeout=600)[0].splitlines() for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert len(fast) == steps + 1
    differing = next((number for number, (a, b) in enumerate(zip(fast, slow, strict=True)) if a != b), None)
    assert differing is None, f"step {differing} of seed {seed}: compiled {fast[differing]}, uncompiled {slow[differing]}"
    assert len({line.split()[1] for line in fast}) > steps // 2  # something happened
