"""The machine that the other stages run on: `python -m pagedkv.bench.gpu.environment`.

It prints the GPU, its clocks, the versions, and why each backend serves or refuses. Without a GPU it says so and ends
with status 1. FOLDER/environment.json keeps the facts.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import pagedkv
from pagedkv.bench import record
from pagedkv.bench.gpu.timing import options_of, served
from pagedkv.kernels import registry

PACKAGES = ("torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc", "numpy", "pytest")
PEERS = ("flashinfer-python", "flash-attn", "flash-attn-3", "vllm")
STATE = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,mig.mode.current"


def versions() -> dict[str, str]:
    """Return the version of each package that is installed."""
    return {name: found for name in (*PACKAGES, *PEERS) if (found := record.version_of(name))}


def tools() -> dict[str, str]:
    """Return the path of each program that a stage may want, and of Triton's own ptxas; "" where it is missing."""
    found = {name: shutil.which(name) or "" for name in ("ncu", "compute-sanitizer", "nvcc", "nvidia-smi")}
    triton = importlib.util.find_spec("triton")
    ptxas = Path(triton.origin).parent / "backends/nvidia/bin/ptxas" if triton and triton.origin else None
    return found | {"triton's ptxas": str(ptxas) if ptxas and ptxas.exists() else ""}


def state() -> str:
    """Return what nvidia-smi says of the first GPU, or why it says nothing."""
    try:
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={STATE}", "--format=csv,noheader"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as why:
        return f"nvidia-smi: {why}"
    return (run.stdout or run.stderr).strip()


def objections() -> dict[str, list[str]]:
    """Return the objections of each GPU backend to decoding in bfloat16; [] where it serves."""
    case = registry.Case(device="cuda", dtype="bfloat16", kv_dtype="bfloat16", head_dim=128, head_dim_v=128)
    return {kernel.name: kernel.refuse(case) for kernel in registry.KERNELS if kernel.name in served()}


def facts() -> dict[str, Any]:
    """Return the facts of this machine."""
    found: dict[str, Any] = {"pagedkv": pagedkv.__version__, "python": sys.version.split()[0]}
    found |= {"commit": record.commit(), "versions": versions(), "tools": tools(), "state": state()}
    if torch.cuda.is_available():
        at = torch.cuda.get_device_properties(0)
        found |= {"gpu": at.name, "processors": at.multi_processor_count, "GiB": at.total_memory >> 30}
        found |= {"L2 MiB": at.L2_cache_size >> 20, "capability": f"{at.major}.{at.minor}"}
        found |= {"cuda": torch.version.cuda or torch.version.hip, "backends": objections()}
    return found


def main(argv: list[str] | None = None) -> int:
    """Print and keep the facts; return 1 without a GPU."""
    given = options_of(__doc__, "environment").parse_args(argv)
    found = facts()
    print(json.dumps(found, indent=1))
    if given.out:
        (given.out / "environment.json").write_text(json.dumps(found, indent=1))
    print("= " + ", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    if missing := [name for name, path in found["tools"].items() if not path]:
        print(f"= not here: {', '.join(missing)}")
    if "gpu" not in found:
        print("torch finds no GPU on this machine, so no kernel can be tested or measured")
        return 1
    print(f"= {found['gpu']}, {found['processors']} SMs, {found['GiB']} GiB, CUDA {found['cuda']}; {found['state']}")
    for name, why in found["backends"].items():
        print(f"= {name}: {'; '.join(why) or 'serves'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
