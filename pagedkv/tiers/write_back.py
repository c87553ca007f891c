"""Write-back policies: which published pages are stored in the tiers.

By default all of them. A page is often asked for a second time only after the pool has evicted it, so a tier that keeps
only what was used again lacks it then: on the Mooncake trace that costs a quarter of the hits.
"""

from __future__ import annotations

from typing import Protocol


class WriteBack(Protocol):
    """A rule that chooses pages when they are published."""

    def stores(self, *, uses: int, tenant: bytes) -> bool:
        """Return whether a page is stored. uses: 0 if the pool sees it for the first time, more if it came back."""


class UsedAgain:
    """Store the pages that came back soon after they were evicted: fewer writes, for a disk that wears."""

    def stores(self, *, uses: int, tenant: bytes) -> bool:
        """Return whether the page was in the pool before."""
        return uses > 0
