"""The speed of a tier by the size of a frame: stores and loads of many frames, beside bare transfers of the same bytes.

The tier is driven as a cache drives it, by `submit` and `poll`; its own thread moves the bytes. Beside host memory one
thread copies the same frames by memcpy. Beside the disk as many threads as the tier has write and read the same number
of bytes directly, in pieces of the same size, with nothing between. All take turns in an order drawn anew. A disk has
more threads than the machine may have cores, and these switch among themselves. So a turn of a disk is left out for a
slow clock or a change of memory's speed, and not for context switches.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from typing import Any, Final

import numpy as np

from pagedkv.bench.clock import Elsewhere, Step, compare, in_turn, ratios
from pagedkv.kernels import huge_pages
from pagedkv.tiers.disk import DiskTier
from pagedkv.tiers.host import HostTier
from pagedkv.tiers.pool_view import PoolView
from pagedkv.tiers.slots import SlotTier
from pagedkv.tiers.tier import Key, Op

Row = dict[str, Any]
SIZES: Final = (65_536, 262_144, 1_048_576, 1_835_008)
"""Bytes of a frame: 1, 4, 16 and 28 layers with 8 heads of 128, 16 tokens, in bfloat16."""
MOVED: Final = 256 << 20
"""Bytes that each repetition moves."""
THREADS: Final = 2
OURS: Final = "pagedkv"
BARE: Final = {"host": "memcpy, one thread", "disk": f"direct I/O, {THREADS} threads"}
"""tier: the variant that moves the same bytes without it."""
MUSTS: Final = {"host": 0.75, "disk": 0.8}
"""tier: the share of the bare transfer that is promised, from 256 KiB a frame on."""


def pool_of(size: int, num_frames: int) -> PoolView:
    """Return a pool without a manager, of frames of `size` bytes, each with other random bytes."""
    frames = huge_pages.allocate(num_frames * size).view(num_frames, size)
    frames.random_(0, 256)
    states = np.zeros(num_frames, np.uint32), np.ones(num_frames, np.uint8)
    return PoolView(frames, lambda: states)


@dataclass
class Driven:
    """A tier over a pool of frames without a manager: every frame holds its page at all times.

    pause: the seconds between two looks at what has arrived
    """

    tier: SlotTier
    num_frames: int
    next_key: int = 0
    pause: float = 0.0002

    def store(self) -> Callable[[], None]:
        """Return a call that stores all frames under keys that the tier has not seen."""
        keys = [Key((self.next_key + i).to_bytes(32, "little")) for i in range(self.num_frames)]
        self.next_key += self.num_frames
        return lambda: self._run(Op.STORE, keys)

    def load(self) -> Callable[[], None]:
        """Return a call that loads the pages stored last into all frames."""
        first = self.next_key - self.num_frames
        keys = [Key((first + i).to_bytes(32, "little")) for i in range(self.num_frames)]
        return lambda: self._run(Op.LOAD, keys)

    def _run(self, op: Op, keys: list[Key]) -> None:
        self.tier.submit(op, keys, range(self.num_frames))
        failed = 0
        while self.tier.num_pending:
            time.sleep(self.pause)
            failed += sum(not result.ok for result in self.tier.poll())
        failed += sum(not result.ok for result in self.tier.poll())
        assert not failed, f"{failed} of {len(keys)} pages did not arrive"


def rows(folder: Path | None, repetitions: int, sizes: tuple[int, ...] = SIZES, moved: int = MOVED) -> Iterator[Row]:
    """Yield the rows of each size. folder: where the disk tier lies; None for a temporary one."""
    for size in sizes:
        yield from _rows_of(size, folder, repetitions, moved)


def _rows_of(size: int, folder: Path | None, repetitions: int, moved: int) -> Iterator[Row]:
    num_frames = max(1, moved // size)
    pool, num_slots = pool_of(size, num_frames), 2 * num_frames
    with tempfile.TemporaryDirectory(dir=folder) as own:
        tiers = {
            "host": HostTier(num_slots * size),
            "disk": DiskTier(own, num_slots * (size + 8192), threads=THREADS),
        }
        with _bare_copy(pool) as copy, _bare_file(Path(own) / "bare", pool) as (write, read):
            driven = {name: Driven(tier, num_frames) for name, tier in tiers.items()}
            steps: dict[tuple[str, str, str], Step] = {}
            for kind, one in driven.items():
                one.tier.register(pool, bytes(32))
                one.store()()
                steps |= {(kind, OURS, "store"): one.store, (kind, OURS, "load"): one.load}
            steps["host", BARE["host"], "store"] = lambda: copy
            steps |= {("disk", BARE["disk"], "store"): lambda: write, ("disk", BARE["disk"], "load"): lambda: read}
            steps = {name: unswitched(step) if name[0] == "disk" else step for name, step in steps.items()}
            timings = in_turn(steps, repetitions)
            timings["host", BARE["host"], "load"] = timings["host", BARE["host"], "store"]  # a copy is a copy
        for tier in tiers.values():
            tier.close()
    num_bytes = num_frames * size
    for (kind, variant, way), timing in timings.items():
        row: Row = {"case": way, "frame": size, "tier": kind, "variant": variant, "unit": "GB/s"}
        row |= timing.fields(lambda seconds: num_bytes / seconds / 1e9)
        if variant == OURS:
            bare = timings[kind, BARE[kind], way]
            row |= {"of_bare": compare(bare, timing, truediv), "ratios": ratios(bare, timing, truediv)}
            row["must"] = MUSTS[kind] if size >= 262_144 else None
        yield row


def unswitched(step: Step) -> Step:
    """Return a step that is timed here, and whose switches do not count."""

    def prepare() -> Callable[[], Elsewhere]:
        run = step()

        def timed() -> Elsewhere:
            began = time.perf_counter()
            run()
            return Elsewhere(time.perf_counter() - began, clean=True)

        return timed

    return prepare


@contextmanager
def _bare_copy(pool: PoolView) -> Iterator[Callable[[], None]]:
    """Yield a call that copies all frames, one by one, to memory of its own."""
    target = huge_pages.allocate(pool.frames.numel()).view_as(pool.frames)
    target.zero_()
    size, source, there = pool.frame_bytes, pool.frames.data_ptr(), target.data_ptr()

    def copy() -> None:
        for at in range(0, pool.frames.numel(), size):
            ctypes.memmove(there + at, source + at, size)

    yield copy


@contextmanager
def _bare_file(path: Path, pool: PoolView) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Yield calls that write all frames to a file, and read them, directly if the file system can."""
    flags = os.O_RDWR | os.O_CREAT
    try:
        file = os.open(path, flags | os.O_DIRECT)
    except OSError:
        file = os.open(path, flags)
    size = pool.frame_bytes
    region = np.frombuffer(mmap.mmap(-1, pool.frames.numel()), np.uint8).reshape(pool.frames.shape)
    region[:] = pool.frames.numpy()
    with ThreadPoolExecutor(THREADS) as threads:

        def each(transfer: Callable[[int], object]) -> None:
            list(threads.map(transfer, range(len(region))))

        try:
            yield (
                lambda: each(lambda i: os.pwrite(file, region[i].data, i * size)),
                lambda: each(lambda i: os.preadv(file, [region[i].data], i * size)),
            )
        finally:
            os.close(file)
