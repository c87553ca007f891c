"""Key log: the events of a frame pool, named by the caller's keys instead of digests. See prefix/events.py."""

from __future__ import annotations

from pagedkv.core.prefix.events import BlockStored, EventLog, PageName
from pagedkv.core.state import I32


class KeyLog(EventLog):
    """The reading side of the ring of one frame pool. A key of twins is stored once, and removed with the last one."""

    def __init__(self, key_bytes: int) -> None:
        super().__init__()
        self._key_bytes = key_bytes

    def _name(
        self, names: dict[int, PageName], number: int, place: tuple[int, int, int], tokens: I32
    ) -> PageName | None:
        return PageName(tokens.tobytes()[: self._key_bytes], None, b"")

    def _stored(self, number: int, named: PageName, tokens: I32) -> BlockStored:
        return BlockStored(number, (named.digest,), None, (), 0, b"")
