"""Interface: the network interface on which the ranks of several machines reach one another. No torch.

gloo asks a machine for its own name, which Debian, Ubuntu and most containers take for 127.0.0.1 or 127.0.1.1. Then no
other machine reaches it. So each rank looks at the way from itself to the address where the ranks meet:

    another machine than that of rank 0    the address from which the way begins
    the machine of rank 0                  the address that a rank elsewhere sees at the end of its way
    only one machine                       what gloo takes by itself
"""

from __future__ import annotations

import array
import ipaddress
import json
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

GLOO: Final = "GLOO_SOCKET_IFNAME"
"""The variable from which gloo takes the name of an interface."""

_GET_ADDRESS: Final = 0x8915
"""SIOCGIFADDR of Linux."""


class Way(NamedTuple):
    """The addresses at both ends of a way to the host."""

    start: str
    end: str


class Store(Protocol):
    """The methods of a store of torch.distributed that are used here."""

    def get(self, key: str, /) -> bytes:
        """Wait for a value, and return it."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""


def choose(store: Store, rank: int, size: int, host: str, port: int) -> None:
    """Let gloo take the interface that the other ranks reach, unless the user has named one. All ranks call it.

    Modifies: the variable GLOO_SOCKET_IFNAME of this process
    """
    store.set(f"way/{rank}", json.dumps(_way_to(host, port)))
    ways = [Way(*json.loads(store.get(f"way/{each}"))) for each in range(size)]
    if GLOO not in os.environ and (name := interface_of(address_of(rank, ways))):
        os.environ[GLOO] = name


def address_of(rank: int, ways: Sequence[Way]) -> str:
    """Return the address at which ranks elsewhere reach this one; "" on only one machine. ways: of all ranks"""
    own = ways[rank].start
    if not _is_loopback(own):
        return own
    return next((way.end for way in ways if not _is_loopback(way.end)), "")


def interface_of(address: str) -> str:
    """Return the name of the interface that has an IPv4 address, "" if there is none."""
    with suppress(OSError, ValueError, ImportError):
        import fcntl

        wanted = ipaddress.IPv4Address(address).packed
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            for _, name in socket.if_nameindex():
                request = array.array("B", struct.pack("256s", name.encode()[:15]))
                with suppress(OSError):  # it has none
                    fcntl.ioctl(any_socket.fileno(), _GET_ADDRESS, request)
                    if request[20:24].tobytes() == wanted:
                        return name
    return ""


def _way_to(host: str, port: int) -> Way:
    """Return the way to a host. Nothing is sent."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(address)
            return Way(way.getsockname()[0], way.getpeername()[0])
    return Way("", "")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True
