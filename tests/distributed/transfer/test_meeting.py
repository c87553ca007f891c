"""The two sides meet on the interface of their address, whatever the machine takes its own name for."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from pathlib import Path

import pytest

from pagedkv.tiers.transfer import DistributedLink
from pagedkv.tiers.transfer.distributed import INTERFACE
from tests.tiers.stores import free_port

from .liars import holds
from .sides import Sides

LISTENS = "0A"


def listening() -> set[str]:
    """Return the addresses on which this process listens."""
    opened = set[str]()
    for number in os.listdir("/proc/self/fd"):
        link = Path("/proc/self/fd") / number
        if link.is_symlink() and (target := os.readlink(link)).startswith("socket:["):
            opened.add(target[8:-1])
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()]
    found = {fields[1].partition(":")[0] for fields in lines if fields[3] == LISTENS and fields[9] in opened}
    return {_address(digits) for digits in found}


def _address(digits: str) -> str:
    words = struct.pack(f"={len(digits) // 8}I", *(int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)))
    return str(ipaddress.ip_address(words))


def sides_at(host: str, **options: object) -> Sides:
    port = free_port()
    return Sides(link=lambda _: DistributedLink(f"{host}:{port}"), **options)  # type: ignore[arg-type]


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="no /proc of Linux")
def test_both_sides_listen_only_on_the_interface_that_leads_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux gives the whole of 127.0.0.0/8 to this machine; none of its names is 127.0.0.2."""
    monkeypatch.delenv(INTERFACE, raising=False)
    before = listening() - {"127.0.0.1", "127.0.0.2"}
    with sides_at("127.0.0.2") as sides, sides.serving():
        assert sides.run(list(range(41))) == 40
        assert sides.link._meeting.interface == "127.0.0.2"
        assert listening() - before == {"127.0.0.2", sides.other_link._meeting.interface}


def test_a_side_that_is_given_by_name_takes_the_interface_where_it_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may mean another address there than here."""
    monkeypatch.delenv(INTERFACE, raising=False)
    connect = socket.create_connection

    def elsewhere(address: tuple[str, int], timeout: float) -> socket.socket:
        return connect(("127.0.0.3", address[1]), timeout)

    monkeypatch.setattr(socket, "create_connection", elsewhere)
    with sides_at("localhost") as sides, sides.serving():
        assert sides.run(list(range(41))) == 40
        assert sides.link._meeting.interface == "127.0.0.3"


def test_sessions_that_have_ended_leave_nothing_at_the_meeting_place() -> None:
    with sides_at("127.0.0.1") as sides:
        sizes = []
        for _ in range(4):
            store = sides.link._meeting._store
            assert store is not None
            sizes.append(store.num_keys())
            session = sides.link._meeting._last
            sides.link.cut()
            assert holds(lambda last=session: sides.link._meeting._last > last)
            assert sides.remote.wait(20)
        assert sizes[-1] <= sizes[0]


def test_the_user_may_name_another_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE, "lo")
    with sides_at("127.0.0.1") as sides, sides.serving():
        assert sides.run(list(range(41))) == 40
    monkeypatch.setenv(INTERFACE, "nosuch0")
    lonely = sides_at("127.0.0.1")
    assert not lonely.remote.wait(1.0)
    lonely.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_an_address_of_ipv6_stands_in_brackets() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no loopback of IPv6")
    with sides_at("[::1]") as sides, sides.serving():
        assert sides.run(list(range(41))) == 40
