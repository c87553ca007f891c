"""Errors: what was asked, what there is, what to do.

Everything this package raises on purpose descends from `PagedKVError`. An error carries its numbers as attributes, so an engine can act
on them, and a sentence, so a person can. `assert` is kept for our own bugs.

PagedKVError
 ├── OutOfFrames         the pool cannot serve the step; nothing was changed
 │    └── QuotaExceeded  a tenant's hard quota does not allow it
 ├── InvalidRequest      an argument makes no sense; nothing was changed                      (also a ValueError)
 ├── StaleHandle         the space was released, its number may belong to another space now
 │    └── DoubleRelease
 ├── PlanConflict        plans and the operation are out of order (a plan is still outstanding, or was settled already)
 ├── EventsLost          a reader of events fell behind the log; snapshot() resynchronises it
 ├── ConcurrentUse       a second thread entered a manager that belongs to another one
 ├── KernelUnavailable   no kernel can run this case; says why for each
 ├── CheckpointError     a model folder is missing, damaged or of an unknown kind
 └── InvariantViolation  check() found a broken law; a bug of ours                           (also an AssertionError)
"""

from __future__ import annotations


class PagedKVError(Exception):
    """Root of everything this package raises on purpose."""


class OutOfFrames(PagedKVError):
    """The pool cannot serve this step, and nothing was changed.

    needed, free, evictable, pending: frames. `shortfall` = what must be freed before the same call succeeds.
    """

    def __init__(self, needed: int, free: int, evictable: int = 0, pending: int = 0) -> None:
        self.needed, self.free, self.evictable, self.pending = needed, free, evictable, pending
        self.shortfall = needed - free - evictable
        super().__init__(
            f"this step needs {needed} frames; {free} are free, {evictable} evictable and {pending} pending. "
            f"Preempt sequences that hold at least {self.shortfall} frames, wait for the pending ones, or raise num_frames."
        )


class QuotaExceeded(OutOfFrames):
    """A tenant may not hold what this step needs, and nothing was changed.

    tenant; quota, used, evictable: its frames. `free` = what its quota leaves; `shortfall` = what it must free before the call succeeds.
    """

    def __init__(self, tenant: bytes, needed: int, quota: int, used: int, evictable: int) -> None:
        super().__init__(needed, quota - used, evictable)
        self.tenant, self.quota, self.used = tenant, quota, used
        self.args = (
            f"this step needs {needed} frames for tenant {tenant!r}, which holds {used} of at most {quota}, {evictable} of them evictable. "
            f"Preempt sequences of this tenant that hold at least {self.shortfall} frames, or raise its hard quota.",
        )


class InvalidRequest(PagedKVError, ValueError):
    """An argument makes no sense; nothing was changed."""


class StaleHandle(PagedKVError):
    """The space was released; its number may belong to another space now (I8)."""


class DoubleRelease(StaleHandle):
    """A space was released twice."""


class PlanConflict(PagedKVError):
    """A plan was settled already, settled out of order, or still outstanding where it must not be."""


class EventsLost(PagedKVError):
    """Events that a reader has not seen are gone. since: the last one it has; first_available: the first that can still be read."""

    def __init__(self, since: int, first_available: int) -> None:
        self.since, self.first_available = since, first_available
        super().__init__(
            f"events {since + 1} to {first_available - 1} are not in the log any more; begin again from snapshot(), "
            "and read more often or keep more events (Observe(events=))"
        )


class ConcurrentUse(PagedKVError):
    """A second thread entered a manager that belongs to another one."""


class KernelUnavailable(PagedKVError):
    """No kernel can run this case. `reasons` maps each candidate to its objections."""

    def __init__(self, asked: str, reasons: dict[str, list[str]]) -> None:
        self.reasons = reasons
        lines = "".join(f"\n  {name}: {'; '.join(why)}" for name, why in reasons.items())
        super().__init__(
            f"no kernel can serve {asked}:{lines}\nChange what is objected to, or pass backend=None to let the registry choose."
        )


class CheckpointError(PagedKVError):
    """A model folder is missing, damaged or of an unknown kind."""


class InvariantViolation(PagedKVError, AssertionError):
    """`check()` found a broken law of DESIGN (I1-I9). This is a bug of pagedkv, or of code that wrote into its arrays.

    law, frame, asid: which, and where; None if the place is neither a frame nor a space.
    """

    def __init__(self, message: str, *, law: str = "", frame: int | None = None, asid: int | None = None) -> None:
        self.law, self.frame, self.asid = law, frame, asid
        super().__init__(message)
