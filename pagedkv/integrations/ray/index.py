"""PrefixIndex: which replica can find which blocks, kept up to date by KV events. EventReader: the events of a replica.

    BlockStored    the replica has these blocks      BlockRemoved    it has them no more
    AllBlocksCleared                                 it has none; what it has follows

A block has one name for its whole prefix, so a replica that has the n-th block of a prompt usually has all before. It
may have lost some: so the blocks are looked up in order, up to the first that is missing.

With layer groups only the first counts. It has no window if any has none, so it says how long a prefix can be; groups
with a window lose the blocks behind it, and a prompt is found without them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
import zmq

Replica = TypeVar("Replica", bound=Hashable)

MOST_MESSAGES: Final = 1000
"""Messages of a replica that one call takes in."""


class PrefixIndex(Generic[Replica]):
    """The blocks of each replica. One block of one replica takes about 155 bytes."""

    def __init__(self) -> None:
        self._blocks: dict[Replica, set[bytes]] = {}

    def apply(self, replica: Replica, events: Iterable[Mapping[str, Any]]) -> None:
        """Take in events of a replica, in the form of vLLM (maps). Events of other types are passed over."""
        blocks = self._blocks.setdefault(replica, set())
        for event in events:
            kind = event["type"]
            if kind == "AllBlocksCleared":
                blocks.clear()
            elif event.get("group_idx"):
                continue
            elif kind == "BlockStored":
                blocks.update(event["block_hashes"])
            elif kind == "BlockRemoved":
                blocks.difference_update(event["block_hashes"])

    def drop(self, replica: Replica) -> None:
        """Forget a replica. One that is not known is no error."""
        self._blocks.pop(replica, None)

    def known(self, replica: Replica, names: Sequence[bytes]) -> int:
        """Return how many of the first blocks of a prompt `replica` has. names: see pagedkv.core.page_digests"""
        blocks = self._blocks.get(replica, ())
        return next((at for at, name in enumerate(names) if name not in blocks), len(names))

    def size(self, replica: Replica) -> int:
        """Return the number of blocks of a replica."""
        return len(self._blocks.get(replica, ()))


class EventReader:
    """The events that a replica publishes at `endpoint`. A reader that joins gets all blocks that can be found."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self.endpoint: str = endpoint
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
        self._socket.connect(endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._next = 0  # the number of the next message

    def read(self) -> list[Mapping[str, Any]]:
        """Return the events that have come. It does not wait. After a gap it asks for all blocks again."""
        events: list[Mapping[str, Any]] = []
        for _ in range(MOST_MESSAGES):
            if not self._socket.poll(0):
                break
            _, number, content = self._socket.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if self._next and sequence != self._next:
                events = [{"type": "AllBlocksCleared"}]
                self._socket.setsockopt(zmq.UNSUBSCRIBE, b"")
                self._socket.setsockopt(zmq.SUBSCRIBE, b"")
            self._next = sequence + 1
            events += msgspec.msgpack.decode(content)[1]
        return events

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(0)
