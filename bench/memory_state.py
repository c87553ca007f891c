"""The state of memory: on a shared machine it is fast in some minutes, and slow in others.

reading    a bare read of REGION bytes by as many threads as torch had at the first one; the best of READINGS
is_steady  whether two readings, before and after something, differ by less than CHANGE
states     the speeds that the readings of a run show: one, or two
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt

REGION: Final = 128 << 20
"""Bytes of a reading: more than most caches hold."""
RUN: Final = 64 << 10
"""Bytes of a run of the read."""
READINGS: Final = 3
CHANGE: Final = 1.25
"""Memory has changed its state meanwhile if two readings differ by this factor or more."""
STATES: Final = 1.3
"""Two states of memory differ by this factor at least,"""
SHARE: Final = 0.1
"""and the rarer one has this share of the readings at least,"""
FEWEST: Final = 3
"""and so many of them."""

States = tuple[tuple[float, float], ...]
"""(median speed in GB/s, share of the readings) of each state, the slow one first."""


@functools.cache
def bare_read() -> Callable[[], float]:
    """Return a call that measures memory: GB/s; NaN without the C++ extension, or where memory is short.

    The threads are plain ones. A thread of OpenMP spins for a while after its read, and would disturb a variant that
    runs in another process.
    """
    from pagedkv import explain
    from pagedkv.bench.attention.pool import region_of
    from pagedkv.bench.memory import available
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


def states(rates: Sequence[float]) -> States:
    """Return the states of memory that readings (GB/s) show: one or two, none without readings. NaN is no reading.

    The logarithms are cut where the squared distances to the means of both parts are smallest. The parts are states if
    their medians differ by STATES, and each has SHARE of the readings and FEWEST of them. Medians are readings.
    """
    logs = np.log(np.sort([rate for rate in rates if not math.isnan(rate)]))
    count = len(logs)
    if not count:
        return ()
    if count > 1:
        sums, squares, cuts = np.cumsum(logs), np.cumsum(logs**2), np.arange(1, count)
        below = squares[cuts - 1] - sums[cuts - 1] ** 2 / cuts
        above = squares[-1] - squares[cuts - 1] - (sums[-1] - sums[cuts - 1]) ** 2 / (count - cuts)
        cut = int(cuts[np.argmin(below + above)])
        slow, fast = (_median(part) for part in (logs[:cut], logs[cut:]))
        if fast / slow >= STATES and min(cut, count - cut) >= max(FEWEST, SHARE * count):
            return (slow, cut / count), (fast, 1 - cut / count)
    return ((_median(logs), 1.0),)


def _median(logs: npt.NDArray[np.float64]) -> float:
    """Return the speed that is the median of a sorted part; of two in the middle, the lower one."""
    return float(np.exp(logs[(len(logs) - 1) // 2]))


def of_rows(rows: Iterable[dict[str, Any]]) -> str:
    """Return in words the states that memory had in a run; "" if no row says it. Each row has the same weight."""
    kept = [state for row in rows for state in row.get("memory", ())]
    found = states([speed for speed, share in kept for _ in range(round(100 * share))])
    speeds = " and ".join(f"{speed:.0f}" for speed, _ in found)
    return f"memory in {('one state', 'two states')[len(found) - 1]}: {speeds} GB/s" if found else ""
