"""The host cost of an eager call on a real driver: `python -m pagedkv.bench.gpu.host`.

The host launches CALLS calls of the smallest decode and is timed until the last launch, before the device has finished;
the device's queue holds them all. Two calls are compared, functional and bound, and the write beside them. launch.py
measures the same on any machine, with a recorder in the driver's place. A row says whether the C++ extension was built:
without it each call takes torch's operator.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from pagedkv import KVLayer, PagedBatch, bind_attention, bind_write, paged_attention, write_kv
from pagedkv.bench.gpu.attention import ONE
from pagedkv.bench.gpu.pool import GpuPool
from pagedkv.bench.gpu.timing import error_line, keep, options_of, provenance, require_gpu, served
from pagedkv.kernels import cpu

CALLS: Final = 200
"""Fewer than the driver queues (about a thousand), so no launch waits for the device."""

REPETITIONS: Final = 15


def calls_of(
    backend: str, layer: KVLayer, q: Tensor, batch: PagedBatch, new: Tensor
) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return makers of the calls to time, by name. A maker raises what the backend objects. new: keys to store"""

    def bound() -> Callable[[], object]:
        attend = bind_attention(layer, backend=backend)
        return lambda: attend(q, batch)

    def bound_write() -> Callable[[], object]:
        store = bind_write(layer, backend=backend)
        return lambda: store(new, new, batch)

    return {
        "attend, bound": bound,
        "paged_attention": lambda: lambda: paged_attention(q, layer, batch, backend=backend),
        "store, bound": bound_write,
        "write_kv": lambda: lambda: write_kv(new, new, layer, batch, backend=backend),
    }


def host_us(call: Callable[[], object], calls: int = CALLS, repetitions: int = REPETITIONS) -> float:
    """Return the host's microseconds for a call, the median over repetitions."""
    times = []
    for _ in range(repetitions + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times[2:])


def main(argv: list[str] | None = None) -> int:
    """Print and keep the figures; return 1 if no backend served."""
    given = options_of(__doc__, "host").parse_args(argv)
    require_gpu()
    about, pool, rows = provenance(), GpuPool(ONE), []
    batch = pool.batches()[0]
    batch = replace(batch, slots=batch.block_table[:, 0].long() * ONE.block_size)
    new = torch.randn(ONE.batch, ONE.kv_heads, ONE.head_dim, device=pool.device).to(pool.layer.k.dtype)
    is_built = not cpu.missing()
    if not is_built:
        print("= without the C++ extension: a bound call also takes torch's operator", flush=True)
    for backend in served():
        found: dict[str, Any] = {}
        for name, make in calls_of(backend, pool.layer, pool.query(), batch, new).items():
            try:
                found[name] = round(host_us(make()), 2)
            except Exception as why:
                print(f"{backend}, {name}: {error_line(why)}", flush=True)
        rows.append({"who": backend, "us": found, "extension": is_built})
        keep([rows[-1] | about], given.out, "host")
        words = ", ".join(f"{name} {us} us" for name, us in found.items())
        print(f"= {backend}: {words or 'refused'}", flush=True)
    return int(not any(row["us"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
