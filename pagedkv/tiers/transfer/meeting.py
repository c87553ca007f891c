"""Meeting: how two processes find one another, again and again, at an address of which one of them is the host.

The host keeps a TCPStore of torch for as long as it lives. Each guest takes the next number of a session there, and
both go on in the part of the store that has this number. So what an older session left behind is never read. The host
takes the newest guest; the others wait, and come again.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from pagedkv.errors import InvalidRequest
from pagedkv.tiers.transfer.link import LinkDown, Refused

PAUSE: Final = 0.02
"""Seconds between two looks for a guest."""
PATIENCE: Final = timedelta(seconds=5)
"""The time that the store of a host may take for an answer."""
ANSWER: Final = 1.0
"""Seconds in which a guest answers that has not left."""
SESSIONS, HOST, GUEST = "sessions", "host", "guest"
GONE: Final = "the decode process has left"


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
        until = time.monotonic() + timeout
        if is_host:
            session = self._wait_for_guest(until)
            session.set(HOST, "")
            self._wait_until(lambda: session.check([GUEST]), min(until, time.monotonic() + ANSWER), LinkDown(GONE))
        else:
            session = self._visit(timeout)
            busy = f"{self._host}:{self._port} serves another decode process; give each a PrefillServer of its own"
            self._wait_until(lambda: session.check([HOST]), until, Refused(busy))
            session.set(GUEST, "")
        return session

    def _wait_for_guest(self, until: float) -> PrefixStore:
        if self._store is None:
            self._store = self._listen()
        store = self._store
        none = LinkDown(f"no decode process has come to {self._host}:{self._port}")
        self._wait_until(lambda: store.add(SESSIONS, 0) != self._last, until, none)
        self._last = store.add(SESSIONS, 0)
        return PrefixStore(f"session {self._last}", store)

    def _wait_until(self, holds: Callable[[], bool], until: float, otherwise: LinkDown) -> None:
        while not holds():
            if time.monotonic() > until or self._is_given_up.wait(PAUSE):
                raise otherwise

    def _listen(self) -> TCPStore:
        try:
            return TCPStore(self._host, self._port, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        except RuntimeError as error:
            why, place = str(error).partition("\n")[0], f"{self._host}:{self._port}"
            raise Refused(f"cannot be found at {place}; give a free port of this machine ({why})") from None

    def _visit(self, timeout: float) -> PrefixStore:
        self._store = None
        socket.create_connection((self._host, self._port), timeout).close()  # TCPStore would complain on stderr
        self._store = TCPStore(self._host, self._port, is_master=False, timeout=timedelta(seconds=timeout))
        return PrefixStore(f"session {self._store.add(SESSIONS, 1)}", self._store)

    def give_up(self) -> None:
        """Let a `meet` that waits raise. Any thread may call this."""
        self._is_given_up.set()

    def leave(self) -> None:
        """Give up the address."""
        self._store = None
