"""Fetch: the pages of one prompt on their way from tiers into the pool.

    lookup in the pool │ lookup in the tiers │            │
    known pages        │ found there         │ not found  │ last token
                       └─ planned ───────────┘
                          LOAD, page by page ─▶ verified? ─▶ commit the pages up to the first that failed ─▶ release

The frames belong to an address space that only the fetch has. Until they are committed no prompt finds them; then they
are cached pages like all others, and `open` maps them. A page that fails in one tier is asked for in the next. A fetch
that is cancelled or late ends at once for its owner, and keeps its frames until no tier writes into them any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pagedkv.core.state import I32
from pagedkv.tiers.tier import Job, Key

if TYPE_CHECKING:
    from pagedkv.core.handles import AddressSpace, Plan


class Fetch:
    """The pages of a prompt that lower tiers have, on their way. `PagedKVCache.fetch` makes it.

    asked:  tokens that the tiers seemed to have. tokens: how many of these the pool has now; 0 until `done`.
    source: pages asked for in each tier, by its name.
    lacked: frames for further pages that the tiers seemed to have, and the pool could not give.
    """

    def __init__(self, ids: I32, first: int, pump: Callable[[float], None], deadline: float | None) -> None:
        self.asked: int = 0
        self.tokens: int = 0
        self.source: dict[str, int] = {}
        self.lacked: int = 0
        self.space: AddressSpace | None = None
        self.plan: Plan | None = None
        self.pages: list[FetchedPage] = []
        self.jobs: list[Job] = []
        self.ids: I32 = ids
        self.first: int = first  # the page where the planned ones begin
        self.deadline: float | None = deadline
        self.is_given_up: bool = False
        self._is_done = False
        self._pump = pump

    @property
    def done(self) -> bool:
        """Whether the fetch has ended: `open` finds now what it could bring. Each look lets it go on."""
        if not self._is_done:
            self._pump(0.0)
        return self._is_done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the fetch has ended, at most `timeout` seconds. Return `done`."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.done and (until is None or time.monotonic() < until):
            self._pump(0.0002)
        return self._is_done

    def cancel(self) -> None:
        """End the fetch; pages that have arrived stay. Its frames are free when no tier writes into them any more."""
        self.give_up()
        self._pump(0.0)

    # -- for the stack of tiers ----------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Ask the tiers to skip what has not begun."""
        self.is_given_up = True
        for job in self.jobs:
            job.cancel()

    def end(self, tokens: int = 0) -> None:
        """Tell the owner that the fetch has ended, with so many tokens."""
        self.tokens, self._is_done = tokens, True

    @property
    def has_ended(self) -> bool:
        """Whether the owner was told."""
        return self._is_done

    @property
    def num_verified(self) -> int:
        """Pages, from the first on, that have arrived in all groups."""
        return next((i for i, page in enumerate(self.pages) if page.missing), len(self.pages))

    @property
    def num_under_way(self) -> int:
        """Loads that a tier has not ended."""
        return sum(len(page.under_way) for page in self.pages)


class FetchedPage:
    """One page of a fetch. keys, frames: one for each layer group. missing: the groups that have not arrived.

    under_way: group: the number of the tier that loads it. tried: the tiers that were asked.
    """

    def __init__(self, keys: list[Key], frames: list[int]) -> None:
        self.keys: list[Key] = keys
        self.frames: list[int] = frames
        self.missing: set[int] = set(range(len(keys)))
        self.under_way: dict[int, int] = {}
        self.tiers: list[int] = []  # those that seem to have the page and were not asked, in order
