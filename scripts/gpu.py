"""`make gpu`: run all tests and benchmarks that need a GPU, in stages.

    python scripts/gpu.py [--out FOLDER] [--minutes N] [--rest] [stage ...]

The script needs no network. It installs pagedkv editable, without build isolation or dependencies, into the Python that
runs it. That Python must have torch >= 2.8 (with CUDA), numpy, numba, pybind11 and setuptools, and for their kernels
triton and CuPy. A stage that needs pytest or rich says so if they are missing. When time runs out, the results of
finished stages stay.

Each stage writes FOLDER/<stage>.log while it runs, and one line to FOLDER/summary.txt when it ends. A stage that fails
or runs out of time does not stop the others, except the first two: without a GPU or an installed pagedkv no other stage
can run. Correctness comes before speed: the first stages are short and show whether the kernels run at all. If a
command may take only ten minutes, run with --minutes 9, and again with --rest, which skips the stages that passed. This
file knows only the names of commands.
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
"""Processes that share the GPU in tests of correctness, whose time goes mostly to compilers and oracles. Measurements
run alone."""

SPREAD = ("-n", JOBS) if importlib.util.find_spec("xdist") else ()
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--override-ini=addopts=--import-mode=importlib", "-m", "gpu")
MACHINE = """
import importlib.metadata as m, sys, torch
for name in ("torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "numba", "numpy", "pytest", "flashinfer-python",
             "flash-attn"):
    try: print(name, m.version(name), end="; ")
    except m.PackageNotFoundError: pass
if not torch.cuda.is_available(): sys.exit("torch finds no GPU on this machine, so nothing can be tested or measured")
at = torch.cuda.get_device_properties(0)
print(f"{at.name}, {at.multi_processor_count} processors, {at.total_memory >> 30} GiB, Python {sys.version.split()[0]}")
"""


class Stage(NamedTuple):
    """One command and its limits.

    name: of the stage, its log and its results. arguments: of Python. minutes: the most that it may take. tool: a
    command that runs Python, with its arguments. vital: no later stage runs if this one fails. env: environment
    variables of this stage.
    """

    name: str
    arguments: tuple[str, ...]
    minutes: float
    tool: tuple[str, ...] = ()
    vital: bool = False
    env: tuple[tuple[str, str], ...] = ()


def _cases(backend: str, *cases: str, jobs: str = JOBS) -> tuple[str, ...]:
    return "-m", "tests.kernels.by_hand", "--backend", backend, "--jobs", jobs, "--cases", *cases


BENCH = ("-m", "pagedkv.bench.gpu.attention", "--out", "{out}")
BASELINES = ("--backends", "triton", "cuda")
"""The backends that others are compared with. The variants of cuda are measured in another process, because an error on
a GPU ends the process and loses its results."""

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
    Stage("bench-quick", (*BENCH, *BASELINES, "--quick", "--no-peers"), 4),
    Stage(
        "graphs",
        (
            *PYTEST,
            "tests/kernels/test_on_gpu.py",
            "tests/kernels/cuda/test_graph.py",
            "-k",
            "not (pieces or on_the_gpu)",
        ),
        6,
    ),
    Stage("cases-cuda-pieces", _cases("cuda-pieces", "small"), 4),
    Stage("grid", _cases("triton", "grid", "large"), 8),
    Stage("grid-cuda", _cases("cuda", "grid", "large"), 8),
    Stage("grid-cuda-pieces", _cases("cuda-pieces", "grid", "large"), 8),
    Stage("bench", (*BENCH, *BASELINES), 9),
    Stage(
        "graphs-variants",
        (*PYTEST, "tests/kernels/test_on_gpu.py", "tests/kernels/cuda/test_graph.py", "-k", "pieces"),
        6,
    ),
    Stage("bench-variants", (*BENCH, "--backends", "cuda", "cuda-pieces", "--no-peers"), 9),
    Stage("tune", ("-m", "pagedkv.bench.gpu.tune", "--out", "{out}"), 9),
    Stage("laws", (*PYTEST, *SPREAD, "tests/kernels"), 15),
)
"""The most useful stages come first, in case time is short."""

SANITIZE = tuple(
    Stage(
        f"sanitize-{backend}-{tool}",
        _cases(backend, "small", jobs="1"),
        15,
        ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
        # memcheck sees no access out of bounds inside a block that torch caches.
        env=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),) if tool == "memcheck" else (),
    )
    for backend in ("triton", "cuda", "cuda-pieces")
    for tool in ("memcheck", "racecheck")
)
"""The stages of `make gpu-sanitize`, which are slow and run separately."""


def run(stage: Stage, out: Path, minutes: float) -> str:
    """Run a stage. Return one line: how the stage ended, and the last line that it printed."""
    began, log = time.monotonic(), out / f"{stage.name}.log"
    arguments = [argument.replace("{out}", str(out)) for argument in stage.arguments]
    # An interpreted, forced or checked kernel would not be the one to test and measure.
    unset = ("TRITON_INTERPRET", "PAGEDKV_KERNELS", "PAGEDKV_DEBUG")
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
            if process.poll() is None:  # end the process and the workers it has started
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if ended == "passed" and lines and " skipped" in lines[-1] and " passed" not in lines[-1]:
        ended = "FAILED (nothing ran)"
    return f"{stage.name}: {ended}, {time.monotonic() - began:.0f} s: {lines[-1][:200] if lines else 'printed nothing'}"


def passed(summary: Path) -> set[str]:
    """Return the names of the stages that passed in earlier runs."""
    lines = summary.read_text().splitlines() if summary.exists() else []
    return {line.partition(":")[0] for line in lines if ": passed" in line}


def main(argv: list[str] | None = None) -> int:
    """Run the stages. Return 0 if all passed, else 1."""
    stages = {stage.name: stage for stage in (*STAGES, *SANITIZE)}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="*", help="of: " + ", ".join(stages))
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-results")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all stages together")
    parser.add_argument("--rest", action="store_true", help="skip stages that passed before, except the first two")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.stages if name not in stages]:
        parser.error(f"there is no stage {', '.join(unknown)}; there are: {', '.join(stages)}")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    done = passed(out / "summary.txt") if options.rest else set()
    chosen = [stages[name] for name in options.stages] or [
        stage for stage in STAGES if stage.vital or stage.name not in done
    ]
    left, failed, broken = 60 * options.minutes, 0, ""  # broken: why no later stage can run
    for stage in chosen:
        began = time.monotonic()
        if broken or left <= 10:
            line = f"{stage.name}: not run: {broken or 'no time is left'}"
        else:
            line = run(stage, out, min(stage.minutes, left / 60))
        left -= time.monotonic() - began
        if ": passed" not in line:
            failed += 1
            broken = broken or (f"{stage.name} did not pass" if stage.vital else "")
        print(line, flush=True)
        with (out / "summary.txt").open("a") as file:
            file.write(line + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
