"""The stages of `make gpu`: what each one runs, what it needs, and the most seconds that it may take.

    CALLS      three calls, 15 minutes together: whether the kernels are right and how fast; other projects; vLLM
    LATER      what later calls add: the grids of cases, the laws, the whole benchmark
    SANITIZE   the cases under compute-sanitizer, slow and only on request

This file knows only the names of commands.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Final, NamedTuple

JOBS: Final = str(max(1, min(12, (os.cpu_count() or 2) * 3 // 4)))
"""Processes that share the GPU in tests of correctness, whose time goes mostly to compilers and oracles. Measurements
run alone."""


class Stage(NamedTuple):
    """One command and its limits.

    arguments: arguments of Python; "{out}" is the folder of results.
    seconds:   the most that it may take.
    needs:     Python modules and programs (these as "program:NAME") without which it cannot run; "gpu" is one, too.
    tool:      a command that runs Python, with its arguments.
    env:       environment variables of this stage.
    kit:       the archive of `make gpu-kit` that is unpacked to Python's path, where it was carried along.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float
    needs: tuple[str, ...] = ("gpu",)
    tool: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    kit: str = ""


def _bench(module: str, *options: str) -> tuple[str, ...]:
    return "-m", f"pagedkv.bench.gpu.{module}", "--out", "{out}", *options


def _cases(backend: str, *cases: str, jobs: str = JOBS, options: tuple[str, ...] = ()) -> tuple[str, ...]:
    return "-m", "tests.kernels.by_hand", "--backend", backend, "--jobs", jobs, *options, "--cases", *cases


def _pytest(name: str, seconds: float, *files: str, apart: bool = False) -> Stage:
    """Return a stage of tests. It ends after 60 failures, as the next one would hardly tell more, and lists them.

    apart: run the tests in JOBS processes, where pytest-xdist is installed.
    """
    plain = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--override-ini=addopts=--import-mode=importlib")
    jobs = ("-n", JOBS) if apart and importlib.util.find_spec("xdist") else ()
    options = (*plain, "-rfE", "--tb=short", "--maxfail=60", *jobs, "-m", "gpu", *files)
    return Stage(name, options, seconds, ("gpu", "pytest"), env=_WIDE)


_WIDE: Final = (("COLUMNS", "400"),)  # else pytest cuts off the reasons
CUDA, TRITON, IN_VLLM = ("gpu", "cupy"), ("gpu", "triton"), ("gpu", "pytest", "vllm")
ON_GPU, GRAPHS = "tests/kernels/test_on_gpu.py", "tests/kernels/cuda/test_graph.py"
USERS = "tests/on_gpu"
VLLM = "tests/integrations/vllm/host/test_on_gpu.py"
CONFORMANCE = "tests/kernels/test_conformance.py"
LIBRARY = "tests/kernels/library"
VALUES = tuple(f"tests/kernels/{folder}" for folder in ("gather", "hostile", "latents", "masks"))
_ELSEWHERE = (ON_GPU, GRAPHS, CONFORMANCE, LIBRARY, *VALUES)
ENVIRONMENT: Final = "environment"

_LOOK: Final = Stage(ENVIRONMENT, _bench("environment"), 25, needs=("torch",))
_OFFLINE: Final = (("VLLM_HOST_IP", "127.0.0.1"), ("VLLM_NO_USAGE_STATS", "1"), ("HF_HUB_OFFLINE", "1"))


def _vllm(name: str, seconds: float, *arguments: str) -> Stage:
    env = (*_OFFLINE, ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), *_WIDE)
    return Stage(name, arguments, seconds, ("gpu", "vllm"), env=env, kit="vllm")


CALLS: Final = {
    "call1": (
        _LOOK,
        Stage("race", _bench("race"), 110),
        Stage("stream", _bench("stream"), 40, needs=CUDA),
        Stage("quick", _bench("attention", "--backends", "triton", "cuda", "--quick"), 70, needs=TRITON),
        Stage("ceilings", _bench("ceiling"), 30, needs=TRITON),
    ),
    "call2": (
        _LOOK,
        # a kernel that FlashInfer compiles on the spot takes longer than the stage
        Stage("peers", _bench("peers"), 120, TRITON, env=(("FLASHINFER_DISABLE_JIT", "1"),), kit="peers"),
        Stage("prefill", _bench("prefill"), 45, kit="peers"),
        Stage("host", _bench("host"), 25),
    ),
    "call3": (
        _LOOK,
        _vllm("tokens", 115, *_pytest("", 0, VLLM).arguments, "-k", "llama and not pool")._replace(needs=IN_VLLM),
        _vllm("vllm-custom", 50, *_bench("vllm_step", "--backend", "CUSTOM")),
        _vllm("vllm-flash", 50, *_bench("vllm_step", "--backend", "FLASH_ATTN")),
        _vllm("vllm-triton", 50, *_bench("vllm_step", "--backend", "TRITON_ATTN")),
    ),
}
"""In each call the results that decide most come first: first whether results are right, then speed."""

LATER: Final = (
    Stage("cases-triton", _cases("triton", "small"), 240, needs=TRITON),
    Stage("cases-cuda", _cases("cuda", "small"), 240, needs=CUDA),
    _pytest("users", 240, USERS, apart=True)._replace(needs=("gpu", "pytest", "transformers", "tokenizers")),
    _pytest("graphs", 500, ON_GPU, GRAPHS),
    _pytest("library", 400, LIBRARY, apart=True),
    _pytest("values", 520, *VALUES, apart=True),
    Stage("grid-triton", _cases("triton", "grid", "large"), 480, needs=TRITON),
    Stage("grid-cuda", _cases("cuda", "grid", "large"), 480, needs=CUDA),
    Stage("bench", _bench("attention", "--backends", "triton", "cuda"), 500, needs=TRITON),
    _pytest("laws", 520, "tests/kernels", *(f"--ignore={path}" for path in _ELSEWHERE), apart=True),
    _pytest("conformance", 520, CONFORMANCE, apart=True),
)
"""The most useful stages come first, in case time is short. No stage takes longer than one call of ten minutes."""

SANITIZE: Final = tuple(
    Stage(
        f"sanitize-{backend}-{tool}",
        # with several teams of several warps, racecheck reports races that are none: docs/explanation/cuda-kernels.md
        _cases(backend, "small", jobs="1", options=("--one-team",) * ((backend, tool) == ("cuda", "racecheck"))),
        900,
        ("gpu", "program:compute-sanitizer"),
        ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
        # memcheck sees no access out of bounds inside a block that torch caches.
        (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),) if tool == "memcheck" else (),
    )
    for backend in ("triton", "cuda")
    for tool in ("memcheck", "racecheck")
)
"""The stages of `make gpu-sanitize`, which are slow and run separately."""
