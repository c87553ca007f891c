"""Meeting: how two processes find one another, again and again, at an address of which one of them is the host.

The host keeps a TCPStore of torch for as long as it lives. Each guest takes the next number of a session there, and
both go on in the part of the store that has this number. So what an older session left behind is never read.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Final

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from pagedkv.errors import InvalidRequest
from pagedkv.tiers.transfer.link import LinkDown

PAUSE: Final = 0.02
"""Seconds between two looks for a guest."""
SESSIONS: Final = "sessions"


class Meeting:
    """A place to meet, "HOST:PORT". Raises: InvalidRequest for an address of another form"""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidRequest(f"address is {address!r}; give HOST:PORT, such as 10.0.0.2:7000")
        self._host, self._port = host, int(port)
        self._store: TCPStore | None = None
        self._last = 0  # the number of the last session
        self._is_given_up = threading.Event()

    def meet(self, *, is_host: bool, timeout: float) -> PrefixStore:
        """Return the store of a new session. Raises: LinkDown if the other side does not come within `timeout`"""
        self._is_given_up.clear()
        number = self._wait_for_guest(timeout) if is_host else self._visit(timeout)
        assert self._store is not None
        return PrefixStore(f"session {number}", self._store)

    def _wait_for_guest(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        if self._store is None:
            self._store = TCPStore(
                self._host, self._port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
            )
        while (number := self._store.add(SESSIONS, 0)) == self._last:
            if time.monotonic() > until or self._is_given_up.wait(PAUSE):
                raise LinkDown(f"no decode process has come to {self._host}:{self._port}")
        self._last = number
        return number

    def _visit(self, timeout: float) -> int:
        self._store = None
        socket.create_connection((self._host, self._port), timeout).close()  # TCPStore would complain on stderr
        self._store = TCPStore(self._host, self._port, is_master=False, timeout=timedelta(seconds=timeout))
        return self._store.add(SESSIONS, 1)

    def give_up(self) -> None:
        """Let a `meet` that waits raise. Any thread may call this."""
        self._is_given_up.set()

    def leave(self) -> None:
        """Give up the address."""
        self._store = None
