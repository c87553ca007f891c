"""Observation: what a manager tells about itself while it works. All of it is off by default, and nothing here changes what is kept.

It is the part of MemoryManager that only looks; it knows the log of events and the index, and must not know any rule.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.core.events import Event, EventLog, Snapshot
from pagedkv.core.state import State
from pagedkv.errors import InvalidRequest


@dataclass(frozen=True)
class Observe:
    """What a MemoryManager is to watch.

    events: how many of the last events are kept for `events(since)`; each takes 12 + 4 x block_size bytes. 0: none.
    """

    events: int = 0

    def __post_init__(self) -> None:
        if self.events < 0:
            raise InvalidRequest(f"Observe(events={self.events}): give the number of events to keep, or 0 for none")


class Observed:
    """The observing methods of MemoryManager."""

    state: State
    _log: EventLog

    def events(self, since: int) -> list[Event]:
        """What became findable or ceased to be after event number `since` (0: from the beginning). O(events), sha256 for each stored block.

        Raises: EventsLost if some of them are gone: begin again from `snapshot()`; InvalidRequest if the manager keeps no events
        """
        return self._kept().events(self.state, since)

    def snapshot(self) -> Snapshot:
        """Every page that can be found, and the number of the event to go on from. O(published frames).

        Raises: InvalidRequest if the manager keeps no events
        """
        return self._kept().snapshot(self.state)

    def _kept(self) -> EventLog:
        if len(self.state.log) == 0:
            raise InvalidRequest("this manager keeps no events; make it with observe=Observe(events=N), the number to keep")
        return self._log
