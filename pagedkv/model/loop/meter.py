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
    """Totals so far. One step in MEASURED adds, at its end, the slots then mapped and those that hold no token.

    tokens: of all sequences; one that several share counts for each
    """

    steps: int = 0
    slots_mapped: int = 0
    slots_wasted: int = 0
    tokens: int = 0

    @property
    def waste(self) -> float:
        """Share of the mapped slots that held no token, over the measured steps: 0.0 to 1.0."""
        return self.slots_wasted / self.slots_mapped if self.slots_mapped else 0.0

    @property
    def saved(self) -> float:
        """Share of the sequences' tokens that lie in a slot of another sequence, over the measured steps."""
        held = self.slots_mapped - self.slots_wasted
        return max(0.0, 1 - held / self.tokens) if self.tokens else 0.0

    def measure(self, cache: PagedKVCache) -> None:
        """Count a step that ended."""
        if self.steps % MEASURED == 0:
            now = cache.stats()
            self.slots_mapped += now.slots_mapped
            self.slots_wasted += now.slots_wasted
            self.tokens += now.tokens
        self.steps += 1
