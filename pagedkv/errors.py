"""Errors: what was asked, what there is, what to do.

Everything this package raises on purpose is a `PagedKVError`. An error carries its numbers as attributes, so that an
engine can act on them, and a sentence, so that a person can. An `assert` in the package guards against a bug of ours
only.
"""

from __future__ import annotations

import copyreg
from typing import Any


class PagedKVError(Exception):
    """The base of every error that this package raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let an error cross processes. It is made again without __init__, whose arguments it may not have."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class OutOfFrames(PagedKVError):
    """Raised when the pool cannot serve a `plan`, or a `resize` cannot hold the mapped frames. Nothing was changed.

    Preempt (release) sequences that hold `shortfall` frames, wait for the pending frames, or enlarge the pool; then
    call again.
    needed, free, evictable, pending: frames. shortfall = needed - free - evictable.
    pool: "pages", or "states" if frames for recurrent states are short.
    """

    pool: str = "pages"

    def __init__(self, needed: int, free: int, evictable: int = 0, pending: int = 0) -> None:
        self.needed: int = needed
        self.free: int = free
        self.evictable: int = evictable
        self.pending: int = pending
        self.shortfall: int = needed - free - evictable
        super().__init__(
            f"this step needs {needed} frames; {free} are free, {evictable} evictable and {pending} pending. "
            f"Preempt sequences that hold at least {self.shortfall} frames, wait for the pending ones, or raise "
            "num_frames or memory."
        )


class QuotaExceeded(OutOfFrames):
    """Raised by `plan` when the step would take a tenant over its hard quota. Nothing was changed.

    Preempt sequences of this tenant that hold `shortfall` frames, or raise its quota: frames of other tenants do not
    help.
    tenant: its name. quota, used, evictable: its frames. free: the frames that its quota leaves.
    """

    def __init__(self, tenant: bytes, needed: int, quota: int, used: int, evictable: int) -> None:
        super().__init__(needed, quota - used, evictable)
        self.tenant: bytes = tenant
        self.quota: int = quota
        self.used: int = used
        self.args: tuple[Any, ...] = (
            f"this step needs {needed} frames for tenant {tenant!r}, which holds {used} of at most {quota}, "
            f"{evictable} of them evictable. Preempt sequences of this tenant that hold at least "
            f"{self.shortfall} frames, or raise its hard quota.",
        )


class InvalidRequest(PagedKVError, ValueError):
    """Raised when an argument makes no sense. Nothing was changed; the text names the values that are valid."""


class StaleHandle(PagedKVError):
    """Raised when a released AddressSpace is used; its number may belong to another space now (I8).

    Drop the handle at release, and open or fork a new space. PAGEDKV_DEBUG=3 adds the place of the release to the text.
    """


class DoubleRelease(StaleHandle):
    """Raised when a space is released, or a pin given back, for the second time. Drop the handle after the first."""


class PlanConflict(PagedKVError):
    """Raised when a plan is settled twice or out of order, or is outstanding where the operation needs it settled.

    Commit or abort the plans of a space before fork or truncate; abort the newest plan of a space first.
    """


class QueueFull(PagedKVError):
    """Raised by `Engine.submit` when max_waiting requests wait already. Submit again later, or raise the limit.

    waiting, max_waiting: requests.
    """

    def __init__(self, waiting: int, max_waiting: int) -> None:
        self.waiting: int = waiting
        self.max_waiting: int = max_waiting
        super().__init__(
            f"{waiting} requests wait already and Limits.max_waiting is {max_waiting}; submit again later, or raise it"
        )


class EngineStopped(PagedKVError):
    """Raised by a stream whose AsyncEngine is not running: it was closed, or its steps failed again and again."""


class EventsLost(PagedKVError):
    """Raised by `events(since)` when the log has overwritten events that the reader has not seen.

    Begin again from a snapshot of the events. since: the last event that the reader has. first_available: the first in
    the log.
    """

    def __init__(self, since: int, first_available: int) -> None:
        self.since: int = since
        self.first_available: int = first_available
        super().__init__(
            f"events {since + 1} to {first_available - 1} are no longer in the log; begin again from "
            "events_snapshot(), and read more often or keep more events (events=)"
        )


class ConcurrentUse(PagedKVError):
    """Raised when a thread enters a manager during a call of another thread, or one that another thread owns.

    Call the manager from one thread, or hold a lock around its calls. A thread that takes the work over calls `own()`.
    """


class KernelUnavailable(PagedKVError):
    """Raised when no kernel, or not the one named by `backend`, can run a case.

    Change the option that the kernels object to, or name no backend. reasons: the objections of each candidate, by its
    name.
    """

    def __init__(self, asked: str, reasons: dict[str, list[str]]) -> None:
        self.reasons: dict[str, list[str]] = reasons
        lines = "".join(f"\n  {name}: {why}" for name, objections in reasons.items() for why in objections)
        super().__init__(f"no kernel can serve {asked}:{lines}\nname no kernel (backend=None), or change what is asked")


class CheckpointError(PagedKVError):
    """Raised when a model folder is missing, damaged or of an unknown kind. The text names the file and its fault."""


class InvariantViolation(PagedKVError, AssertionError):
    """Raised by `check()` for a broken law of DESIGN (I1-I9): a bug of pagedkv, or of code that wrote into its arrays.

    Report it with the text. law: its number; frame, asid: the place, or None if the place is not a frame or not a
    space.
    """

    def __init__(self, message: str, *, law: str = "", frame: int | None = None, asid: int | None = None) -> None:
        self.law: str = law
        self.frame: int | None = frame
        self.asid: int | None = asid
        super().__init__(message)


def described(error: BaseException) -> str:
    """Return the kind of an error and its words; the kind alone if its words cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
