"""The emulator and the kernels, as C++ on the host, under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cuda.emulator import COMPILER

ROOT = Path(__file__).parents[3]


def library(name: str) -> str | None:
    """Return the path of a sanitizer's runtime, or None."""
    assert COMPILER
    path = subprocess.run(
        [COMPILER, f"-print-file-name={name}"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    return path if os.path.isabs(path) else None


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")
@pytest.mark.parametrize("which", ["tests/kernels/cuda/test_emulator.py", "tests/kernels/cuda/test_launch.py"])
def test_nothing_undefined_happens_on_the_host(which: str) -> None:
    asan = library("libasan.so")
    if asan is None:
        pytest.skip("g++ has no libasan here")
    quiet = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0", "OMP_NUM_THREADS": "1"}
    env = os.environ | quiet | {"LD_PRELOAD": asan, "SIMT_SANITIZE": "address,undefined"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", which]
    run = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout[-8000:]
