"""The compiled functions and their slow twins (the same sources, uncompiled) agree in every number after every call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.core.policies import POLICIES
from tests.core.walks import WORLDS

ROOT = Path(__file__).parents[2]


def digests(seed: int, steps: int, policy: str, world: str, *, compiled: bool) -> subprocess.Popen[str]:
    world = f"replace(WORLDS[{world!r}], policy={policy!r})"
    program = (
        f"from dataclasses import replace; from tests.core.walks import WORLDS, main; main({seed}, {steps}, {world})"
    )
    env = os.environ | {"NUMBA_DISABLE_JIT": "0" if compiled else "1", "PAGEDKV_DEBUG": "0", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


QUICK = [("quotas", "2q", 1, 400), ("groups", "cost", 2, 400)]
EVERY = [(world, policy, 3 + len(world) % 2, 6000) for policy in sorted(POLICIES) for world in WORLDS]


@pytest.mark.parametrize(
    ("world", "policy", "seed", "steps"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in EVERY)]
)
def test_compiled_and_uncompiled_agree_after_every_call(world: str, policy: str, seed: int, steps: int) -> None:
    runs = [digests(seed, steps, policy, world, compiled=compiled) for compiled in (True, False)]
    fast, slow = (run.communicate()[0].splitlines() for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert len(fast) == steps + 1
    differing = next((number for number, (a, b) in enumerate(zip(fast, slow, strict=True)) if a != b), None)
    assert differing is None, (
        f"step {differing} of seed {seed}: compiled {fast[differing]}, uncompiled {slow[differing]}"
    )
    assert len({line.split()[1] for line in fast}) > steps // 2  # the state changed in most steps
