"""A server under attack goes on: it answers others meanwhile, gives all frames back, says nothing, and drains."""

from __future__ import annotations

import threading
import time

import pytest

from . import hostile
from .server import ANSWER, ASKED, Server, serving


def asked_meanwhile(server: Server, until: float) -> list[int]:
    """Ask again and again, as an honest client; return the statuses."""
    statuses = []
    while time.monotonic() < until:
        answer = server.ask("/v1/completions", {"prompt": ASKED, "temperature": 0, "priority": -1})
        assert answer.status != 200 or answer.json["choices"][0]["text"] == ANSWER
        statuses.append(answer.status)
        time.sleep(0.2)
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_server_under_attack_serves_others_and_keeps_nothing(extra: None, seed: int) -> None:
    with serving("--num-frames", 320) as server:
        honest: list[int] = []
        until = time.monotonic() + 60
        reader = threading.Thread(target=lambda: honest.extend(asked_meanwhile(server, until)))
        reader.start()
        told = hostile.attack(server.port, 60, seed)
        reader.join()
        assert sum(told.values()) > 100, told
        assert not [name for name in told if name.endswith(" 500")], told
        assert honest.count(200) > len(honest) / 2 > 5, honest
        server.wait_for_no_frame()
        assert server.ask("/health").status == 200
        assert server.end() == (0, "")
