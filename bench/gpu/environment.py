"""The machine that the other stages run on: `python -m pagedkv.bench.gpu.environment`.

It prints the GPU, its clocks, the versions, and why each backend serves or refuses. Without a GPU it says so and ends
with status 1. FOLDER/environment.json keeps the facts.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import torch

import pagedkv
from pagedkv.bench import record
from pagedkv.bench.gpu.timing import options_of, served
from pagedkv.kernels import registry

PACKAGES = ("torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc", "numpy", "pytest")
TOOLS = ("compute-sanitizer", "nvcc", "nvidia-smi")
STATE = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,mig.mode.current"


def state() -> str:
    """Return what nvidia-smi says of the first GPU, or why it says nothing."""
    try:
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={STATE}", "--format=csv,noheader"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as why:
        return f"nvidia-smi: {why}"
    return (run.stdout or run.stderr).strip()


def facts() -> dict[str, Any]:
    """Return the facts of this machine. backends: the objections of each to decoding in bfloat16, [] where it serves"""
    versions = {name: found for name in PACKAGES if (found := record.version_of(name))}
    case = registry.Case(device="cuda", dtype="bfloat16", kv_dtype="bfloat16", head_dim=128, head_dim_v=128)
    found: dict[str, Any] = {"pagedkv": pagedkv.__version__, "python": sys.version.split()[0]}
    found |= {"commit": record.commit(), "versions": versions, "state": state()}
    found["missing"] = [name for name in TOOLS if not shutil.which(name)]
    found["backends"] = {each.name: each.refuse(case) for each in registry.KERNELS if each.name in served()}
    if torch.cuda.is_available():
        at = torch.cuda.get_device_properties(0)
        found |= {"gpu": at.name, "processors": at.multi_processor_count, "GiB": at.total_memory >> 30}
        found |= {"L2 MiB": at.L2_cache_size >> 20, "capability": f"{at.major}.{at.minor}"}
        found["cuda"] = torch.version.cuda or torch.version.hip
    return found


def main(argv: list[str] | None = None) -> int:
    """Print and keep the facts; return 1 without a GPU."""
    given, found = options_of(__doc__, "environment").parse_args(argv), facts()
    text = json.dumps(found, indent=1)
    print(text)
    if given.out:
        (given.out / "environment.json").write_text(text)
    print("= " + ", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    print(f"= not here: {', '.join(found['missing']) or 'nothing'}")
    for name, why in found["backends"].items():
        print(f"= {name}: {'; '.join(why) or 'serves'}")
    if "gpu" not in found:
        print("torch finds no GPU on this machine, so no kernel can be tested or measured")
        return 1
    print(f"= {found['gpu']}, {found['processors']} SMs, {found['GiB']} GiB, CUDA {found['cuda']}; {found['state']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
