"""PoolView: the frames of a pool as a tier sees them, as runs of bytes. It knows no tokens, layers or sequences.

Runs in host memory are copied in one call without the GIL, so that other threads compute meanwhile. The call computes
checksums of runs of 241 bytes and more while it copies (csrc/cpu/moves/runs.cpp). Without the extension, and of shorter
runs, they are computed of what has arrived. A call that has time lets the threads of attention and of linear operations
copy (csrc/cpu/moves/spread.hpp). Copies from and to a GPU run on a stream of the calling thread, after a fence that the
owner of the pool has recorded.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.kernels import cpu
from pagedkv.tiers.checksum import LEAST_LONG, SUM_BYTES, checksum

Numbers = npt.NDArray[np.int64]
States = tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]
Fence = torch.cuda.Event | None


class _How(TypedDict, total=False):
    """The options of _copy_runs. A copy from or to a GPU takes none of its `seconds`."""

    is_summed: bool
    seconds: float


class PoolView:
    """The frames of a pool as runs of bytes, and a way to see whether a frame still holds the page it held.

    frames:      uint8 [F, frame_bytes], the bytes. A resize of the pool replaces them, while no tier moves any.
    states:      returns the generation of each frame and whether it is published; called by any thread.
    """

    def __init__(self, frames: torch.Tensor, states: Callable[[], States]) -> None:
        self.frames: torch.Tensor = frames
        self.frame_bytes: int = frames.shape[1]
        self.is_cuda: bool = frames.device.type == "cuda"
        self._states = states
        self._streams: dict[int, torch.cuda.Stream] = {}  # by thread

    def stamp(self, frame: int) -> int:
        """Return a number that `holds` compares with."""
        return int(self._states()[0][frame])

    def holds(self, frame: int, stamp: int) -> bool:
        """Return whether `frame` is published, and was not taken again since its stamp was read. Any thread may ask."""
        generations, published = self._states()
        return bool(published[frame]) and int(generations[frame]) == stamp

    def hold(self, frames: Numbers, stamps: Numbers) -> npt.NDArray[np.bool_]:
        """bool [n]: `holds` of each of `frames` (int64 [n])."""
        generations, published = self._states()
        held: npt.NDArray[np.bool_] = (published[frames] != 0) & (generations[frames] == stamps)
        return held

    def bytes_of(self, frame: int) -> npt.NDArray[np.uint8]:
        """Return uint8 [frame_bytes]: the frame itself, in host memory."""
        return self.frames[frame].numpy()

    def is_aligned(self, size: int) -> bool:
        """Return whether each frame lies in host memory and begins and ends at a multiple of `size` bytes."""
        return not self.is_cuda and self.frames.data_ptr() % size == 0 and self.frame_bytes % size == 0

    def fence(self) -> torch.cuda.Event | None:
        """Return the point that the owner's current stream has reached, for `read` and `write`; None for a CPU.

        The owner calls it when it submits a job: a job must not read what the owner has launched and not computed.
        """
        if not self.is_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.frames.device))  # type: ignore[no-untyped-call]
        return event

    def read(
        self, frames: Numbers, into: torch.Tensor, rows: Numbers, fence: Fence = None, **how: Unpack[_How]
    ) -> list[bytes]:
        """Copy each of `frames` (int64 [n]) to a row of `into` (uint8 [N, frame_bytes], on the host), and wait.

        Return the checksum (without a key) of each page if `is_summed`, else an empty list.
        """
        return self._copy((into, rows), (self.frames, frames), fence, **how)

    def write(
        self, frames: Numbers, source: torch.Tensor, rows: Numbers, fence: Fence = None, **how: Unpack[_How]
    ) -> list[bytes]:
        """Copy rows of `source` (uint8 [N, frame_bytes], on the host) to `frames` (int64 [n]), and wait.

        Return the checksum (without a key) of each page if `is_summed`, else an empty list.
        """
        return self._copy((self.frames, frames), (source, rows), fence, **how)

    def _copy(
        self, to: tuple[torch.Tensor, Numbers], source: tuple[torch.Tensor, Numbers], fence: Fence, **how: Unpack[_How]
    ) -> list[bytes]:
        (target, places), (origin, rows) = to, source
        if not self.is_cuda:
            size = self.frame_bytes
            to_bytes, from_bytes = target.data_ptr() + places * size, origin.data_ptr() + rows * size
            return _copy_runs(to_bytes, from_bytes, size, **how)
        stream = self._stream()
        if fence is not None:
            stream.wait_event(fence)
        with torch.cuda.stream(stream):
            for place, row in zip(places.tolist(), rows.tolist(), strict=True):
                target[place].copy_(origin[row], non_blocking=True)
        stream.synchronize()
        on_host, lines = (target, places) if origin is self.frames else (origin, rows)
        return [checksum(on_host[line].numpy(), b"") for line in lines.tolist()] if how.get("is_summed") else []

    def _stream(self) -> torch.cuda.Stream:
        """Return the stream of the calling thread."""
        thread = threading.get_ident()
        stream = self._streams.get(thread)
        if stream is None:
            stream = self._streams[thread] = torch.cuda.Stream(self.frames.device)  # type: ignore[no-untyped-call]
        return stream


def _copy_runs(
    targets: Numbers, sources: Numbers, num_bytes: int, *, is_summed: bool = False, seconds: float = 0.0
) -> list[bytes]:
    """Copy `num_bytes` bytes from each source to its target. Runs must not overlap.

    seconds: how long the copy of all runs may take. Threads that compute on all CPUs of this thread copy meanwhile; if
        none does, this thread copies after a quarter of the time. With 0, and without the extension, it copies at once.
    Return the checksum (without a key) of each run if `is_summed`, else an empty list.
    Shapes: targets, sources int64 [n], addresses
    """
    is_fused = is_summed and num_bytes >= LEAST_LONG and not cpu.missing()
    sums = np.empty((len(targets) if is_fused else 0, SUM_BYTES), np.uint8)
    if not cpu.missing():
        into = sums.ctypes.data if is_fused else 0
        cpu.extension().copy_runs(targets.ctypes.data, sources.ctypes.data, len(targets), num_bytes, into, seconds)
    else:
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(target, source, num_bytes)
    if is_fused or not is_summed:
        return [row.tobytes() for row in sums]
    runs = [np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(target)) for target in targets.tolist()]
    return [checksum(run, b"") for run in runs]
