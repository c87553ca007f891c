"""The interface of a tier: pages by name, frames by number, and bytes that move between them in the background.

    owner thread     register(pool) → lookup(keys) → submit(op, keys, frames) → poll() → poll() ... → close()
    tier's threads   move the bytes; they never call the manager

A tier of your own is a subclass of Tier with these five methods. All others have defaults. A tier of equal slots is a
SlotTier (slots.py), one in a shared store a SharedTier (shared/tier.py). Its text, as `disk:/fast:64GiB`, is an entry
in from_text.py.

Rules of every tier:

1. `lookup` is a hint. Only a load that `poll` reports as ok counts.
2. A load is ok if all bytes have arrived, the checksum stored with them fits, and the key stored with them is the one
   asked for. Any other load is a miss: the bytes in the frame are garbage then, and the frame is given back.
3. A store reads a frame that may be evicted meanwhile. So the tier takes `pool.stamp(frame)` when the store is
   submitted, and keeps the bytes only if `pool.holds(frame, stamp)` when it has read them all. The manager raises a
   frame's generation before it is written to again, so bytes read before such a look are those of the page.
4. Each page of a job ends exactly once, ok or not. A frame may be reused as soon as its page has ended, so a tier that
   reports the end of a load writes no more into its frame.
5. No call waits for bytes, but `close` and `forget`, which wait a limited time.

A tier needs no deadlines of its own: the stack gives up jobs without progress, and skips a tier that fails (level.py).
"""

from __future__ import annotations

import enum
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.tiers.pool_view import PoolView

if TYPE_CHECKING:
    import torch

KEY_BYTES: Final = 32
CLOSING: Final = 5.0
"""Seconds that the end of a tier may take by default."""


class Op(enum.Enum):
    """The direction of a job."""

    LOAD = "load"
    STORE = "store"


class Key(NamedTuple):
    """The name of a page of one layer group, 32 bytes, and the tenant that its memory is charged to.

    The name covers tokens, tenant, salts, layer group, geometry and dtype of the cache, model and rank (tier_names.py).
    """

    name: bytes
    tenant: bytes = b""


class Result(NamedTuple):
    """The end of one page of a job.

    why: the reason if not ok: "gone", "corrupt", "changed", "full", "there" (stored by another process), "cancelled",
        or "failed: ..." for an error of the system. Only the last counts against the tier.
    """

    job: int
    key: Key
    ok: bool
    why: str = ""


_numbers = itertools.count(1)


@dataclass(eq=False)
class Job:
    """A job under way. cancel() makes the tier skip the pages that it has not begun; each of them still ends.

    is_dropped: whether `forget` came while its pages were moved: they are not kept.
    fence:      the point in the owner's work that the job follows, see PoolView.fence.
    """

    op: Op
    number: int = field(default_factory=_numbers.__next__)
    is_cancelled: bool = False
    is_dropped: bool = False
    fence: torch.cuda.Event | None = None

    def cancel(self) -> None:
        """Skip the pages that have not begun."""
        self.is_cancelled = True


@dataclass
class TierStats:
    """Counters of one tier since it was made.

    asked, hits:    pages of prompts that were looked up here, and those that the lookup named.
    loaded, stored: pages that were moved and verified. *_bytes, *_seconds: their bytes, and the time that moving took,
                    which a limit makes longer.
    corrupt:        loads whose checksum or key did not fit. failed: jobs' pages that ended with an error of the system.
    refused:        stores that found the tier full. changed: stores whose frame was reused while it was read.
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


class Tier(ABC):
    """Memory that keeps pages by name. One thread calls it, the owner of the cache.

    name:       its name in stats; the stack numbers the second of two equal names.
    is_lasting: whether its pages outlive the process, or other processes read them. Then the cache must have a name for
                the weights, see PagedKVCache, and `TierStack.close` stores what waits.
    """

    name: str = "tier"
    is_lasting: bool = False

    @abstractmethod
    def register(self, pool: PoolView, fingerprint: bytes) -> None:
        """Serve `pool` from now on. fingerprint: 32 bytes that two caches share if their bytes mean the same.

        It covers geometry, dtype, model and rank, as each key does.
        Raises: InvalidRequest if no frame fits, or the tier serves another cache
        """

    @abstractmethod
    def lookup(self, keys: Sequence[Key]) -> npt.NDArray[np.bool_]:
        """bool [n]: whether the tier seems to have each page. A hint: nothing is reserved."""

    @abstractmethod
    def submit(self, op: Op, keys: Sequence[Key], frames: Sequence[int]) -> Job:
        """Begin to load pages into frames, or to store published frames under keys. A page stored twice is kept once.

        Frames of a load must not be read or written by others until `poll` has reported their pages. An exception
        means that no page was begun.
        """

    @abstractmethod
    def poll(self) -> list[Result]:
        """Return the pages that have ended since the last call."""

    @abstractmethod
    def close(self, timeout: float = CLOSING) -> None:
        """Stop the threads, end all jobs, and give the memory back. A second call does nothing.

        timeout: seconds after which a thread that hangs is left alone, with the memory that it may touch.
        """

    @property
    def num_pending(self) -> int | None:
        """Pages of jobs that `poll` has not reported. None: the stack counts them.

        The stack cannot count what an interrupt (KeyboardInterrupt) took from it between `poll` and its own books:
        frames of such loads stay taken until the tier is closed.
        """
        return None

    @property
    def max_stores(self) -> int:
        """Pages that one submit may store now. More wait in a backlog, from which pages go that the pool evicts."""
        return 64

    def touch(self, keys: Sequence[Key]) -> None:  # noqa: B027 (a default)
        """Count a use of these pages if the tier has them: the pool has evicted its copies."""

    def set_quota(self, tenant: bytes, share: float | None) -> None:  # noqa: B027
        """Limit a tenant to this share of the tier; None for no limit."""

    def forget(self) -> None:  # noqa: B027
        """Drop all pages, as after an update of the weights. Stores under way are dropped, too.

        The pages are not asked for afterwards: the cache has begun to use other names.
        """

    def stats(self) -> TierStats:
        """Return the counters."""
        return TierStats()
