"""Broken laws: how the checks of check.py and its neighbours say what they found."""

from __future__ import annotations

import numpy as np

from pagedkv.errors import InvariantViolation


def require(holds: object, law: str, message: str, *, frame: int | None = None, asid: int | None = None) -> None:
    """Raise InvariantViolation unless `holds`. frame, asid: where, for whoever wants to know who had it last."""
    if not holds:
        raise InvariantViolation(f"{law} broken: {message}", law=law, frame=frame, asid=asid)


def none(broken: np.ndarray, law: str, message: str, *, places: str = "frame") -> None:
    """Raise InvariantViolation for the first place where `broken` (bool [n]) holds; `places` says what the places are."""
    found = np.flatnonzero(broken)
    if len(found):
        first = int(found[0])
        frame, asid = (first if places == "frame" else None), (first if places == "space" else None)
        raise InvariantViolation(
            f"{law} broken: {message} ({places} {first}, and {len(found) - 1} more)", law=law, frame=frame, asid=asid
        )
