"""A `pagedkv serve` process of the bundled checkpoint, at a port of its own, and what its clients ask."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FACTS = "Mira keeps a red lamp in the cellar. Otto lives in Ghent. "
ASKED = f"{FACTS}Where does Otto live?"
ANSWER = "Otto lives in Ghent."
LONG = {"prompt": ASKED, "max_tokens": 4000, "ignore_eos": True, "stream": True}
RUNNING, WAITING = (f'pagedkv_num_requests_{state}{{pool="default"}}' for state in ("running", "waiting"))


class Answer(NamedTuple):
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]


class Server:
    """The process. port: the one at which it listens. said: its stderr up to there."""

    def __init__(self, process: subprocess.Popen[str], port: int, said: str) -> None:
        self.process, self.port, self.said = process, port, said
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: Any = None, **headers: str) -> Answer:
        """GET, or POST of an object as JSON, or of bytes as they are."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return Answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read())

    def begun(self, body: dict[str, Any], *, wait: bool = True, **headers: str) -> socket.socket:
        """Return a connection whose request was sent. If `wait`, and it asks for a stream, the answer has begun."""
        data = json.dumps(body).encode()
        client = socket.create_connection(("127.0.0.1", self.port), timeout=300)
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        head += "".join(f"{name}: {text}\r\n" for name, text in headers.items())
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        if body.get("stream") and wait:
            assert b"200 OK" in client.recv(100)
        return client

    def metric(self, name: str, missing: float | None = None) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.ask("/metrics").body.decode(), re.M)
        assert found or missing is not None, name
        return float(found[1]) if found else float(missing or 0)

    def count(self, status: int) -> float:
        """Return how many answers under /v1 had a status."""
        return self.metric(f'pagedkv_answers_total{{status="{status}"}}', missing=0)

    def mapped(self) -> float:
        return self.metric('pagedkv_frames{pool="default",state="mapped"}')

    def wait_until(self, name: str, value: float) -> None:
        deadline = time.monotonic() + 300
        while (now := self.metric(name, missing=0)) != value:
            assert time.monotonic() < deadline, f"{name} is {now}"
            time.sleep(0.02)

    def wait_for_no_frame(self) -> None:
        self.wait_until('pagedkv_frames{pool="default",state="mapped"}', 0)
        self.wait_until(WAITING, 0)

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; return the status and the rest of stderr."""
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=300)
        return self.process.returncode, said


@contextmanager
def serving(*options: object, **environment: str) -> Iterator[Server]:
    """Start a server, and end it."""
    command = [sys.executable, "-m", "pagedkv", "serve", "--port", "0", *map(str, options)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PAGEDKV_DEBUG": "0", **environment}
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stderr
            said = ""
            while not (found := re.search(r"is served at http://[\d.]+:(\d+)/v1\n", said)):
                line = process.stderr.readline()
                assert line, said
                said += line
            yield Server(process, int(found[1]), said)
        finally:
            process.kill()
