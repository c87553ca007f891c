"""The gate alone: lengths, keys, drains, sizes of bodies; and a whole server at the edges of HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from hashlib import sha256
from typing import Any

import pytest

from pagedkv.engine.serve import gate as gates
from pagedkv.engine.serve.gate import Gate, Rules
from pagedkv.engine.serve.keys import ApiKeys
from tests.engine.serve.server import Server

MOST = 1000
"""Bytes of a body."""


class Asked:
    """One request through a gate. messages: those of the answer. statuses: as the gate counts them."""

    def __init__(
        self,
        gate_rules: Rules,
        *,
        app: Any = None,
        is_draining: bool = False,
        method: str = "POST",
        path: str = "/v1/completions",
        parts: tuple[bytes, ...] = (b"{}",),
        **headers: str,
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.tenant: bytes | None = None
        self._app = app
        gate = Gate(self._inside, gate_rules, self.statuses.append)
        gate.is_draining = is_draining
        given = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        headers = [(name.encode(), text.encode()) for name, text in given.items()]
        self._parts = list(parts)
        self.body: bytes | None = None
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        asyncio.run(gate(scope, self._receive, self._send))
        assert gate.num_inside == 0

    async def _receive(self) -> dict[str, Any]:
        if not self._parts:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._parts.pop(0), "more_body": bool(self._parts)}

    async def _send(self, message: Any) -> None:
        self.messages.append(message)

    async def _inside(self, scope: Any, receive: Any, send: Any) -> None:
        self.tenant = scope["state"]["tenant"]
        if self._app is not None:
            await self._app(scope, receive, send)
            return
        self.body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])


def rules(keys: ApiKeys | None = None, max_requests: int = 9) -> Rules:
    return Rules(keys, MOST, max_requests)


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "DELETE"])
def test_a_request_of_two_lengths_is_refused_and_its_connection_closed(method: str) -> None:
    """A proxy that reads the other length takes the rest of the body for another request, of another client."""
    asked = Asked(rules(), method=method, content_length="2", transfer_encoding="chunked")
    assert (asked.status, asked.headers[b"connection"], asked.tenant) == (400, b"close", None)
    assert "a Content-Length and a Transfer-Encoding" in json.loads(asked.messages[1]["body"])["error"]["message"]
    for one in ({"content_length": "2"}, {"transfer_encoding": "chunked"}):
        assert Asked(rules(), method=method, **one).status == 200


def test_a_key_brings_its_tenant_to_the_routes() -> None:
    keys = ApiKeys({sha256(key).digest(): tenant for key, tenant in ((b"a", b"acme"), (b"z", b"zebra"))})
    assert Asked(rules(keys), authorization="Bearer z").tenant == b"zebra"
    assert Asked(rules()).tenant == b"", "without keys all are one tenant"
    refused = Asked(rules(keys), authorization="Bearer y")
    assert (refused.status, refused.tenant, refused.statuses) == (401, None, [401])


def test_without_a_key_no_body_takes_a_place_on_any_path() -> None:
    keys = ApiKeys.of("secret")
    for path in ("/x", "/metrics", "/v1/completions"):
        assert Asked(rules(keys, max_requests=0), path=path).status == 401
    assert Asked(rules(keys, max_requests=0), path="/x", authorization="Bearer secret").status == 429


def test_a_drain_refuses_new_requests_with_a_time_to_ask_again() -> None:
    asked = Asked(rules(), is_draining=True)
    assert (asked.status, asked.tenant, asked.headers[b"retry-after"]) == (503, None, b"1")
    assert "takes no new request" in json.loads(asked.messages[1]["body"])["error"]["message"]
    assert Asked(rules(), is_draining=True, method="GET").status == 200


def test_every_answer_is_counted_once_and_a_client_that_went_away_too() -> None:
    async def gone(*_: Any) -> None:
        pass

    assert Asked(rules(), app=gone).statuses == [499]
    assert Asked(rules(max_requests=0)).statuses == [429]
    assert Asked(rules(), content_type="text/plain").statuses == [415]


@pytest.mark.parametrize("parts", [[MOST], [1] * MOST, [MOST // 2, MOST // 2], [0, MOST, 0]])
def test_a_body_that_is_too_large_is_refused_and_never_reaches_the_routes(parts: list[int]) -> None:
    body = tuple(b"a" * size for size in parts)
    whole = Asked(rules(), parts=body)
    assert (whole.status, whole.body) == (200, b"a" * MOST)
    for more in ((*body, b"a"), (b"a", *body), (*body, b"a" * MOST, b"a")):
        refused = Asked(rules(), parts=more)
        assert (refused.status, refused.body, refused.tenant) == (413, None, None)
    for length in (str(gates.DISCARDED + 1), "9" * 5000):
        declared = Asked(rules(), content_length=length, parts=body)
        assert (declared.status, len(declared._parts)) == (413, len(parts)), "before a byte was read"


def test_a_body_that_does_not_arrive_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "BODY_SECONDS", 0.05)
    assert Asked(rules(), parts=()).statuses == [499], "the client went away"

    async def never() -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(Asked, "_receive", lambda _: never())
    assert Asked(rules()).status == 408


GETS = ["/health", "/metrics", "/v1/models", "/v1/models/bundled"]
POSTS = ["/v1/completions", "/v1/chat/completions"]
BODY = b'{"prompt": "a", "max_tokens": 1}'


def sent(server: Server, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """Return the status and all bytes behind the head of the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as client:
        client.sendall(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n" + body)
        data = b""
        while part := client.recv(65536):
            data += part
    told, _, rest = data.partition(b"\r\n\r\n")
    return int(told.split()[1]), rest


def test_routes_have_their_methods_and_their_paths_only(server: Server) -> None:
    """A redirect from a path with a slash at its end would lead to the name in the Host header."""
    close = "Host: localhost\nConnection: close"
    for path in (*GETS, *POSTS):
        answer = server.ask(path, {} if path in GETS else None)
        allowed = {"GET", "HEAD"} if path in GETS else {"POST"}
        assert (answer.status, set(answer.headers["Allow"].split(", "))) == (405, allowed)
        assert sent(server, f"HEAD {path} HTTP/1.1\n{close}") == (200 if path in GETS else 405, b"")
        assert sent(server, f"GET {path}/ HTTP/1.1\n{close}")[0] == 404


@pytest.mark.parametrize(
    "head",
    [
        "Host: localhost\nContent-Length: 32\nTransfer-Encoding: chunked",
        "Host: localhost\nTransfer-Encoding: chunked\nContent-Length: 0",
        "Host: localhost\nContent-Length: 32\nContent-Length: 5",
        "Host: localhost\nTransfer-Encoding: gzip, chunked",
        "Host: localhost\nContent-Length: +32",
        "Host: localhost\nHost: localhost\nContent-Length: 32",
        "Content-Length: 32",
    ],
)
def test_a_head_that_can_be_read_in_two_ways_is_refused_and_nothing_behind_it_read(server: Server, head: str) -> None:
    before = server.count(200)
    second = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    second += b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    kind = "Content-Type: application/json"
    status, rest = sent(server, f"POST /v1/completions HTTP/1.1\n{kind}\n{head}", b"0\r\n\r\n" + second)
    assert status in (400, 501)
    assert b"HTTP/1.1" not in rest, "one answer"
    assert server.count(200) == before
    assert sent(server, "GET /health HTTP/1.1\nHost: localhost\nConnection: close")[0] == 200
