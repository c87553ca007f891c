"""The number of threads of the CPU kernels, and a test whether this process lost its OpenMP team in a fork."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from pagedkv import debug

_IMPORTED_BY: Final = os.getpid()


def _quota_of_cgroups(root: str = "") -> int | None:
    """Return how many CPUs the cgroups of this process may use at once, rounded down; None without a limit.

    Only cgroups of version 2 are read (cpu.max).
    root: where /proc and /sys are mounted, for tests
    """
    quotas = []
    with suppress(OSError, StopIteration, ValueError):
        lines = Path(f"{root}/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        folder = Path(root + "/sys/fs/cgroup" + next(line[3:] for line in lines if line.startswith("0::")))
        for each in (folder, *folder.parents):  # the limit of a parent holds, too
            with suppress(OSError, ValueError):
                quota, period = (each / "cpu.max").read_text(encoding="utf-8").split()
                quotas.append(max(1, int(quota) // int(period)))
    return min(quotas, default=None)


QUOTA: Final = _quota_of_cgroups()
"""More threads than this would use the quota up before the end of a period, and then all stop until the next."""


def num_threads() -> int:
    """Return PAGEDKV_NUM_THREADS, or the number of threads that torch uses, at most QUOTA."""
    threads = torch.get_num_threads()
    return debug.forced_num_threads() or min(threads, QUOTA or threads)


def is_forked() -> bool:
    """Return True if this process was forked after it imported this file: its OpenMP threads stayed with the parent."""
    return os.getpid() != _IMPORTED_BY
