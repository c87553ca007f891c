"""Why decode stays below the read ceiling: `python -m pagedkv.bench.gpu.stream`.

CTAs of 4 warps, two on an SM, read 537 MB in runs of 4 KB at random places, as decode does, without attention
(stream.cuh). Ways to share the work take turns: "equal", each CTA reads as many runs as every other; "counter", each
CTA reads a first part, then chunks of the rest, claimed from one counter.

Printed: microseconds, TB/s, and the cycles of the fastest third of the SMs over those of the slowest third. Predicted,
not measured, for an H200 in which groups of two or three TPCs share a return port of 113 bytes a cycle: equal 131 to
134 us, 0.85 between the thirds, counter 123 to 127 us. On an H100 all ways are within 1 %.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedkv.bench.gpu.timing import Step, in_turn, keep, options_of, provenance, require_gpu

RUN, WARPS, CALLS, RUNS, POOL = 4096, 4, 4, 537_000_000 // 4096, 4 << 30
Way = tuple[int, int, int, int]
"""(runs of a warp under way, CTAs, runs of a first part, runs of a chunk)."""


def ways(sms: int) -> dict[str, Way]:
    """Return the ways to measure, by name. Decode of 32 sequences with 8 heads takes a whole number of CTAs for 32."""
    equal = [(depth, ctas) for ctas in (2 * sms // 32 * 32, 2 * sms) for depth in (2, 4)]
    found = {f"equal, {ctas} CTAs, {depth} runs": (depth, ctas, -(-RUNS // ctas), 0) for depth, ctas in equal}
    for share, chunk, depth in ((0.75, 64, 2), (0.75, 32, 2), (0.75, 16, 2), (0.9, 16, 2), (0.75, 16, 4)):
        name = f"counter after {share:.0%}, {chunk * RUN >> 10} KB, {depth} runs"
        found[name] = depth, 2 * sms, int(RUNS * share) // (2 * sms), chunk
    return found


def kernel_of(depth: int) -> dict[str, Any]:
    """Return the arguments of CuPy's RawKernel for `depth` runs of a warp under way."""
    options = ("-std=c++17", f"-DWARPS={WARPS}", f"-DDEPTH={depth}")
    return {"code": Path(__file__).with_name("stream.cuh").read_text(), "name": "stream", "options": options}


def steps(way: Way, pool: Tensor, places: Tensor) -> tuple[list[Step], Tensor]:
    """Return the calls of a graph, and the tensor of the SM and the cycles of each CTA. places: int32 [CALLS, RUNS]"""
    import cupy

    depth, ctas, own, chunk = way
    kernel = cupy.RawKernel(**kernel_of(depth))
    kernel.max_dynamic_shared_size_bytes = size = WARPS * depth * RUN
    kernel.preferred_shared_memory_carveout = 100
    counters = torch.zeros(CALLS, dtype=torch.int32, device="cuda")
    told = torch.zeros(CALLS, ctas, 2, dtype=torch.int64, device="cuda")

    def launch(call: int) -> None:
        if call == 0:  # in every way, so that all of them pay for it
            counters.zero_()
        pointers = [np.uint64(x.data_ptr()) for x in (pool, places[call], counters[call:], told[call])]
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel((ctas,), (32 * WARPS,), (*pointers, *map(np.uint32, (RUNS, own, chunk))), shared_mem=size)

    return [lambda call=call: launch(call) for call in range(CALLS)], told


def cycles_of(told: Tensor) -> dict[str, Any]:
    """Return the mean cycles of each SM's CTAs, and the fastest third over the slowest. told: [CTAs, 2]"""
    sms, cycles = told.T.tolist()
    by_sm = {sm: round(mean(c for s, c in zip(sms, cycles, strict=True) if s == sm)) for sm in sorted({*sms})}
    ordered, third = sorted(by_sm.values()), -(-len(by_sm) // 3)
    return {"thirds": round(median(ordered[:third]) / median(ordered[-third:]), 3), "cycles_by_sm": by_sm}


def main(argv: list[str] | None = None) -> int:
    """Print and keep the figures; return 1 if a way failed."""
    given = options_of(__doc__, "stream").parse_args(argv)
    require_gpu()
    about = provenance()
    pool = torch.randint(-(2**62), 2**62, (POOL // 8,), dtype=torch.int64, device="cuda")
    places = torch.randperm(POOL // RUN, device="cuda").int()[: RUNS * CALLS].view(CALLS, RUNS)
    made = {name: steps(way, pool, places) for name, way in ways(about["processors"]).items()}
    times, refused = in_turn({name: calls for name, (calls, _) in made.items()}, 12)
    for name, us in times.items():
        figures = {"us": round(us, 2), "TB_per_s": round(RUNS * RUN / us / 1e6, 3)} | cycles_of(made[name][1][-1])
        keep([{"case": "537 MB", "who": name} | figures | about], given.out, "stream")
        print(f"= {us:.2f} us, {figures['TB_per_s']:.2f} TB/s, thirds {figures['thirds']}: {name}")
    print(*(f"= {name}: {why}" for name, why in refused.items()), sep="\n")
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
