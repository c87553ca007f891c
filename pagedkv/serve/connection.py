"""Connections: a cap on their number, and clocks for clients that send or take nothing. Knows HTTP/1.1; no request.

    accepted ─▶ head ─▶ body ─▶ answer ─▶ idle ─▶ head ..
       │         │       │        │        └ uvicorn closes it after 5 s
       │         │       │        └ a client that is behind: `send_s` with a full buffer, and it is aborted
       │         │       └ the gate has a clock for bodies
       │         └ HEAD_SECONDS for a whole head, from the connection or the last answer on
       └ beyond `most` connections the one that has been idle for the longest is closed; without one, status 503,
         and REFUSAL_SECONDS to read it

A transport takes any number of bytes; uvicorn waits before it hands over more while more than 64 KiB are left. So a
connection holds 128 KiB at most, and what the kernel takes (SEND_BUFFER of process.py).

The subclass uses of uvicorn: `conn`, `cycle`, `transport`, `connections`, `on_response_complete`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from pagedkv.serve.answers import error

HEAD_SECONDS: Final = 10.0
"""The limit for the head of a request to arrive."""

REFUSAL_SECONDS: Final = 1.0
"""The time for which the bytes of a refused client are read, and dropped: with unread bytes, TCP would reset the
connection, and most clients would not see the answer."""

MOST_REFUSED: Final = 128
"""Connections in that state; beyond it a refused client is closed at once."""

TICK_SECONDS: Final = 0.25
"""The time between two looks at the clocks of all connections."""


@dataclass
class ConnectionTable:
    """The connections of a server. most: their number. send_s: seconds. dropped: called with the reason of each end."""

    most: int
    send_s: float
    dropped: Callable[[str], None]
    open: set[Connection] = field(default_factory=set)
    refused: set[Connection] = field(default_factory=set)

    def admit(self, new: Connection) -> bool:
        """Add a connection; if there are too many, close one that is idle. Returns: whether it was added"""
        if len(self.open) >= self.most:
            idle = (c for c in self.open if c.is_idle and not c.transport.get_write_buffer_size())
            oldest = min(idle, key=lambda c: c.since, default=None)
            if oldest is None:
                self.dropped("full")
                if len(self.refused) < MOST_REFUSED:
                    self.refused.add(new)
                return False
            oldest.drop("idle")
        self.open.add(new)
        return True

    async def run(self) -> None:
        """End what has waited for too long, until this task is cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            for connection in list(self.open):
                connection.look(now, self.send_s)

    def abort(self) -> None:
        """End all connections, whatever they have not sent."""
        for connection in list(self.open):
            connection.drop("end")


class Connection(H11Protocol):
    """A connection with clocks. since: seconds of time.monotonic() at which it was accepted, or its answer ended."""

    def __init__(self, *arguments: Any, table: ConnectionTable, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.since: float = time.monotonic()
        self._table = table
        self._behind_since: float | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Take a new connection, or refuse it in words."""
        super().connection_made(transport)
        if not self._table.admit(self):
            transport.write(_FULL)
            if self in self._table.refused:
                with suppress(OSError):  # the client has gone
                    transport.write_eof()
                self.loop.call_later(REFUSAL_SECONDS, transport.abort)
            else:
                transport.close()

    def data_received(self, data: bytes) -> None:
        """Take bytes of requests; drop those of a refused client."""
        if self not in self._table.refused:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._table.open.discard(self)
        self._table.refused.discard(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Note that the client is behind."""
        super().pause_writing()
        self._behind_since = time.monotonic()

    def resume_writing(self) -> None:
        """Note that the client has taken most of it."""
        super().resume_writing()
        self._behind_since = None

    def on_response_complete(self) -> None:
        """Start the clock of an idle connection."""
        self.since = time.monotonic()
        super().on_response_complete()

    def look(self, now: float, send_s: float) -> None:
        """End the connection if its client has sent or taken nothing for too long."""
        if self._behind_since is not None and now - self._behind_since > send_s:
            self.drop("stalled")
        elif self.is_idle and self.transport.get_write_buffer_size():
            if now - self.since > send_s:
                self.drop("stalled")
        elif self.is_idle and now - self.since > HEAD_SECONDS:
            self.drop("silent")

    def drop(self, reason: str) -> None:
        """End the connection now, and count it. Its request is cancelled: it sees a client that went away."""
        self._table.open.discard(self)
        self._table.dropped(reason)
        self.transport.abort()


def _refusal() -> bytes:
    body = json.dumps(error("the limit of connections is reached; try again later", "server_error")).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


_FULL: Final = _refusal()
