"""Preemption: the number of pages that a preempted sequence keeps.

    recompute    x x x x x x │ ─▶ │              all frames go back; tokens that the prefix cache still has are found
    keep         x x x x x x │ ─▶ x x x x │      the last pages go back, as many as are missing; the others stay mapped

A preempted sequence waits until the pool has room for the rest of it. Then it computes the tokens that it lost and that
the prefix cache has lost, too. With `Keep` these are few. The pages that it has kept go back only if the pool runs out
again, or if a more urgent sequence waits for them. With `Recompute` more sequences share the pool, and compute their
tokens again more often.

A policy is asked if frames are missing. A sequence that makes room for a more urgent one, one under a window, and the
beams of a search give all frames back.

This file knows numbers of pages; the scheduler decides who makes room (the last in order), and gives the frames back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from pagedkv.errors import InvalidRequest


class Preemption(Protocol):
    """A policy: an object with `kept`."""

    def kept(self, num_pages: int, missing: int) -> int:
        """Return how many of its first pages a sequence keeps, up to `num_pages`.

        missing: frames that the step still lacks when the sequence takes no part in it; may be 0
        """


@dataclass(frozen=True)
class Recompute:
    """Give all frames back."""

    def kept(self, num_pages: int, missing: int) -> int:
        """Return 0."""
        return 0


@dataclass(frozen=True)
class Keep:
    """Give back the frames that are missing, from the end of the sequence."""

    def kept(self, num_pages: int, missing: int) -> int:
        """Return the pages that are not missing."""
        return max(0, num_pages - missing)


POLICIES: Final[dict[str, Preemption]] = {"recompute": Recompute(), "keep": Keep()}


def preemption_of(policy: Preemption | str) -> Preemption:
    """Return a policy, which may be given by its name. Raises: InvalidRequest"""
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]
    if isinstance(policy, str) or not hasattr(policy, "kept"):
        raise InvalidRequest(f"preemption is {policy!r}; give {' or '.join(map(repr, POLICIES))}, or a policy")
    return policy
