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
    with serving("--num-frames", 320, "--send-timeout", 2, "--max-connections", 200) as server:
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


@pytest.mark.slow
def test_thousands_of_silent_connections_do_not_keep_others_out(extra: None) -> None:
    with serving("--max-connections", 100) as server:
        silent = hostile.flood(server.port, 3000)
        assert len(silent) > 500
        for _ in range(5):
            answer = server.ask("/v1/completions", {"prompt": ASKED, "temperature": 0})
            assert answer.json["choices"][0]["text"] == ANSWER
        assert server.metric('pagedkv_connections_dropped_total{reason="idle"}') >= len(silent) - 100
        for sock in silent:
            sock.close()
        assert server.end() == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_takes_nothing_loses_its_request_and_no_other(extra: None, stream: bool) -> None:
    body = {"prompt": ASKED, "max_tokens": 2000, "ignore_eos": True, "logprobs": 20, "n": 4, "stream": stream}
    with serving("--send-timeout", 1) as server, server.begun(body):
        begin = time.monotonic()
        while not server.metric('pagedkv_connections_dropped_total{reason="stalled"}', missing=0):
            assert server.ask("/v1/completions", {"prompt": ASKED, "temperature": 0}).status == 200
            assert time.monotonic() < begin + 120
            time.sleep(0.2)
        server.wait_for_no_frame()
        assert server.end() == (0, "")
