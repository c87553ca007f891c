"""A server under attack goes on: it answers others meanwhile, gives all frames back, says nothing, and drains."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
from collections import Counter
from contextlib import suppress

import pytest

from tests.engine.serve.server import ANSWER, ASKED, Server

HEADERS = ["Host", "Content-Length", "Transfer-Encoding", "Authorization", "Expect", "Upgrade", "\x00a", ""]
VALUES = ["localhost", "-1", "9" * 30, "chunked", "gzip, chunked", "100-continue", "websocket", "\xff", "a\rb"]
FIELDS = "model prompt max_tokens n stream stop temperature top_p logit_bias seed logprobs response_format self".split()
JSON = [
    "0", "-1", "1e999", "NaN", "9" * 400, str(2**31), str(-(2**63) - 1), "true", "null", '""', r'"\ud800"', r'"\u0000"',
    '"' + "a" * 100_000 + '"', '"\xff"', "[]", "{}", "[[]]", "[" * 300 + "]" * 300, '{"a":' * 150 + "1" + "}" * 150,
]  # fmt: skip


def head(dice: random.Random) -> bytes:
    """Return a request line and headers at the edges of HTTP, sometimes without an end, or many requests."""
    pick = dice.choice
    text = f"{pick(('GET', 'POST', 'HEAD', 'A' * 300))} {pick(('/v1/completions', '/metrics', '*'))} HTTP/1.1\r\n"
    text += "".join(f"{pick(HEADERS)}: {pick(VALUES)}\r\n" for _ in range(dice.randrange(6)))
    text += pick(("\r\n", "\r\nabc", "\r\n0\r\n\r\n", "A: " + "a" * 300_000, "A: a\r\n" * 30_000))
    return text.encode("latin-1") * pick((1, 1, 20))


def post(dice: random.Random) -> bytes:
    """Return a request whose body has values at the edges, and is damaged or cut off sometimes."""
    fields = {'"prompt"': '"a b"', '"max_tokens"': "9"}
    fields |= {json.dumps(dice.choice(FIELDS)): dice.choice(JSON) for _ in range(dice.choice((0, 1, 1, 2, 5)))}
    data = ("{" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}").encode("utf-8", "replace")
    begin = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = f"{begin}Content-Length: {len(data)}\r\n\r\n".encode() + data
    return whole if dice.random() < 0.8 else whole[: dice.randrange(1, len(whole))]


def attack(port: int, count: int, seed: int, told: Counter[str]) -> None:
    """Send requests and noise, and go away in several ways. Modifies: told, how many answers had which status"""
    dice = random.Random(seed)
    for _ in range(count):
        data = dice.choice((head, post, post, lambda dice: dice.randbytes(5000)))(dice)
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as client:
            client.sendall(data)
            told[client.recv(4096)[9:12].decode("latin-1")] += 1
            if dice.random() < 0.2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("count", [15, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_server_under_attack_serves_others_and_keeps_nothing(server: Server, count: int) -> None:
    told = Counter[str]()
    threads = [threading.Thread(target=attack, args=(server.port, count, seed, told)) for seed in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        answer = server.ask("/v1/completions", {"prompt": ASKED, "temperature": 0, "priority": -1})
        assert answer.json["choices"][0]["text"] == ANSWER
    assert told["400"] > 0
    assert "500" not in told
