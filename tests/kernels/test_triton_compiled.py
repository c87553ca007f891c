"""What the compiler makes of the Triton kernels stays within budget, for GPUs that are not here.

Registers, spills, shared memory, wide loads and tensor-core instructions are read from the machine code: a regression shows without a GPU
in the room. Speed does not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from tests.kernels.compiled import LAUNCHES, PROCESSORS

ROOT = Path(__file__).parents[2]
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}
"""What a program may use of each: more, and its launch fails."""

SPILLS = 64
"""Instructions that move registers to memory and back, at most: a few beside the loop do no harm, hundreds: the tile is too large."""

SPILLS_OF_EVERYTHING = 200
"""Window, soft cap, sinks, ALiBi and a tree mask at once: no model has them all, and sm_100 runs out of registers (185 in decode)."""

DEFAULT = [
    ("decode", "sm_90"),
    ("decode", "gfx942"),
    ("decode, fp8_e4m3/tensor", "sm_80"),
    ("prefill, one chunk", "sm_90"),
    ("write", "sm_90"),
]
ALL = [(name, arch) for arch in PROCESSORS for name in LAUNCHES]


@cache
def reports(jobs: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Compiled in one process of its own, where nothing is interpreted."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.kernels.compiled"]
    run = subprocess.run(command, cwd=ROOT, env=env, input=json.dumps(jobs), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return {(name, arch): launches for name, arch, launches in map(json.loads, run.stdout.splitlines())}


def stays_within_budget(name: str, arch: str, launches: list[dict[str, Any]]) -> None:
    assert launches
    for made in launches:
        where = f"{made['kernel']} of {name!r} on {arch}: {made}"
        assert made["shared"] <= SHARED[arch], where
        assert made["spills"] <= (SPILLS_OF_EVERYTHING if "every option" in name else SPILLS), where
        if made["kernel"] in ("decode_kernel", "prefill_kernel"):
            assert made["mma"] > 0, f"no tensor cores in {where}"
            if "int4" not in name:  # 64 bytes a head: as wide as they are
                assert made["wide"] >= 4, f"few loads of 16 bytes in {where}"
            if arch.startswith("sm_"):
                assert made["async"] > 0, f"loads wait in {where}"
        if made["kernel"] == "copy_kernel":
            assert made["wide"] > 0, where


@pytest.mark.parametrize(("name", "arch"), DEFAULT)
def test_the_kernels_that_serve_most_stay_within_budget(name: str, arch: str) -> None:
    stays_within_budget(name, arch, reports(tuple(DEFAULT))[name, arch])


@pytest.mark.slow
@pytest.mark.parametrize("arch", PROCESSORS)
def test_every_kernel_compiles_for_every_architecture_within_budget(arch: str) -> None:
    jobs = tuple((name, to) for name, to in ALL if to == arch)
    for (name, to), launches in reports(jobs).items():
        stays_within_budget(name, to, launches)


def test_keys_of_bfloat16_are_loaded_by_16_bytes_only() -> None:
    decode = reports(tuple(DEFAULT))["decode", "sm_90"][0]
    assert decode["async"] > 0
    assert decode["narrow_async"] == 0
