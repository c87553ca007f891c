"""Requirements: the two ways in which the checks of this folder report a broken law and its place."""

from __future__ import annotations

import numpy as np

from pagedkv.errors import InvariantViolation


def require(holds: object, law: str, message: str, *, frame: int | None = None, asid: int | None = None) -> None:
    """Raise InvariantViolation unless `holds` is true. frame, asid: the faulty place, to look up its last callers."""
    if not holds:
        raise InvariantViolation(f"{law} broken: {message}", law=law, frame=frame, asid=asid)


def forbid(faulty: np.ndarray, law: str, message: str, *, place: str = "frame") -> None:
    """Raise InvariantViolation if `faulty` (bool [n]) is true anywhere. place: what its indices number.

    The error names the first faulty place and how many more there are.
    """
    found = np.flatnonzero(faulty)
    if len(found):
        first = int(found[0])
        frame, asid = (first if place == "frame" else None), (first if place == "space" else None)
        raise InvariantViolation(
            f"{law} broken: {message} ({place} {first}, and {len(found) - 1} more)", law=law, frame=frame, asid=asid
        )
