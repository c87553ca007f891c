"""The time of a CTA, place by place, in the CUDA attention kernel: `python -m pagedkv.bench.gpu.inside.stamps`.

The kernel is compiled with -DSTAMPS: the first thread of each CTA writes down the clock of its SM at each place that it
passes (ptx.cuh). A graph of calls is replayed, and the stamps of the last call are read. A line gives, for each place,
how many CTAs passed it, and the least, median and largest time since the CTA began. A CTA with two units has the stamps
of the last one. A profiler empties the caches before a kernel, also that of instructions, and so shows another one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from pagedkv.bench.attention.cells import Cell
from pagedkv.bench.gpu import attention
from pagedkv.bench.gpu.pool import GpuPool
from pagedkv.bench.gpu.timing import Rows, graph_of, keep, options_of, provenance, require_gpu

PLACES: Final = (
    "entered", "share recalled", "first keys asked for", "queries there", "keys attended", "teams' states gathered",
    "piece stored", "ticket drawn", "pieces merged", "ended",
)  # fmt: skip
"""The places of `Place` in csrc/cuda/ptx.cuh."""

MOST_CTAS, WORDS, TIMES = 2048, 16, (14, 15)
"""Stamps for so many CTAs; words of a CTA; of these, the times of day at the first and the last place."""

CELLS: Final[dict[str, Cell]] = {
    "1x1k": attention.ONE,
    "1x4k": attention.ONE_4K,
    "8x4k": attention.MIDDLE,
    "32x4k": attention.BASE,
    "32x4k fp8": attention.FP8,
}
CALLS: Final = 16


@contextmanager
def stamped() -> Iterator[list[int]]:
    """Compile kernels with stamps while the body runs. Yields a list that has the handle of each module then loaded."""
    from pagedkv.kernels.cuda import compiler
    from pagedkv.kernels.cuda.driver import driver_of

    driver, modules = driver_of(torch.device("cuda")), list[int]()
    before, cuda, functions = compiler.OPTIONS, driver._cuda, driver._functions

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(cuda, name)

        def moduleLoadData(self, cubin: bytes) -> int:
            modules.append(cuda.moduleLoadData(cubin))
            return modules[-1]

    compiler.OPTIONS = (*before, f"-DSTAMPS={MOST_CTAS}")  # type: ignore[misc]
    driver._cuda, driver._functions = Recorder(), {}  # type: ignore[assignment]
    try:
        yield modules
    finally:
        compiler.OPTIONS, driver._cuda, driver._functions = before, cuda, functions  # type: ignore[misc]


def read(module: int) -> Tensor:
    """Return the stamps that a module's kernel has left: int64 [MOST_CTAS, WORDS]."""
    from cupy.cuda import driver, runtime

    found = torch.empty(MOST_CTAS, WORDS, dtype=torch.int64)
    at = driver.moduleGetGlobal(module, "stamps")
    runtime.memcpy(found.data_ptr(), at, found.nbytes, runtime.memcpyDeviceToHost)
    return found


def phases(stamps: Tensor) -> Rows:
    """Return a row for each place that a CTA passed, from int64 [CTAs, WORDS]; microseconds since the CTA began.

    The time of day ticks coarsely, so it only gives the rate of the clocks, over all CTAs together.
    """
    there = stamps[stamps[:, -1] > 0]
    clocks = there[:, len(PLACES) - 1] - there[:, 0]
    ns = there[:, TIMES[1]] - there[:, TIMES[0]]
    per_us = float(clocks.sum()) / float(ns.sum()) * 1e3
    rows: Rows = []
    for place, name in enumerate(PLACES[1:], 1):
        passed = there[there[:, place] > 0]
        if len(passed):
            us = ((passed[:, place] - passed[:, 0]) / per_us).sort().values
            figures = {"min": us[0], "median": us[len(us) // 2], "max": us[-1]}
            rows.append({"place": name, "ctas": len(us)} | {key: round(float(x), 2) for key, x in figures.items()})
    return rows


def measured(cell: Cell, modules: list[int]) -> Rows:
    """Return the rows of one cell."""
    graph = graph_of(attention.ours("cuda", GpuPool(cell))[:CALLS])
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return phases(read(modules[-1]))


def main(argv: list[str] | None = None) -> int:
    """Print and keep the figures."""
    given = options_of(__doc__, "inside.stamps").parse_args(argv)
    require_gpu()
    about = provenance()
    for name, cell in CELLS.items():
        with stamped() as modules:
            rows = measured(cell, modules)
        keep([{"case": str(cell), "who": "cuda"} | row | about for row in rows], given.out, "stamps")
        print(f"{name}:")
        for row in rows:
            print(
                f"  {row['place']:24} {row['ctas']:5} CTAs  {row['min']:7.2f} {row['median']:7.2f} {row['max']:7.2f} us"
            )
        print(f"= {name}: " + ", ".join(f"{row['place']} {row['median']:.1f}" for row in rows), flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
