"""Level: a tier at its place in a stack, what waits to be stored there, and whether the tier is trusted now.

    open ──16 failures in a row──▶ closed for 5 s ──▶ open; the next failure closes it again, a success resets the count
     └──no page ended for 30 s───▶ closed until one ends; the jobs are cancelled

A closed level is not asked, and its backlog waits. An exception of the tier counts as a failure and reaches no caller.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeVar
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from pagedkv.tiers.pool_view import PoolView
from pagedkv.tiers.tier import Job, Key, Op, Result, Tier

_LOG = logging.getLogger(__name__)

FAILURES: Final = 16
"""Pages in a row that fail before the tier is skipped."""
SKIPPED: Final = 5.0
"""Seconds for which it is skipped."""
STALLED: Final = 30.0
"""Seconds without the end of a page after which the jobs of a tier are given up."""

Waiting = tuple[int, int, Key]
Answer = TypeVar("Answer")


class Level:
    """A tier of a stack. backlog: (frame, stamp, key) of pages that are to be stored, the oldest first.

    of_states: whether its pages are the recurrent states of sequences. pool: the frames that it serves.
    """

    pool: PoolView

    def __init__(self, tier: Tier, *, of_states: bool = False) -> None:
        self.tier: Tier = tier
        self.of_states: bool = of_states
        self.backlog: deque[Waiting] = deque()
        self._jobs: WeakSet[Job] = WeakSet()
        self._num_begun = self._num_ended = 0  # pages
        self._failures, self._closed_until = 0, 0.0
        self._moved_at = time.monotonic()
        self._is_stalled = self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether the tier is asked now."""
        return not self._is_stalled and not self._is_closed and time.monotonic() >= self._closed_until

    @property
    def num_pending(self) -> int:
        """Pages that the tier is reading or writing, or has not reported."""
        pending = self.tier.num_pending
        return self._num_begun - self._num_ended if pending is None else pending

    @property
    def max_stores(self) -> int:
        """Pages that the tier takes now."""
        return self._guarded(lambda: self.tier.max_stores, 0) if self.is_open else 0

    def lookup(self, keys: Sequence[Key]) -> npt.NDArray[np.bool_]:
        """bool [n]: see Tier.lookup. A closed level seems to have nothing."""
        nothing = np.zeros(len(keys), np.bool_)
        return self._guarded(lambda: self.tier.lookup(keys), nothing) if self.is_open else nothing

    def submit(self, op: Op, keys: Sequence[Key], frames: Sequence[int]) -> Job | None:
        """See Tier.submit. None: the tier has refused, and no page was begun."""
        if not self.num_pending:
            self._moved_at = time.monotonic()
        self._num_begun += len(keys)  # first: an interrupt must not hide pages that the tier moves
        job = self._guarded(lambda: self.tier.submit(op, keys, frames), None)
        if job is None:
            self._num_begun -= len(keys)
        else:
            self._jobs.add(job)
        return job

    def poll(self) -> list[Result]:
        """See Tier.poll. Gives up the jobs of a tier that stalls, and closes the level if it fails."""
        none: list[Result] = []
        results = self._guarded(self.tier.poll, none)
        now = time.monotonic()
        if results:
            self._num_ended += len(results)
            self._moved_at, self._is_stalled = now, False
            for result in results:
                if result.why.startswith("failed"):
                    self._count_failure(result.why)
                elif result.ok:
                    self._failures = 0
        elif now - self._moved_at > STALLED and not self._is_stalled and self.num_pending:
            self._is_stalled = True
            self.cancel()
            _LOG.warning("the %s tier has moved no page for %.0f s; it is skipped", self.tier.name, STALLED)
        return results

    def touch(self, keys: Sequence[Key]) -> None:
        """See Tier.touch."""
        if keys:
            self._guarded(lambda: self.tier.touch(keys), None)

    def set_quota(self, tenant: bytes, share: float | None) -> None:
        """See Tier.set_quota."""
        self._guarded(lambda: self.tier.set_quota(tenant, share), None)

    def forget(self) -> None:
        """Drop the backlog, and all pages of the tier: see Tier.forget."""
        self.backlog.clear()
        self.cancel()
        self._guarded(self.tier.forget, None)

    def close(self, timeout: float) -> None:
        """Ask the tier for nothing any more, and close it."""
        self._is_closed = True
        self.backlog.clear()
        self._guarded(lambda: self.tier.close(timeout), None)

    def cancel(self) -> None:
        """Ask the tier to skip what it has not begun."""
        for job in list(self._jobs):
            job.cancel()

    def _guarded(self, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Return the answer of `call`. An exception is a failure of the tier, and the answer is `otherwise`."""
        try:
            return call()
        except Exception as error:  # also of a client library: no caller of plan or commit can mend it
            if not self._failures:
                _LOG.warning("the %s tier raised %s: %s", self.tier.name, type(error).__name__, error)
            self._count_failure(f"{type(error).__name__}: {error}")
            return otherwise

    def _count_failure(self, why: str) -> None:
        self._failures += 1
        if self._failures >= FAILURES and time.monotonic() >= self._closed_until:
            self._closed_until = time.monotonic() + SKIPPED
            _LOG.warning("the %s tier fails (%s); it is skipped for %.0f s", self.tier.name, why, SKIPPED)
