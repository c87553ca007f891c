"""A client that means harm: bytes at random, heads and bodies without an end, numbers and texts at every edge.

Each attack opens a connection, and returns the begin of the answer. Nothing is checked here but that the server goes
on: the test does that.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/models/%00%ff/..", "/health", "/metrics", "*"]
METHODS = ["GET", "POST", "HEAD", "PUT", "OPTIONS", "CONNECT", "PRI", "G\x00T", "A" * 300]
HEADERS = ["Host", "Content-Length", "Transfer-Encoding", "Authorization", "Expect", "Upgrade", "\x00a", ""]
VALUES = ["localhost", "-1", "9" * 30, "chunked", "gzip, chunked", "100-continue", "websocket", "\xff", "a\rb"]
JSON = [
    "0", "-1", "1e308", "1e999", "NaN", "1.5", "9" * 400, "-" + "9" * 5000, str(2**31), str(-(2**63) - 1), "1E-400",
    "true", "null", '""', r'"\ud800"', r'"\u0000"', '"\u202e\ufeff\U0010ffff"', '"' + "a" * 100_000 + '"', '"\xff"',
    '"{{ 7*7 }}{% for a in range(10**9) %}a{% endfor %}"', "[]", "{}", "[[]]", "[" * 300 + "]" * 300,
    '{"a":' * 150 + "1" + "}" * 150, "[1,[2]]", "[99999999999]", '{"type": "json_schema", "json_schema": {"schema": '
    '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}}', '{"type": "json_schema", "json_schema": '
    '{"schema": {"type": "string", "pattern": "' + "(" * 2000 + ")" * 2000 + '"}}}',
]  # fmt: skip
FIELDS = """
model prompt messages max_tokens n stream stream_options stop stop_token_ids temperature top_p top_k min_p
repetition_penalty frequency_penalty logit_bias seed min_tokens logprobs top_logprobs priority response_format
chat_template_kwargs echo __class__ self""".split()


class Attacker:
    """One thread's attacks on a port; `told` counts statuses."""

    def __init__(self, port: int, seed: int) -> None:
        self.told: Counter[str] = Counter()
        self._port, self._random = port, random.Random(seed)
        self._kept: list[socket.socket] = []

    def run(self, until: float) -> None:
        """Attack until a time of time.monotonic()."""
        attacks: list[Callable[[], bytes]] = [self.noise, self.head, self.half, self.body, self.body, self.vanish]
        while time.monotonic() < until:
            attack = self._random.choice(attacks)
            answer = b""
            with suppress(OSError):
                answer = attack()
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

    def _post(self, body: bytes, path: str = "/v1/completions") -> bytes:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body

    def noise(self) -> bytes:
        """Send bytes at random."""
        return self._exchange(self._random.randbytes(self._random.choice((1, 30, 5000, 100_000))))

    def head(self) -> bytes:
        """Send a request line and headers at the edges of HTTP, sometimes without an end, or many requests."""
        pick = self._random.choice
        text = f"{pick(METHODS)} {pick(PATHS)} HTTP/{pick(('1.1', '1.0', '9', '1.1 '))}\r\n"
        text += "".join(f"{pick(HEADERS)}: {pick(VALUES)}\r\n" for _ in range(self._random.randrange(6)))
        text += pick(("\r\n", "\r\nabc", "\r\n0\r\n\r\n", "A: " + "a" * 300_000, "A: a\r\n" * 30_000))
        return self._exchange(text.encode("latin-1") * pick((1, 1, 20)))

    def half(self) -> bytes:
        """Declare more than is sent, and go away or keep the connection for a while."""
        data = self._post(b'{"prompt": "a"}')
        sock = self._connect()
        sock.sendall(data[: self._random.randrange(1, len(data))])
        self._kept.append(sock)
        while len(self._kept) > self._random.randrange(100):
            self._kept.pop(self._random.randrange(len(self._kept))).close()
        return b""

    def body(self) -> bytes:
        """Send a body with values at the edges, sometimes damaged."""
        chat, pick = self._random.random() < 0.4, self._random.choice
        fields = {'"prompt"': '"a b"'}
        if chat:
            fields = {'"messages"': f'[{{"role": {pick(("5", chr(34) + "user" + chr(34)))}, "content": {pick(JSON)}}}]'}
        fields['"max_tokens"'] = "9"
        for _ in range(pick((0, 1, 1, 1, 2, 5))):
            fields[json.dumps(pick(FIELDS))] = pick(JSON)
        data = ("{" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}").encode("utf-8", "replace")
        if self._random.random() < 0.2:
            at = self._random.randrange(len(data))
            data = data[:at] + self._random.randbytes(3) + data[at + 3 :]
        return self._exchange(self._post(data, f"/v1/{'chat/' if chat else ''}completions"))

    def vanish(self) -> bytes:
        """Ask for a long stream and reset the connection."""
        body = b'{"prompt": "a b", "max_tokens": 2000, "ignore_eos": true, "stream": true, "n": 3}'
        with self._connect() as sock:
            sock.sendall(self._post(body))
            answer = sock.recv(self._random.choice((1, 3000)))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return answer


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
