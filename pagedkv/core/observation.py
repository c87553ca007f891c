"""Observation: the methods of MemoryManager that report its work: events, their snapshots, findable pages.

Recording is off by default. It changes no decision of the manager: which pages are kept does not depend on it. This
file knows the log of events and the index; it must not know any rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from weakref import ref

import numpy as np
import numpy.typing as npt

from pagedkv.core.arguments import whole
from pagedkv.core.prefix.events import Changes, Event, EventLog, Snapshot
from pagedkv.core.prefix.export import Page, findable_pages
from pagedkv.core.prefix.roots import Roots, Salts
from pagedkv.core.state import FREE, LOGGED, PUBLISHING, State
from pagedkv.core.tables.layer_groups import Group
from pagedkv.core.thread_guard import ThreadGuard, exclusive
from pagedkv.errors import InvalidRequest


@dataclass(frozen=True)
class Observe:
    """The records that a MemoryManager keeps about itself.

    events: number of the last events kept for `events(since)`, 16 + 4 x block_size bytes each; 0 for none.
    """

    events: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", whole(self.events, "Observe.events", 0, 2**31))


class FrameViews(NamedTuple):
    """Records of all frames [F]. They change with the pool; after a resize they are those of the old pool.

    generation: rises when a frame is taken. published: not 0 while a prompt can find the page in the frame.
    uses:       how often the page was used again. refs: page-table entries that name the frame (I2).
    pins:       not 0 while a copy or an open epoch may read the frame.
    """

    generation: npt.NDArray[np.uint32]
    published: npt.NDArray[np.uint8]
    uses: npt.NDArray[np.unsignedinteger]
    refs: npt.NDArray[np.unsignedinteger]
    pins: npt.NDArray[np.unsignedinteger]


class _Restoring:
    """The token of a `restoring` context: the context is under way while its token lives."""


class ObservationMixin(ThreadGuard):
    """The observing methods of MemoryManager."""

    num_frames: int
    groups: tuple[Group, ...]
    state: State
    _roots: Roots

    def _begin_observation(self, observe: Observe | None) -> None:
        """Prepare the records that `observe` asks for. The ring of events is a part of the state."""
        if not isinstance(observe, Observe | None):
            raise InvalidRequest(f"observe is {observe!r}; give an Observe, for example Observe(events=65536)")
        self._observe = observe or Observe()
        self._log = EventLog()
        self._restoring: ref[_Restoring] | None = None

    def _name_roots(self, tenant: bytes, salts: Salts) -> None:
        """Let the log name the roots of a prompt that was opened now."""
        for each in self._roots.chain(tenant, salts, self.state.tokens.shape[1]):
            self._log.root_taken(self.state, each.number, (tenant, each.own))

    @property
    def prefix_cache(self) -> bool:
        """bool: True if `commit` publishes full pages and `open` finds them."""
        return bool(self.state.reg[PUBLISHING])

    @exclusive
    def findable_pages(self) -> list[Page]:
        """Return the pages that prompts find in all layer groups, prefixes first. O(published frames)."""
        return findable_pages(self.state, self._roots)

    def free_mask(self) -> npt.NDArray[np.bool_]:
        """bool [F]: True for a frame in state FREE. A copy. O(frames)."""
        mask: npt.NDArray[np.bool_] = self.state.frames["status"] == FREE
        return mask

    def frame_generations(self) -> npt.NDArray[np.uint32]:
        """uint32 [F]: the generation of each frame; it rises when the frame is taken. A copy. O(frames)."""
        return self.state.frames["generation"].copy()

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Suspend statistics and a window of group 0 while the caller refills the prefix cache by open, plan, commit.

        Inside the context, `open` counts in no statistic of prompts, and group 0 gives back no page: a page that was
        given back could be evicted for the next one. Both resume at the end, also after an exception or an interrupt:
        `open` and `commit` ask whether the context is under way, and nothing else changes.
        """
        token = _Restoring()
        outer = self._restoring_from(ref(token))
        try:
            yield
        finally:
            self._restoring_from(outer)

    @exclusive
    def _restoring_from(self, token: ref[_Restoring] | None) -> ref[_Restoring] | None:
        """Make `token` that of the innermost `restoring` context, and return the one before."""
        before, self._restoring = self._restoring, token
        return before

    def _is_restoring(self) -> bool:
        """Return True inside of `restoring`. An interrupt at its end leaves a dead token, which counts for nothing."""
        return self._restoring is not None and self._restoring() is not None

    @exclusive
    def events(self, since: int) -> list[Event]:
        """Return the events after number `since` (0: from the beginning): pages that became findable or ceased to be.

        O(events), and one sha256 for each stored block.
        Raises: EventsLost if some of them have left the ring: begin again from `events_snapshot()`;
                InvalidRequest if the manager keeps no events
        """
        return self._required_log().events(self.state, whole(since, "since"))

    @exclusive
    def events_snapshot(self) -> Snapshot:
        """Return every page that can be found, and the number of the last event. O(published frames).

        Raises: InvalidRequest if the manager keeps no events
        """
        return self._required_log().snapshot(self.state)

    def frame_views(self) -> FrameViews:
        """Return views of the frames' records, for code that keeps their bytes. Other threads may read them, too."""
        frames = self.state.frames
        return FrameViews(*(frames[name] for name in FrameViews._fields))

    @property
    def last_event(self) -> int:
        """int: the number of the newest event, 0 if there is none."""
        return int(self.state.reg[LOGGED])

    @exclusive
    def page_changes(self, since: int | None) -> Changes:
        """Return the pages that were published or removed after event `since`, with their frames. See events.Changes.

        since: None for all pages that are published now.
        Raises: InvalidRequest if the manager keeps no events
        """
        return self._required_log().changes(self.state, None if since is None else whole(since, "since"))

    def _required_log(self) -> EventLog:
        if not self._observe.events:
            raise InvalidRequest(
                "this manager keeps no events; make it with observe=Observe(events=N), where N is the number to keep"
            )
        return self._log
