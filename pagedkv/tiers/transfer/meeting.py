"""Meeting: how two processes find one another, again and again, at an address of which one of them is the host.

The host keeps a TCPStore of torch for as long as it lives. Each guest takes the next number of a session there, and
both go on in the part of the store that has this number. So what an older session left behind is never read. The host
takes the newest guest; the others wait, and come again.

**Interfaces.** A machine often takes its own name for 127.0.0.1, so neither side asks what its name is. The guest takes
the interface that leads to the host, and tells the host at which address it was found. A host that is given by number
listens on that interface only, and one that is given by name on all.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from pagedkv.errors import InvalidRequest
from pagedkv.tiers.transfer.link import LinkDown, Refused
from pagedkv.tiers.urls import shown

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
        if not host or "@" in host or not port.isdecimal() or not 0 < int(port) < 65536:
            given = shown(str(address)) if "@" in str(address) else address
            raise InvalidRequest(f"address is {given!r}; give HOST:PORT, such as 10.0.0.2:7000")
        self._host, self._port = host.removeprefix("[").removesuffix("]"), int(port)  # [::1] is ::1
        self._store: TCPStore | None = None
        self._last = 0  # the number of the last session
        self.interface: str = ""
        """The address of this side on the way to the other one, after `meet`."""
        self._found_at = ""  # the address of the host, as the guest sees it
        self._is_given_up = threading.Event()

    def meet(self, *, is_host: bool, timeout: float) -> PrefixStore:
        """Return the store of a new session. Modifies: interface

        Raises: LinkDown if the other side does not come within `timeout`
        """
        self._is_given_up.clear()
        until = time.monotonic() + timeout
        if is_host:
            session = self._wait_for_guest(until)
            session.set(HOST, "")
            self._wait_until(lambda: session.check([GUEST]), min(until, time.monotonic() + ANSWER), LinkDown(GONE))
            self.interface = self._host if _is_address(self._host) else session.get(GUEST).decode()
        else:
            session = self._visit(timeout)
            busy = f"{self._host}:{self._port} serves another decode process; give each a PrefillServer of its own"
            self._wait_until(lambda: session.check([HOST]), until, Refused(busy))
            session.set(GUEST, self._found_at)
        return session

    def _wait_for_guest(self, until: float) -> PrefixStore:
        if self._store is None:
            self._store = self._listen()
        store = self._store
        none = LinkDown(f"no decode process has come to {self._host}:{self._port}")
        self._wait_until(lambda: store.add(SESSIONS, 0) != self._last, until, none)
        self._last = store.add(SESSIONS, 0)
        _drop_sessions(store)
        return PrefixStore(f"session {self._last}", store)

    def _wait_until(self, holds: Callable[[], bool], until: float, otherwise: LinkDown) -> None:
        while not holds():
            if time.monotonic() > until or self._is_given_up.wait(PAUSE):
                raise otherwise

    def _listen(self) -> TCPStore:
        try:
            bound = self._bound() if _is_address(self._host) else None
            return TCPStore(
                self._host, self._port, is_master=True, wait_for_workers=False, timeout=PATIENCE, master_listen_fd=bound
            )
        except (RuntimeError, OSError) as error:
            why, place = str(error).partition("\n")[0], f"{self._host}:{self._port}"
            raise Refused(f"cannot be found at {place}; give a free port of this machine ({why})") from None

    def _bound(self) -> int:
        """Return a socket that listens on the interface of the address."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        return socket.create_server((self._host, self._port), family=family).detach()

    def _visit(self, timeout: float) -> PrefixStore:
        self._store = None
        with socket.create_connection((self._host, self._port), timeout) as there:  # TCPStore would complain on stderr
            self.interface, self._found_at = there.getsockname()[0], there.getpeername()[0]
        self._store = TCPStore(self._host, self._port, is_master=False, timeout=timedelta(seconds=timeout))
        return PrefixStore(f"session {self._store.add(SESSIONS, 1)}", self._store)

    def give_up(self) -> None:
        """Let a `meet` that waits raise. Any thread may call this."""
        self._is_given_up.set()

    def leave(self) -> None:
        """Give up the address."""
        self._store = None


def _drop_sessions(store: TCPStore) -> None:
    """Delete what the sessions before have left: a guest that is refused comes again every few seconds."""
    for key in store.list_keys() if hasattr(store, "list_keys") else ():  # not in every version of torch
        if key != SESSIONS:
            store.delete_key(key)


def _is_address(host: str) -> bool:
    """Return whether a host is given by the number of an interface, not by name, and not as 0.0.0.0."""
    try:
        return not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
