"""`make gpu`: everything that needs a GPU, in stages that each leave their results behind when time runs out.

    python scripts/gpu.py [--out FOLDER] [--minutes N] [stage ...]

Needs no network: pagedkv is installed editable, without build isolation or dependencies, into the Python that runs this, which must have
torch >= 2.8 (with CUDA), numpy, numba, pybind11 and setuptools, and for their kernels triton and CuPy; stages that want pytest or
rich say so where they are missing. Each stage writes
FOLDER/<stage>.log as it goes, and one line to FOLDER/summary.txt when it ends; a stage that fails or runs out of time stops no other.
Correctness comes before speed: the first stages are short and say whether the kernels run at all. This file knows names of commands only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--override-ini=addopts=--import-mode=importlib", "-m", "gpu")


class Stage(NamedTuple):
    """name: of the stage, its log and its results. arguments: of Python. minutes: at most."""

    name: str
    arguments: tuple[str, ...]
    minutes: float
    tool: tuple[str, ...] = ()


STAGES = (
    Stage("install", ("-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--editable", "."), 5),
    Stage("doctor", ("-m", "pagedkv", "doctor"), 1),
    Stage("cases", ("-m", "tests.kernels.by_hand", "--cases", "small"), 5),
    Stage("cases-cuda", ("-m", "tests.kernels.by_hand", "--cases", "small", "--backend", "cuda"), 5),
    Stage("bench-quick", ("-m", "pagedkv.bench.gpu_attention", "--quick", "--out", "{out}"), 3),
    Stage("graphs", (*PYTEST, "tests/kernels/test_on_gpu.py"), 6),
    Stage("grid", ("-m", "tests.kernels.by_hand", "--cases", "grid", "large"), 15),
    Stage("grid-cuda", ("-m", "tests.kernels.by_hand", "--cases", "grid", "large", "--backend", "cuda"), 15),
    Stage("laws", (*PYTEST, "tests/kernels"), 20),
    Stage("bench", ("-m", "pagedkv.bench.gpu_attention", "--out", "{out}"), 8),
    Stage("tune", ("-m", "pagedkv.bench.tune", "--out", "{out}"), 8),
)
"""In the order of what is worth most when time is short."""

SANITIZE = tuple(
    Stage(f"sanitize-{tool}", ("-m", "tests.kernels.by_hand", "--cases", "small"), 25, ("compute-sanitizer", "--tool", tool))
    for tool in ("memcheck", "racecheck")
)
"""`make gpu-sanitize`: slow, and a run of its own."""


def run(stage: Stage, out: Path, minutes: float) -> str:
    """One line: how it ended, and the last line it printed."""
    began, log = time.monotonic(), out / f"{stage.name}.log"
    arguments = [argument.replace("{out}", str(out)) for argument in stage.arguments]
    env = os.environ | {"PYTHONUNBUFFERED": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    with log.open("w") as file:
        try:
            command = [*stage.tool, sys.executable, *arguments]
            code = subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, timeout=60 * minutes).returncode
            ended = "passed" if code == 0 else f"FAILED ({code})"
        except subprocess.TimeoutExpired:
            ended = f"out of time after {minutes:.0f} minutes"
        except FileNotFoundError as missing:
            ended = f"not run: {missing}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{stage.name}: {ended}, {time.monotonic() - began:.0f} s: {lines[-1][:160] if lines else 'printed nothing'}"


def main() -> int:
    """0 if every stage passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="*", help="of: " + ", ".join(stage.name for stage in (*STAGES, *SANITIZE)))
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-results")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all stages together")
    given = parser.parse_args()
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = [stage for stage in (*STAGES, *SANITIZE) if stage.name in given.stages] if given.stages else list(STAGES)
    left, failed = 60 * given.minutes, 0
    for stage in chosen:
        began = time.monotonic()
        line = run(stage, given.out, min(stage.minutes, left / 60)) if left > 10 else f"{stage.name}: no time left"
        left -= time.monotonic() - began
        failed += ": passed" not in line
        print(line, flush=True)
        with (given.out / "summary.txt").open("a") as file:
            file.write(line + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
