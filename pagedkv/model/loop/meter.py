"""The meter: totals of the steps so far. Knows the counts of a cache; no request, no text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pagedkv.cache import PagedKVCache

MEASURED: Final = 8
"""Of so many steps one is measured: the figures take as long as all else that a small step does."""


@dataclass
class Meter:
    """Totals so far. One step in MEASURED adds, at its end, the slots then mapped and those that hold no token."""

    steps: int = 0
    slots_mapped: int = 0
    slots_wasted: int = 0

    @property
    def waste(self) -> float:
        """Share of the mapped slots that held no token, over the measured steps: 0.0 to 1.0."""
        return self.slots_wasted / self.slots_mapped if self.slots_mapped else 0.0

    def measure(self, cache: PagedKVCache) -> None:
        """Count a step that ended."""
        if self.steps % MEASURED == 0:
            now = cache.stats()
            self.slots_mapped += now.slots_mapped
            self.slots_wasted += now.slots_wasted
        self.steps += 1
