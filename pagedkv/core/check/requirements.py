"""Requirements: the invariants by name, and the two ways in which one reports that it is broken, and where."""

from __future__ import annotations

from typing import Final

import numpy as np

from pagedkv.errors import InvariantViolation


class _Law:
    """An invariant. name: as docs, errors and tests cite it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def require(self, holds: object, message: str, *, frame: int | None = None, asid: int | None = None) -> None:
        """Raise InvariantViolation unless `holds`. frame, asid: the faulty place, to look up its last callers."""
        if not holds:
            raise InvariantViolation(f"{self._name} broken: {message}", law=self._name, frame=frame, asid=asid)

    def forbid(self, faulty: np.ndarray, message: str, *, place: str = "frame") -> None:
        """Raise InvariantViolation if `faulty` (bool [n]) is true anywhere. place: what its indices number.

        The error names the first faulty place and how many more there are.
        """
        found = np.flatnonzero(faulty)
        if len(found):
            first = int(found[0])
            frame, asid = (first if place == "frame" else None), (first if place == "space" else None)
            self.require(False, f"{message} ({place} {first}, and {len(found) - 1} more)", frame=frame, asid=asid)


I1: Final = _Law("I1")
I2: Final = _Law("I2")
I3: Final = _Law("I3")
I4: Final = _Law("I4")
I5: Final = _Law("I5")
I6: Final = _Law("I6")
I7: Final = _Law("I7")
I8: Final = _Law("I8")
I9: Final = _Law("I9")
I10: Final = _Law("I10")
I11: Final = _Law("I11")
I12: Final = _Law("I12")
I13: Final = _Law("I13")
I14: Final = _Law("I14")
I15: Final = _Law("I15")
I16: Final = _Law("I16")
