"""Three cells under Nsight Compute: `python -m pagedkv.bench.gpu.inside.profile`.

The program starts ncu three times, each with a limit of time, over `--once`: a process that calls one backend on one
cell a few times. The clocks are left as they are (`--clock-control none`): a machine that is lent may refuse to change
them. FOLDER then has a report for ncu's own viewer and a row with the metrics below; the counts of the
model's prediction stand beside them (../model).
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch

from pagedkv.bench.attention.cells import Cell
from pagedkv.bench.gpu import attention
from pagedkv.bench.gpu.pool import GpuPool
from pagedkv.bench.gpu.timing import keep, options_of, provenance, require_gpu
from pagedkv.errors import InvalidRequest

CELLS: Final[dict[str, Cell]] = {"32x4k": attention.BASE, "32x4k fp8": attention.FP8, "1x1k": attention.ONE}
KERNELS: Final = "regex:paged_attention|decode_kernel"
SKIPPED: Final = 2
"""Launches of the kernel before the one that is profiled."""

SECONDS: Final = 30.0
METRICS: Final = {
    "us": "gpu__time_duration.sum",
    "dram %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "alu %": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "fma %": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "xu %": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "tensor %": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "lsu %": "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active",
    "instructions": "sm__inst_executed.sum",
    "bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "registers": "launch__registers_per_thread",
}
"""Name in the row -> ncu's metric. A metric that this ncu does not have is left out."""

STALLS: Final = "smsp__average_warps_issue_stalled_"
UNITS: Final = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3}


def once(cell: str, backend: str) -> None:
    """Call one backend on one cell: the process that ncu watches."""
    for step in attention.ours(backend, GpuPool(CELLS[cell]))[: SKIPPED + 1]:
        step()
    torch.cuda.synchronize()


def metrics_of(page: str) -> dict[str, Any]:
    """Return the metrics of one kernel from ncu's raw page in CSV: a line of names, a line of units, a line of values.

    Raises: InvalidRequest if there are no such lines
    """
    rows = [row for row in csv.reader(page.splitlines()) if row]
    head = next((i for i, row in enumerate(rows) if row[0] == "ID"), None)
    if head is None or len(rows) < head + 3:
        raise InvalidRequest(f"ncu printed no metrics: {page.strip()[-300:]}")
    names, units, values = rows[head : head + 3]
    given = {name: (value.replace(",", ""), unit) for name, unit, value in zip(names, units, values, strict=True)}
    found: dict[str, Any] = {"kernel": given.get("Kernel Name", ("", ""))[0]}
    for name, metric in METRICS.items():
        if metric in given:
            value, unit = given[metric]
            found[name] = round(float(value) * (UNITS.get(unit, 1.0) if name == "us" else 1.0), 2)
    stalls = {
        name.removeprefix(STALLS).partition("_per_")[0].partition(".")[0]: float(value)
        for name, (value, _) in given.items()
        if name.startswith(STALLS) and value
    }
    return found | {"stalls": sorted(stalls, key=lambda name: -stalls[name])[:3]}


def profiled(cell: str, backend: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Run ncu over one cell and return its metrics. Raises: OSError, subprocess.SubprocessError, InvalidRequest"""
    report = folder / f"ncu-{cell.replace(' ', '-')}-{backend}"
    watched = [sys.executable, "-m", "pagedkv.bench.gpu.inside.profile", "--once", cell, backend]
    which = ["-k", KERNELS, "--launch-skip", str(SKIPPED), "--launch-count", "1"]
    command = ["ncu", "--clock-control", "none", "--set", "full", *which, "-f", "-o", str(report), *watched]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds)
    print(run.stdout[-2000:], flush=True)
    page = ["ncu", "-i", f"{report}.ncu-rep", "--page", "raw", "--csv"]
    return metrics_of(subprocess.run(page, capture_output=True, text=True, timeout=seconds).stdout)


def main(argv: list[str] | None = None) -> int:
    """Print and keep the metrics; return 1 if a cell has none."""
    parser = options_of(__doc__, "inside.profile")
    parser.add_argument("--backend", default="cuda", help="a name in the registry")
    parser.add_argument("--seconds", type=float, default=2 * SECONDS, help="for all cells")
    parser.add_argument("--once", nargs=2, metavar=("CELL", "BACKEND"), help="call, for a profiler that watches")
    given = parser.parse_args(argv)
    require_gpu()
    if given.once:
        once(*given.once)
        return 0
    if shutil.which("ncu") is None:
        raise InvalidRequest("there is no ncu (Nsight Compute) on the PATH of this machine")
    about, failed, until = provenance(), 0, time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as scratch:
        for cell in CELLS:
            try:
                left = max(1.0, min(SECONDS, until - time.monotonic()))
                found = profiled(cell, given.backend, given.out or Path(scratch), left)
            except (OSError, subprocess.SubprocessError, InvalidRequest) as why:
                is_late = isinstance(why, subprocess.TimeoutExpired)
                failed += 1
                print(f"= {cell}: {f'no report within {left:.0f} s' if is_late else str(why)[:200]}", flush=True)
                continue
            keep([{"case": cell, "who": given.backend} | found | about], given.out, "profile")
            words = [f"{name} {found[name]:g}" for name in METRICS if name in found]
            print(f"= {cell}: {', '.join(words)}; stalls {', '.join(found['stalls'])}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
