"""The memory of this machine, its cores, and files of Linux about it, for `doctor`, `fit` and benchmarks. No torch."""

from __future__ import annotations

import os
import re
from pathlib import Path


def _text(path: str) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def fields(path: str) -> dict[str, str]:
    """Return the fields of a file of lines `name: value`."""
    lines = (line.partition(":") for line in _text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> tuple[int, int]:
    """Return the bytes of memory that are available, and all; of a container with a limit, what it leaves."""
    found = fields("/proc/meminfo")
    free, total = (1024 * int(found.get(name, "0").split()[0]) for name in ("MemAvailable", "MemTotal"))
    limit, used = _text("/sys/fs/cgroup/memory.max"), _text("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit() and int(limit) < total:
        # the page cache counts as used; Linux drops its inactive part when memory is asked for
        cache = re.search(r"^inactive_file (\d+)", _text("/sys/fs/cgroup/memory.stat"), re.MULTILINE)
        left = int(limit) - int(used) + (int(cache[1]) if cache else 0)
        return min(free, max(0, left)), int(limit)
    return free, total
