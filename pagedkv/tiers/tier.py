"""The interface of a tier: pages by name, frames by number, and bytes that move between them in the background.

    owner thread     register(pool) → lookup(keys) → submit(op, keys, frames) → poll() → poll() ... → close()
    tier's threads   move the bytes; they never call the manager

Rules of every tier:

1. `lookup` is a hint. Only a load that `poll` reports as ok counts.
2. A load is ok if all bytes have arrived, the checksum stored with them fits, and the key stored with them is the one
   asked for. Any other load is a miss: the bytes in the frame are garbage then, and the frame is given back.
3. A store reads a frame that may be evicted meanwhile. So the tier takes `pool.stamp(frame)` when the store is
   submitted, and keeps the bytes only if `pool.holds(frame, stamp)` when it has read them all. The manager raises a
   frame's generation before it is written to again, so bytes read before such a look are those of the page.
4. Each page of a job ends exactly once, ok or not. A frame may be reused as soon as its page has ended, so a tier that
   reports the end of a load writes no more into its frame.
5. No call waits for bytes, but `close` and `forget`.

This file knows names, frame numbers and bytes; it must not know tokens, layers or sequences.
"""

from __future__ import annotations

import enum
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.tiers.runs import copy_runs

KEY_BYTES: Final = 32

Numbers = npt.NDArray[np.int64]


class Op(enum.Enum):
    """The direction of a job."""

    LOAD = "load"
    STORE = "store"


class Key(NamedTuple):
    """The name of a page of one layer group, 32 bytes, and the tenant that its memory is charged to.

    The name covers tokens, tenant, salts, layer group, geometry and dtype of the cache, model and rank (names.py).
    """

    name: bytes
    tenant: bytes = b""


class Result(NamedTuple):
    """The end of one page of a job. why: the reason if not ok: "gone", "corrupt", "changed", "full", "failed: ..."."""

    job: int
    key: Key
    ok: bool
    why: str = ""


_numbers = itertools.count(1)


@dataclass(eq=False)
class Job:
    """A job under way. cancel() makes the tier skip the pages that it has not begun; each of them still ends."""

    op: Op
    number: int = field(default_factory=_numbers.__next__)
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Skip the pages that have not begun."""
        self.is_cancelled = True


@dataclass
class TierStats:
    """Counters of one tier since it was made.

    asked, hits:    pages of prompts that were looked up here, and those that the lookup named.
    loaded, stored: pages that were moved and verified. *_bytes, *_seconds: their bytes, and the time that moving took.
    corrupt:        loads whose checksum or key did not fit. failed: jobs' pages that ended with an error of the system.
    refused:        stores for which there was no room. changed: stores whose frame was reused while it was read.
    pages, slots:   pages held now, and the most that there may be.
    """

    asked: int = 0
    hits: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    loaded_seconds: float = 0.0
    stored: int = 0
    stored_bytes: int = 0
    stored_seconds: float = 0.0
    corrupt: int = 0
    failed: int = 0
    refused: int = 0
    changed: int = 0
    pages: int = 0
    slots: int = 0

    def copy(self) -> TierStats:
        """Return a copy."""
        return replace(self)


class PoolView:
    """The frames of a pool as runs of bytes, and a way to see whether a frame still holds the page it held.

    frames:      uint8 [F, frame_bytes], the bytes. A resize of the pool replaces them, while no tier moves any.
    states:      returns the generation of each frame and whether it is published; called by any thread.
    """

    def __init__(
        self, frames: torch.Tensor, states: Callable[[], tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]]
    ) -> None:
        self.frames: torch.Tensor = frames
        self.frame_bytes: int = frames.shape[1]
        self.is_cuda: bool = frames.device.type == "cuda"
        self._states = states

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

    def read(self, frames: Numbers, into: torch.Tensor, rows: Numbers) -> None:
        """Copy each of `frames` (int64 [n]) to a row of `into` (uint8 [N, frame_bytes], on the host), and wait."""
        self._copy(into, rows, self.frames, frames)

    def write(self, frames: Numbers, source: torch.Tensor, rows: Numbers) -> None:
        """Copy rows of `source` (uint8 [N, frame_bytes], on the host) to `frames` (int64 [n]), and wait."""
        self._copy(self.frames, frames, source, rows)

    def _copy(self, target: torch.Tensor, at: Numbers, source: torch.Tensor, rows: Numbers) -> None:
        if not self.is_cuda:
            size = self.frame_bytes
            copy_runs(target.data_ptr() + at * size, source.data_ptr() + rows * size, size)
            return
        # On a stream of this thread, after all work launched so far.
        device = self.frames.device
        new = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = _streams.setdefault((threading.get_ident(), device.index or 0), new)
        stream.wait_stream(torch.cuda.default_stream(device))
        with torch.cuda.stream(stream):
            for to, row in zip(at.tolist(), rows.tolist(), strict=True):
                target[to].copy_(source[row], non_blocking=True)
        stream.synchronize()


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


class Tier(Protocol):
    """Memory that keeps pages by name. One thread calls it, the owner of the cache."""

    name: str

    def register(self, pool: PoolView, fingerprint: bytes) -> None:
        """Serve `pool` from now on. fingerprint: 32 bytes that two caches share if their bytes mean the same.

        Raises: InvalidRequest if no frame fits, or the tier serves another cache
        """

    def lookup(self, keys: Sequence[Key]) -> npt.NDArray[np.bool_]:
        """bool [n]: whether the tier seems to have each page. A hint: nothing is reserved."""

    def submit(self, op: Op, keys: Sequence[Key], frames: Sequence[int]) -> Job:
        """Begin to load pages into frames, or to store published frames under keys. A page stored twice is kept once.

        Frames of a load must not be read or written by others until `poll` has reported their pages.
        """

    def poll(self) -> list[Result]:
        """Return the pages that have ended since the last call."""

    @property
    def room(self) -> int:
        """Pages that may be stored now. More wait in a backlog, from which pages go that the pool evicts meanwhile."""

    @property
    def num_pending(self) -> int:
        """Pages of jobs that `poll` has not reported."""

    def touch(self, keys: Sequence[Key]) -> None:
        """Count a use of these pages if the tier has them: the pool has evicted its copies."""

    def set_quota(self, tenant: bytes, share: float | None) -> None:
        """Limit a tenant to this share of the tier; None for no limit."""

    def forget(self) -> None:
        """Drop all pages, as after an update of the weights. Stores under way are dropped, too."""

    def stats(self) -> TierStats:
        """Return the counters."""

    def close(self) -> None:
        """Stop the threads, end all jobs, and give the memory back. A second call does nothing."""
