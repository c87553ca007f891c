"""The bytes of memory that a benchmark may take: of the machine, of its container, and of the limits of the process."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

CGROUPS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""The limit of a container: version 2, version 1."""


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
