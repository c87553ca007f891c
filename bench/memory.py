"""The memory that this process may take, and how fast memory is now: on a shared machine its speed changes."""

from __future__ import annotations

import functools
import math
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

CGROUPS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""The limit of a container: version 2, version 1."""
REGION: Final = 128 << 20
"""Bytes of a bare read: more than most caches hold."""
RUN: Final = 64 << 10
READINGS: Final = 3
CHANGE: Final = 1.25
"""Memory has changed its state between two reads if their speeds differ by this factor or more."""


def available() -> int:
    """Return the bytes that are free on this machine, or those of the container or the process if they are fewer."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    limits = [next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))]
    for path in map(Path, CGROUPS):
        if path.exists() and (text := path.read_text(encoding="ascii").strip()).isdecimal():
            limits.append(int(text))
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        limits += [soft] if soft != resource.RLIM_INFINITY else []
    return min(limits)


@functools.cache
def bare_read() -> Callable[[], float]:
    """Return a call that measures memory: GB/s, the best of READINGS; NaN without the C++ extension or free memory.

    The threads are plain ones. A thread of OpenMP spins for a while after its read, and would disturb a variant that
    runs in another process.
    """
    from pagedkv import explain
    from pagedkv.bench.attention.pool import region_of
    from pagedkv.kernels import cpu
    from pagedkv.kernels.threads import num_threads

    if explain(device="cpu").objections["cpu"] or available() < 4 * REGION:
        return lambda: math.nan
    region, read, isa = region_of(REGION), cpu.extension().read, cpu.isa()
    parts = np.array_split(np.arange(0, REGION, RUN), num_threads())
    pool = ThreadPoolExecutor(len(parts), "bare read")

    def once() -> float:
        began = time.perf_counter()
        for future in [pool.submit(read, isa, 1, region.data_ptr(), p.ctypes.data, len(p), RUN) for p in parts]:
            future.result()
        return time.perf_counter() - began

    return lambda: REGION / min(once() for _ in range(READINGS)) / 1e9


def is_steady(before: float, after: float) -> bool:
    """Return whether memory was in one state between two readings. So it is taken to be if one is NaN."""
    return not max(before, after) >= CHANGE * min(before, after)
