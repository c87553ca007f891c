"""Snapshots on disk, beside a bare file of as many bytes in the same folder.

snapshot  computes digests, writes pages, waits for the disk      beside a write that waits for the disk
restore   reads pages that are in no cache of the system, verifies them      beside such a read
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch

from pagedkv import KVSpec, PagedKVCache
from pagedkv.bench.bandwidth.ceilings import Bound
from pagedkv.bench.bandwidth.subjects import Subject

SPEC: Final = KVSpec(8, 8, 128, block_size=16, dtype="bfloat16")
"""Frames of 512 KiB."""


def bounds(folder: Path, num_bytes: int) -> dict[str, Bound]:
    """Return the ceilings of a disk: a file that is written and read as a whole."""
    path, content = folder / "bare", torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).numpy()
    path.write_bytes(content)
    buffer = bytearray(num_bytes)

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())

    def reading() -> Callable[[], object]:
        _forget(path)
        return lambda: _read(path, buffer)

    return {
        "disk write": Bound("disk write", num_bytes, lambda: write, is_memory=False),
        "disk read": Bound("disk read", num_bytes, reading, is_memory=False),
    }


def subjects(folder: Path, pages: int) -> Iterator[Subject]:
    """Yield a snapshot of a cache of so many pages, and its restore into an empty cache."""
    full, empty = _filled(pages), PagedKVCache(SPEC, num_frames=pages + 1)
    full.snapshot(folder / "kept")

    def restoring() -> Callable[[], object]:
        empty.forget()
        for path in (folder / "kept").iterdir():
            _forget(path)
        return lambda: _restored(empty, folder / "kept", pages)

    axes = {"MiB": pages * SPEC.frame_bytes >> 20, "file_system": file_system(folder)}
    num_bytes = pages * SPEC.frame_bytes
    yield Subject("snapshot", axes, num_bytes, "disk write", {"pagedkv": lambda: lambda: full.snapshot(folder / "new")})
    yield Subject("restore", axes, num_bytes, "disk read", {"pagedkv": restoring})


def _filled(pages: int) -> PagedKVCache:
    cache = PagedKVCache(SPEC, num_frames=pages + 1)
    ids = np.random.default_rng(0).integers(0, 30_000, pages * SPEC.block_size).astype(np.int32)
    space = cache.open()
    batch = cache.plan([space], [len(ids)])
    cache.storage.frames.random_(0, 256)
    cache.commit(batch, ids)
    return cache


def _restored(cache: PagedKVCache, folder: Path, pages: int) -> None:
    found = cache.restore(folder)
    assert found.pages == pages, found


def _read(path: Path, buffer: bytearray) -> None:
    with path.open("rb", buffering=0) as file:
        file.readinto(buffer)


def _forget(path: Path) -> None:
    """Let the system drop its copy of a file that is on disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def file_system(folder: Path) -> str:
    """Return the name of the file system that holds a folder, such as ext4; in tmpfs the disk is memory."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    above = [words for words in mounts if folder.resolve().is_relative_to(words[1])]
    return max(above, key=lambda words: len(words[1]))[2] if above else "unknown"
