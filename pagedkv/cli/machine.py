"""The memory and the cores of this machine, for `doctor` and `fit`. No torch."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

READ_BYTES = 1 << 29
"""Bytes that `bandwidth` reads at most: more than caches hold."""


def text(path: str) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def fields(path: str) -> dict[str, str]:
    """Return the fields of a file of lines `name: value`."""
    lines = (line.partition(":") for line in text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def memory() -> tuple[int, int]:
    """Return the bytes of memory that are available, and all; of a container with a limit, what it leaves."""
    found = fields("/proc/meminfo")
    free, total = (1024 * int(found.get(name, "0").split()[0]) for name in ("MemAvailable", "MemTotal"))
    limit, used = text("/sys/fs/cgroup/memory.max"), text("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit() and int(limit) < total:
        return min(free, max(0, int(limit) - int(used))), int(limit)
    return free, total


def bandwidth() -> int:
    """Measure how many bytes a second all cores together read from memory: the best of three passes."""
    import numpy as np

    size = min(READ_BYTES, memory()[0] // 4)
    parts = np.array_split(np.ones(size // 8, np.int64), len(os.sched_getaffinity(0)))
    seconds = []
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(3):
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            seconds.append(time.perf_counter() - began)
    return int(size / min(seconds))
