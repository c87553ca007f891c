"""The grid of cases without pytest, for machines that have torch and the needs of a kernel, and no more.

    python -m tests.kernels.by_hand --backend triton --device cuda [--cases small grid large] [--jobs N] [--one-team]

It prints a line for each case: its errors over the allowed errors, or the failure. The last line has the counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from tests.cases import GRID, LARGE, SMALL, Case, moved
from tests.kernels import oracle as judged_by


def ratios(case: Case, backend: str, device: str) -> dict[str, float]:
    """Return error over allowed error of out and lse; inf where a query that sees nothing has something."""
    from pagedkv import paged_attention

    built = case.build()
    q, layer, batch = (moved(x, device) for x in built[:3])
    options = {name: moved(x, device) for name, x in built.options.items()}
    found = paged_attention(q, layer, batch, return_lse=True, backend=backend, **options)
    return judged_by.ratios(case, found, judged_by.oracle(built), judged_by.same_precision(built))


def use_one_team() -> None:
    """Make the launches of attention in CUDA take one team of warps where a team has several warps.

    racecheck takes accesses on two sides of a block barrier for a race if several such teams have barriers of their
    own: docs/explanation/cuda-kernels.md.
    """
    from pagedkv.kernels.cuda import attention

    chosen = attention.specialise

    def specialise(*wish: Any) -> Any:
        kernel = chosen(*wish)
        return replace(kernel, warps_n=1) if kernel.warps_m * kernel.warps_d > 1 else kernel

    attention.specialise = specialise  # type: ignore[assignment]


_lost: list[str] = []
"""The case after which this process has no GPU any more: an illegal address ends the context for good."""


def judged(job: tuple[Case, str, str]) -> tuple[bool, str]:
    """Return whether the case keeps the contract, and the line to print."""
    case, backend, device = job
    if _lost:
        return False, f"LOST {case}: not run, this process lost its GPU at {_lost[0]}"
    try:
        found = ratios(case, backend, device)
        good = all(value <= 1 for value in found.values())  # NaN is not
        text = " ".join(f"{name} {value:.2f}" for name, value in found.items())
    except Exception as why:
        notes = "".join(f"\n{note}" for note in getattr(why, "__notes__", ()))  # a compiler's log
        good, text = False, f"{type(why).__name__}: {why}"[:300] + notes[:3000]
        if "illegal" in text or "misaligned" in text or "CUDA error" in text or "CUDA_ERROR_LAUNCH" in text:
            _lost.append(str(case))
    return good, f"{'ok  ' if good else 'FAIL'} {case}: {text}"


def main() -> int:
    """Print a line for each case; return 0 if every case keeps the contract."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="+", default=["small", "grid", "large"], choices=["small", "grid", "large"])
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes: most of the time goes into compilers and the oracle"
    )
    parser.add_argument("--one-team", action="store_true", help="for racecheck: one team of several warps in a CTA")
    given = parser.parse_args()
    prepare = use_one_team if given.one_team else None
    if prepare and given.jobs == 1:
        prepare()
    sets = {"small": SMALL, "grid": GRID, "large": LARGE}
    jobs = [(case, given.backend, given.device) for name in given.cases for case in sets[name]]
    count = failed = 0
    with (
        ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn"), prepare)
        if given.jobs > 1
        else nullcontext() as pool
    ):
        for good, line in pool.map(judged, jobs) if pool else map(judged, jobs):
            count, failed = count + 1, failed + (not good)
            print(line, flush=True)
    print(f"{count} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
