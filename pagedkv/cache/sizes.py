"""Sizes of a pool: how many frames it begins with, and how many it may grow to.

    given             begins with                            grows to
    num_frames        num_frames                             no further
    memory            the frames that fit                    no further
    neither, CPU      the frames of half of the memory       no further: the system gives memory at the first write
    neither, GPU      an eighth of the limit                 the frames of three fifths of the free memory, by doubling

A pool that grows is beside the larger one until its frames are copied. The last step begins with half of the limit or
less, so both take nine tenths of the free memory at most.

This file knows machines and arithmetic; it must not know what a frame holds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from pagedkv.core.arguments import whole
from pagedkv.errors import InvalidRequest
from pagedkv.spec import KVSpec

SHARE_OF_CPU: Final = 0.5
SHARE_OF_GPU: Final = 0.6
FIRST_SHARE: Final = 8
"""A pool on a GPU that may grow begins with one part of so many of its limit."""


def pool_sizes(
    specs: Sequence[KVSpec], num_frames: int | None, memory: str | int | None, device: torch.device
) -> tuple[int, int]:
    """Return (frames that the pool begins with, frames that it may grow to).

    Raises: InvalidRequest if both sizes are given, or if not one frame fits
    """
    if num_frames is not None and memory is not None:
        raise InvalidRequest(f"num_frames is {num_frames} and memory is {memory}; give one of them, or neither")
    largest = max(specs, key=lambda spec: spec.frame_bytes)
    if num_frames is not None or memory is not None:
        frames = whole(num_frames if memory is None else largest.frames_in(memory), "num_frames", 1, 2**31)
        return frames, frames
    most = min(largest.frames_in(_memory_for_a_pool(device)), 2**31 - 1)
    return (most if device.type == "cpu" else max(1, most // FIRST_SHARE)), most


def _memory_for_a_pool(device: torch.device) -> int:
    """Return the bytes that a pool without a given size may take: a share of the available memory of `device`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(SHARE_OF_GPU * free)
    return int(SHARE_OF_CPU * _available_memory())


def _available_memory() -> int:
    """Return the available bytes of this machine, or of this container if it has a limit."""
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):  # counts what the system can reclaim, too
            available = 1024 * int(line.split()[1])
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    return min(available, max(0, int(limit) - int(used))) if limit.isdigit() and used.isdigit() else available


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def grown(num_frames: int, shortfall: int, limit: int) -> int:
    """Return the size of a pool that lacks `shortfall` frames: twice as large, or more if needed, up to `limit`.

    A size above half of the limit becomes the limit, as one more step would not fit beside such a pool.
    """
    size = max(2 * num_frames, num_frames + shortfall)
    return limit if size > limit // 2 else size
