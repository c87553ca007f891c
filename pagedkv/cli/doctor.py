"""`pagedkv doctor`: the kernels that can run here, reasons why the others cannot, and facts about machine and Python.

Versions of packages come from their metadata; optional packages are not imported.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import Final

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import pagedkv
from pagedkv import debug
from pagedkv.cli import machine
from pagedkv.cli.report import grid, size
from pagedkv.core.warm import place
from pagedkv.kernels.threads import QUOTA, num_threads

_PACKAGES: Final = "torch numba numpy safetensors tokenizers triton cupy-cuda12x cupy-cuda13x transformers".split()

_FEATURES: Final = """
avx2 fma f16c avx_vnni avx512f avx512bw avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_int8 asimd sve sve2 bf16 i8mm
""".split()
"""The CPU features that kernels may require."""

_WITHOUT_EXTENSION: Final = "The numba kernels serve instead, at a third of the speed."  # setup.py says the same


def run() -> None:
    """Print the kernels of each device, then the facts, to stdout."""
    console = Console(highlight=False)
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        console.print(Text(f"Kernels on {device}", style="bold"))
        console.print(_kernels(device))
        console.print()
    console.print(Text("Here", style="bold"))
    console.print(grid({f"  {name}": Text(value) for name, value in _facts().items()}))


def _kernels(device: str) -> Table:
    """Tabulate the kernels of a device: chosen, able to run, or the objections."""
    explained = pagedkv.explain(device=device)
    lines = {}
    for name, objections in explained.objections.items():
        verdict = "can run, and is chosen" if name == explained.chosen else "can run"
        verdict = f"cannot: {'; '.join(objections)}" if objections else verdict
        lines[f"  {name}"] = Text(verdict, style="yellow" if objections else "green")
    return grid(lines)


def _facts() -> dict[str, str]:
    """Return the facts that a bug report should contain, by name."""
    installed = {each.name.lower(): each.version for each in distributions() if each.name}
    free, total = machine.memory()
    facts = {
        "pagedkv": f"{pagedkv.__version__}, debug level {debug.level()}, kernels {debug.forced_backend() or 'auto'}",
        "extension": "compiled" if find_spec("pagedkv.kernels._cpu") else f"not compiled. {_WITHOUT_EXTENSION}",
        "python": f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}",
        **{name: installed.get(name, "not installed") for name in _PACKAGES},
        "torch": torch.__version__,  # with the build, which the metadata of wheels on PyPI leave out
        "cpu": _cpu(),
        "threads": _threads(),
        "compiled code": place().removeprefix("compiled functions are "),
        "memory": f"{size(free)} available of {size(total)}",
        "huge pages": _huge_pages(),
    }
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        facts[f"cuda:{index}"] = (
            f"{device.name}, {size(device.total_memory)}, compute capability {device.major}.{device.minor}"
        )
    return facts


def _threads() -> str:
    """Return the threads of torch and of the kernels, and what limits them."""
    limit = "" if QUOTA is None else f"; the cgroup has a quota of {QUOTA} CPUs"
    cores = f"{machine.cores()} of {os.cpu_count()} cores may be used{limit}"
    return f"{torch.get_num_threads()} of torch, {num_threads()} of the CPU kernels; {cores}"


def _cpu() -> str:
    """Return the name of the CPU and its _FEATURES."""
    fields = machine.fields("/proc/cpuinfo")
    present = set(fields.get("flags", fields.get("Features", "")).split())
    name = fields.get("model name", platform.processor() or "unknown")
    features = " ".join(feature for feature in _FEATURES if feature in present)
    return f"{name}; {features or 'no features that kernels ask for'}"


def _huge_pages() -> str:
    """Return whether a pool, which asks for huge pages, gets them."""
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    mode = next(iter(machine.fields(path)), "").partition("[")[2].partition("]")[0]
    off = f"switched off in {path}: a large pool is slower"
    return {"never": off, "": "Linux does not say"}.get(mode, "Linux gives them to the pool")
