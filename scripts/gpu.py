"""`make gpu`: everything that needs a GPU, in stages that each leave their results behind when time runs out.

    python scripts/gpu.py [--out FOLDER] [--minutes N] [--rest] [stage ...]

Needs no network: pagedkv is installed editable, without build isolation or dependencies, into the Python that runs this, which must have
torch >= 2.8 (with CUDA), numpy, numba, pybind11 and setuptools, and for their kernels triton and CuPy; stages that want pytest or
rich say so where they are missing. Each stage writes FOLDER/<stage>.log as it goes, and one line to FOLDER/summary.txt when it ends; a
stage that fails or runs out of time stops no other, but the first two: without a GPU, or uninstalled, there is nothing to be seen.
Correctness comes before speed: the first stages are short and say whether the kernels run at all. Where commands may take ten minutes
only: --minutes 9, and again with --rest, which leaves out what passed before. This file knows names of commands only.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
JOBS = str(max(1, min(8, (os.cpu_count() or 2) // 2)))
"""Processes that share the GPU while correctness is looked at: compilers and oracles take most of that time. Measurements are alone."""

SPREAD = ("-n", JOBS) if importlib.util.find_spec("xdist") else ()
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--override-ini=addopts=--import-mode=importlib", "-m", "gpu")
MACHINE = """
import importlib.metadata as m, sys, torch
for name in ("torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "numba", "numpy", "pytest", "flashinfer-python", "flash-attn"):
    try: print(name, m.version(name), end="; ")
    except m.PackageNotFoundError: pass
if not torch.cuda.is_available(): sys.exit("torch finds no GPU on this machine: there is nothing that could be measured or tested here")
at = torch.cuda.get_device_properties(0)
print(f"{at.name}, {at.multi_processor_count} processors, {at.total_memory >> 30} GiB, Python {sys.version.split()[0]}")
"""


class Stage(NamedTuple):
    """name: of the stage, its log and its results. arguments: of Python. minutes: at most. vital: the others are no use without it.
    env: variables of its own."""

    name: str
    arguments: tuple[str, ...]
    minutes: float
    tool: tuple[str, ...] = ()
    vital: bool = False
    env: tuple[tuple[str, str], ...] = ()


def _cases(backend: str, *cases: str, jobs: str = JOBS) -> tuple[str, ...]:
    return "-m", "tests.kernels.by_hand", "--backend", backend, "--jobs", jobs, "--cases", *cases


BENCH = ("-m", "pagedkv.bench.gpu.attention", "--out", "{out}")
SETTLED = ("--backends", "triton", "cuda")
"""What others are compared with. The variants of cuda are measured apart: an error on a GPU ends the process, with all that it holds."""

STAGES = (
    Stage("machine", ("-c", MACHINE), 1, vital=True),
    Stage(
        "install",
        ("-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--editable", "."),
        5,
        vital=True,
    ),
    Stage("doctor", ("-m", "pagedkv", "doctor"), 1),
    Stage("cases", _cases("triton", "small"), 4),
    Stage("cases-cuda", _cases("cuda", "small"), 4),
    Stage("moves", (*PYTEST, "tests/kernels/test_on_gpu.py", "-k", "on_the_gpu"), 3),
    Stage("bench-quick", (*BENCH, *SETTLED, "--quick", "--no-peers"), 4),
    Stage(
        "graphs",
        (
            *PYTEST,
            "tests/kernels/test_on_gpu.py",
            "tests/kernels/cuda/test_graph.py",
            "-k",
            "not (bulk or pieces or on_the_gpu)",
        ),
        6,
    ),
    Stage("cases-cuda-bulk", _cases("cuda-bulk", "small"), 4),
    Stage("cases-cuda-pieces", _cases("cuda-pieces", "small"), 4),
    Stage("grid", _cases("triton", "grid", "large"), 8),
    Stage("grid-cuda", _cases("cuda", "grid", "large"), 8),
    Stage("grid-cuda-bulk", _cases("cuda-bulk", "grid", "large"), 8),
    Stage("grid-cuda-pieces", _cases("cuda-pieces", "grid", "large"), 8),
    Stage("bench", (*BENCH, *SETTLED), 9),
    Stage(
        "graphs-variants",
        (*PYTEST, "tests/kernels/test_on_gpu.py", "tests/kernels/cuda/test_graph.py", "-k", "bulk or pieces"),
        6,
    ),
    Stage("bench-variants", (*BENCH, "--backends", "cuda", "cuda-bulk", "cuda-pieces", "--no-peers"), 9),
    Stage("tune", ("-m", "pagedkv.bench.gpu.tune", "--out", "{out}"), 9),
    Stage("laws", (*PYTEST, *SPREAD, "tests/kernels"), 15),
)
"""In the order of what is worth most when time is short."""

SANITIZE = tuple(
    Stage(
        f"sanitize-{backend}-{tool}",
        _cases(backend, "small", jobs="1"),
        15,
        ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
        env=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
        if tool == "memcheck"
        else (),  # inside a cached block nothing is out of bounds
    )
    for backend in ("triton", "cuda", "cuda-bulk", "cuda-pieces")
    for tool in ("memcheck", "racecheck")
)
"""`make gpu-sanitize`: slow, and a run of its own."""


def run(stage: Stage, out: Path, minutes: float) -> str:
    """One line: how it ended, and the last line it printed."""
    began, log = time.monotonic(), out / f"{stage.name}.log"
    arguments = [argument.replace("{out}", str(out)) for argument in stage.arguments]
    unset = (
        "TRITON_INTERPRET",
        "PAGEDKV_KERNELS",
        "PAGEDKV_DEBUG",
    )  # interpreted, forced or checked, nothing here would be true
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env |= {"PYTHONUNBUFFERED": "1", "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"} | dict(stage.env)
    with log.open("w") as file:
        try:
            command = [*stage.tool, sys.executable, *arguments]
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as missing:
            return f"{stage.name}: not run: {missing}"
        try:
            code = process.wait(timeout=60 * minutes)
            ended = "passed" if code == 0 else f"FAILED ({code})"
        except subprocess.TimeoutExpired:
            ended = f"out of time after {minutes:.1f} minutes"
        finally:
            if process.poll() is None:  # with the workers it has started
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if ended == "passed" and lines and " skipped" in lines[-1] and " passed" not in lines[-1]:
        ended = "FAILED (nothing ran)"
    return f"{stage.name}: {ended}, {time.monotonic() - began:.0f} s: {lines[-1][:200] if lines else 'printed nothing'}"


def passed(summary: Path) -> set[str]:
    """The stages that passed before."""
    lines = summary.read_text().splitlines() if summary.exists() else []
    return {line.partition(":")[0] for line in lines if ": passed" in line}


def main(argv: list[str] | None = None) -> int:
    """0 if every stage passed."""
    every = {stage.name: stage for stage in (*STAGES, *SANITIZE)}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="*", help="of: " + ", ".join(every))
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-results")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all stages together")
    parser.add_argument(
        "--rest", action="store_true", help="leave out what passed before; the first two are run always"
    )
    given = parser.parse_args(argv)
    if unknown := [name for name in given.stages if name not in every]:
        parser.error(f"there is no stage {', '.join(unknown)}; there are: {', '.join(every)}")
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    done = passed(out / "summary.txt") if given.rest else set()
    chosen = [every[name] for name in given.stages] or [
        stage for stage in STAGES if stage.vital or stage.name not in done
    ]
    left, failed, useless = 60 * given.minutes, 0, ""
    for stage in chosen:
        began = time.monotonic()
        if useless or left <= 10:
            line = f"{stage.name}: not run: {useless or 'no time is left'}"
        else:
            line = run(stage, out, min(stage.minutes, left / 60))
        left -= time.monotonic() - began
        if ": passed" not in line:
            failed += 1
            useless = useless or (f"{stage.name} did not pass" if stage.vital else "")
        print(line, flush=True)
        with (out / "summary.txt").open("a") as file:
            file.write(line + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
