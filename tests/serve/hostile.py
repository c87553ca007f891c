"""A client that means harm: bytes at random, heads and bodies without an end, numbers and texts at every edge.

    python -m tests.serve.hostile PORT SECONDS [SEED]      attack a server, and say which answers came

Each attack opens a connection of its own, and returns the status of the answer, or "cut" if there is none. Nothing here
is checked but that the server goes on: the test does that.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/%00%ff/..",
    "/health",
    "/metrics",
    "/",
    "*",
]
METHODS = ["GET", "POST", "HEAD", "PUT", "OPTIONS", "TRACE", "CONNECT", "PRI", "G\x00T", "A" * 300]
NUMBERS = ["0", "-1", "1", "-0", "1e308", "1e999", "-1e999", "NaN", "Infinity", "1.5", "9" * 400, "-" + "9" * 5000]
NUMBERS += [
    str(2**31),
    str(-(2**31) - 1),
    str(2**63),
    str(2**63 - 1),
    str(-(2**63) - 1),
    "1E-400",
    "0x10",
    "true",
    "null",
]
TEXTS = [
    '""',
    '"a"',
    r'"\ud800"',
    r'"\udc00\ud800"',
    r'"\u0000"',
    '"\u202e\ufeff\U0010ffff"',
    '"' + "\u0301" * 500 + '"',
]
TEXTS += ['"' + "a" * 100_000 + '"', '"</s><s>[INST]"', '"{{ 7*7 }}{% for a in range(10**9) %}a{% endfor %}"', '"\xff"']
SHAPES = [
    "[]",
    "{}",
    "[[]]",
    "[" * 300 + "]" * 300,
    '{"a":' * 150 + "1" + "}" * 150,
    "[1,[2]]",
    "[-1]",
    "[99999999999]",
]
MANY = b"".join(b"A%d: a\r\n" % n for n in range(30_000))
FIELDS = """
model prompt messages max_tokens max_completion_tokens n stream stream_options stop stop_token_ids temperature top_p
top_k min_p repetition_penalty frequency_penalty presence_penalty logit_bias seed min_tokens ignore_eos logprobs
top_logprobs priority response_format chat_template_kwargs echo tools user __class__ self""".split()
SCHEMAS = [
    '{"$ref": "#"}',
    '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}',
    '{"pattern": "(((a*)*)*)*b"}',
    '{"type": "string", "pattern": "' + "(" * 2000 + ")" * 2000 + '"}',
    '{"type": "array", "minItems": 1000000, "items": {"$ref": "#"}}',
    '{"enum": []}',
    "true",
    '{"type": "' + "a" * 70_000 + '"}',
]


class Attacker:
    """One thread's attacks on a port; `told` counts statuses."""

    def __init__(self, port: int, seed: int) -> None:
        self.told: Counter[str] = Counter()
        self._port, self._random = port, random.Random(seed)
        self._kept: list[socket.socket] = []

    def run(self, until: float) -> None:
        """Attack until a time of time.monotonic()."""
        attacks: list[Callable[[], bytes]] = [
            self.noise, self.strange_head, self.huge_head, self.half_body, self.strange_chunks, self.pipeline,
            self.strange_body, self.strange_body, self.strange_body, self.schema, self.vanish, self.drip,
        ]  # fmt: skip
        while time.monotonic() < until:
            attack = self._random.choice(attacks)
            try:
                answer = attack()
            except OSError:
                answer = b""
            status = answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "cut"
            self.told[f"{attack.__name__} {status}"] += 1
        for sock in self._kept:
            sock.close()

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=20)

    def _exchange(self, data: bytes) -> bytes:
        """Send bytes and return the begin of the answer."""
        with self._connect() as sock:
            with suppress(OSError):
                sock.sendall(data)
                if self._random.random() < 0.2:
                    sock.shutdown(socket.SHUT_WR)
            return sock.recv(4096)

    def _post(self, body: bytes, path: str = "/v1/completions", extra: str = "") -> bytes:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{extra}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body

    # --- attacks ---

    def noise(self) -> bytes:
        """Send bytes at random."""
        return self._exchange(self._random.randbytes(self._random.choice((1, 30, 5000, 100_000))))

    def strange_head(self) -> bytes:
        """Send a request line and headers at the edges of HTTP."""
        pick = self._random.choice
        head = f"{pick(METHODS)} {pick(PATHS)} HTTP/{pick(('1.1', '1.0', '2.0', '9', '1.1 '))}\r\n"
        for _ in range(self._random.randrange(6)):
            name = pick(
                ("Host", "Content-Length", "Transfer-Encoding", "Authorization", "Expect", "Upgrade", "\x00a", "")
            )
            text = pick(
                ("localhost", "-1", "9" * 30, "chunked", "gzip, chunked", "100-continue", "websocket", "\xff", "a\rb")
            )
            head += f"{name}: {text}\r\n"
        return self._exchange((head + "\r\n" + pick(("", "abc", "0\r\n\r\n"))).encode("latin-1"))

    def huge_head(self) -> bytes:
        """Send a head without an end: one huge header, or many."""
        one = (
            b"A: " + b"a" * 300_000
            if self._random.random() < 0.5
            else b"".join(b"A%d: a\r\n" % n for n in range(30_000))
        )
        return self._exchange(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + one)

    def half_body(self) -> bytes:
        """Declare more than is sent, and go away or keep the connection for a while."""
        data = self._post(b'{"prompt": "a"}')
        sock = self._connect()
        sock.sendall(data[: self._random.randrange(1, len(data))])
        self._kept.append(sock)
        while len(self._kept) > self._random.randrange(300):
            self._kept.pop(self._random.randrange(len(self._kept))).close()
        return b""

    def strange_chunks(self) -> bytes:
        """Send chunks of wrong sizes."""
        size = self._random.choice((b"5", b"fffffffffffffffff", b"-1", b"0", b"5;" + b"a" * 70_000, b"zz"))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        return self._exchange(head + b"Content-Type: application/json\r\n\r\n" + size + b"\r\n{}   \r\n0\r\n\r\n")

    def pipeline(self) -> bytes:
        """Send many requests at once and read one answer."""
        return self._exchange(self._post(b'{"prompt": "a", "max_tokens": 3}') * self._random.randrange(1, 60))

    def value(self) -> str:
        """Return a JSON value at an edge."""
        kind = self._random.choice((NUMBERS, TEXTS, SHAPES))
        return self._random.choice(kind)

    def strange_body(self) -> bytes:
        """Send a body with values at the edges, sometimes damaged."""
        chat = self._random.random() < 0.4
        fields = {'"prompt"': '"a b"'}
        if chat:
            content = self._random.choice((*TEXTS[:8], self.value()))
            role = self._random.choice(('"user"', '"system"', '"developer"', self.value()))
            fields = {'"messages"': f'[{{"role": {role}, "content": {content}}}]'}
        fields['"max_tokens"'] = "9"
        for _ in range(self._random.choice((0, 1, 1, 1, 2, 5))):
            fields[json.dumps(self._random.choice(FIELDS))] = self.value()
        if self._random.random() < 0.3:
            fields['"logit_bias"'] = f'{{"{self._random.choice(NUMBERS)}": {self._random.choice(NUMBERS)}}}'
        body = ("{" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}").encode("utf-8", "replace")
        if self._random.random() < 0.2:
            at = self._random.randrange(len(body))
            body = body[:at] + self._random.randbytes(3) + body[at + 3 :]
        return self._exchange(self._post(body, f"/v1/{'chat/' if chat else ''}completions"))

    def schema(self) -> bytes:
        """Ask for a form that is hard to compile."""
        form = f'{{"type": "json_schema", "json_schema": {{"name": "a", "schema": {self._random.choice(SCHEMAS)}}}}}'
        body = f'{{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": 9, "response_format": {form}}}'
        return self._exchange(self._post(body.encode(), "/v1/chat/completions"))

    def vanish(self) -> bytes:
        """Ask for a long stream and reset the connection."""
        with self._connect() as sock:
            sock.sendall(
                self._post(b'{"prompt": "a b", "max_tokens": 2000, "ignore_eos": true, "stream": true, "n": 3}')
            )
            answer = sock.recv(self._random.choice((1, 3000)))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return answer

    def drip(self) -> bytes:
        """Keep a connection that sends a head byte by byte, or reads nothing of a long answer."""
        sock = self._connect()
        asked = b'{"prompt": "a b", "max_tokens": 3000, "ignore_eos": true, "stream": true, "logprobs": 5}'
        sock.sendall(self._post(asked) if self._random.random() < 0.3 else b"GET /he")
        self._kept.append(sock)
        for other in self._kept[:30]:
            with suppress(OSError):
                other.send(b"a")
        return b""


def attack(port: int, seconds: float, seed: int, num_threads: int = 6) -> Counter[str]:
    """Attack a server of this machine with several threads. Returns: how many attacks had which answer"""
    until = time.monotonic() + seconds
    attackers = [Attacker(port, seed * 1000 + n) for n in range(num_threads)]
    threads = [threading.Thread(target=each.run, args=(until,)) for each in attackers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum((each.told for each in attackers), Counter[str]())


def flood(port: int, count: int) -> list[Any]:
    """Open connections that send nothing, and return those that could be opened."""
    opened: list[socket.socket] = []
    with suppress(OSError):
        while len(opened) < count:
            opened.append(socket.create_connection(("127.0.0.1", port), timeout=5))
    return opened


if __name__ == "__main__":
    for name, number in sorted(attack(int(sys.argv[1]), float(sys.argv[2]), int([*sys.argv, 1][3])).items()):
        print(f"{number:7} {name}")
