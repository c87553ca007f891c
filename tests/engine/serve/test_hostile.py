"""A server under attack goes on: it answers others meanwhile, gives all frames back, says nothing, and drains."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress

import pytest

from tests.engine.serve.server import ANSWER, ASKED, Server, serving

HEADERS = ["Host", "Content-Length", "Transfer-Encoding", "Authorization", "Expect", "Upgrade", "\x00a", ""]
VALUES = ["localhost", "-1", "9" * 30, "chunked", "gzip, chunked", "100-continue", "websocket", "\xff", "a\rb"]
FIELDS = """
model prompt messages max_tokens n stream stream_options stop stop_token_ids temperature top_p logit_bias seed
min_tokens logprobs top_logprobs priority response_format chat_template_kwargs echo __class__ self""".split()
JSON = [
    "0", "-1", "1e999", "NaN", "9" * 400, str(2**31), str(-(2**63) - 1), "true", "null", '""', r'"\ud800"', r'"\u0000"',
    '"' + "a" * 100_000 + '"', '"\xff"', '"{% for a in range(10**9) %}a{% endfor %}"', "[]", "{}", "[[]]",
    "[" * 300 + "]" * 300, '{"a":' * 150 + "1" + "}" * 150, '{"type": "json_schema", "json_schema": {"schema": '
    '{"type": "string", "pattern": "' + "(" * 2000 + ")" * 2000 + '"}}}',
]  # fmt: skip


def head(dice: random.Random) -> bytes:
    """Return a request line and headers at the edges of HTTP, sometimes without an end, or many requests."""
    pick = dice.choice
    text = (
        f"{pick(('GET', 'POST', 'HEAD', 'PRI', 'A' * 300))} {pick(('/v1/completions', '/metrics', '*'))} HTTP/1.1\r\n"
    )
    text += "".join(f"{pick(HEADERS)}: {pick(VALUES)}\r\n" for _ in range(dice.randrange(6)))
    text += pick(("\r\n", "\r\nabc", "\r\n0\r\n\r\n", "A: " + "a" * 300_000, "A: a\r\n" * 30_000))
    return text.encode("latin-1") * pick((1, 1, 20))


def post(dice: random.Random) -> bytes:
    """Return a request whose body has values at the edges, and is damaged or cut off sometimes."""
    fields = {'"prompt"': '"a b"', '"max_tokens"': "9"}
    fields |= {json.dumps(dice.choice(FIELDS)): dice.choice(JSON) for _ in range(dice.choice((0, 1, 1, 2, 5)))}
    data = ("{" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}").encode("utf-8", "replace")
    if dice.random() < 0.2:
        data = dice.randbytes(3) + data
    begin = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = f"{begin}Content-Length: {len(data)}\r\n\r\n".encode() + data
    return whole if dice.random() < 0.8 else whole[: dice.randrange(1, len(whole))]


def attack(port: int, until: float, seed: int, told: Counter[str]) -> None:
    """Send requests and noise, and go away in several ways. Modifies: told, how many answers had which status"""
    dice = random.Random(seed)
    while time.monotonic() < until:
        data = dice.choice((head, post, post, lambda dice: dice.randbytes(5000)))(dice)
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as client:
            client.sendall(data)
            if dice.random() < 0.2:
                client.shutdown(socket.SHUT_WR)
            told[client.recv(4096)[9:12].decode("latin-1")] += 1
            if dice.random() < 0.2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


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
def test_a_server_under_attack_serves_others_and_keeps_nothing(extra: None) -> None:
    with serving("--num-frames", 320) as server:
        until, told = time.monotonic() + 60, Counter[str]()
        threads = [threading.Thread(target=attack, args=(server.port, until, seed, told)) for seed in range(6)]
        for thread in threads:
            thread.start()
        honest = asked_meanwhile(server, until)
        for thread in threads:
            thread.join()
        assert told["200"] > 10, told
        assert told["400"] > 10, told
        assert "500" not in told
        assert honest.count(200) > len(honest) / 2 > 5, honest
        server.wait_for_no_frame()
        assert server.ask("/health").status == 200
        assert server.end() == (0, "")
