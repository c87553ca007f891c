"""The gate before the routes: host, key, number of requests, size and time of a body. Plain ASGI; knows no engine.

    request ─▶ one length, host? ─▶ key? ─▶ draining? fewer than max_requests inside? ─▶ body whole, small, in time?
                  400       421      401       503        429                                413, 408, 415  ─▶ routes

The key is asked for before a byte of the body is read. A body must be declared as JSON: a page of another site in a
browser cannot send that without leave (CORS), and no leave is ever given. A page whose own name leads to this machine
(DNS rebinding) needs no leave; `hosts` keeps it out.

An answer goes out in parts of PART bytes: `send` waits for a client that is behind, so that the server holds one part.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from pagedkv.serve.answers import error
from pagedkv.serve.keys import ApiKeys
from pagedkv.serve.shares import Place, Shares

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

BODY_SECONDS: Final = 30.0
"""The limit for a body to arrive."""

DISCARDED: Final = 2**26
"""Bytes of a body over the limit that are read and dropped, so that the client reads the answer before a reset."""

PART: Final = 2**16
"""Bytes of an answer that are handed to the connection at once."""

RETRY_SECONDS: Final = 1

_HOST: Final = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.-]+))(?::\d{0,5})?", re.ASCII)
"""The whole of a Host header (RFC 9110, 7.2), and no more."""

GONE: Final = 499
"""The status under which an answer is counted whose client went away before it began: nginx's number."""


@dataclass(frozen=True)
class Rules:
    """The rules of a gate.

    keys:  None for a server without any. hosts: names that a Host header may have; None for any.
    max_body: bytes. max_requests: POSTs inside at once. shares: None if a tenant may have all.
    """

    keys: ApiKeys | None
    hosts: frozenset[str] | None
    max_body: int
    max_requests: int
    shares: Shares | None = None


class _Refused(Exception):
    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None) -> None:
        self.status, self.body = status, error(message, kind, code=code)


class Gate:
    """An ASGI application before another one.

    num_inside:  the POSTs that were let in and have no whole answer yet.
    is_draining: whether new POSTs are refused.
    """

    def __init__(self, app: App, rules: Rules, answered: Callable[[int], None]) -> None:
        """answered: called with the status of each answer under /v1."""
        self.num_inside: int = 0
        self.is_draining: bool = False
        self._app, self._rules, self._answered = app, rules, answered

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve a request as ASGI has it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        statuses: list[int] = []
        parts = _in_parts(send, statuses)
        try:
            await self._serve(scope, receive, parts)
        except _Refused as refused:
            await _answer(refused, parts)
        finally:
            if scope["path"].startswith("/v1/"):
                self._answered(statuses[0] if statuses else GONE)

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:  # a proxy may have read the other one
            raise _Refused(400, "the request has a Content-Length and a Transfer-Encoding; send one of them")
        self._check_host([host.decode("latin-1") for name, host in scope["headers"] if name == b"host"])
        state = scope.setdefault("state", {})
        if scope["method"] == "POST" or scope["path"].startswith("/v1/"):  # a body takes a place, whatever its path
            state["tenant"] = self._tenant(headers)
        if scope["method"] != "POST":
            return await self._app(scope, receive, send)
        place = state["place"] = self._place(state["tenant"])
        self.num_inside += 1
        try:
            body = await self._body(headers, receive)
            if body is not None:
                await self._app(scope, _replayed(body, receive), send)
        finally:
            self.num_inside -= 1
            if place is not None:
                place.leave()

    def _check_host(self, hosts: list[str]) -> None:
        """Refuse a name that is not allowed. A browser names the host of the page; HTTP/1.0 may name none."""
        names = self._rules.hosts
        if names is not None and not all(is_allowed(host, names) for host in hosts):
            shown = ", ".join(hosts)[:80]
            raise _Refused(
                421,
                f"the Host header is {shown!r}, a name under which this server is not known; ask for 127.0.0.1 or "
                "localhost, or start the server with --allowed-host",
                code="host_not_allowed",
            )

    def _tenant(self, headers: dict[bytes, bytes]) -> bytes:
        if self._rules.keys is None:
            return b""
        tenant = self._rules.keys.tenant_of(headers.get(b"authorization", b""))
        if tenant is None:
            raise _Refused(
                401,
                "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
            )
        return tenant

    def _place(self, tenant: bytes) -> Place | None:
        """Return the place of a new request; None if tenants have no shares.

        The first request of a tenant gets in whatever the others have, so the limit is passed by one for each tenant.
        """
        if self.is_draining:
            raise _Refused(503, "the server ends and takes no new request; send it to another one", "server_error")
        number, owner, shares = self.num_inside, "of this server", self._rules.shares
        if number < self._rules.max_requests or (shares is not None and shares.has_none(tenant)):
            if shares is None or (place := shares.enter(tenant)) is not None:
                return None if shares is None else place
            number, owner = shares.running + shares.waiting, "of a key"
        raise _Refused(
            429,
            f"{number} requests run or wait already, the limit {owner}; send it again later",
            "rate_limit_error",
            "rate_limit_exceeded",
        )

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """Return the whole body; None if the client went away."""
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        most, parts, size = self._rules.max_body, list[bytes](), 0
        declared = headers.get(b"content-length", b"")
        more = not (declared.isdigit() and len(declared) < 20 and int(declared) > max(DISCARDED, most))
        size = 0 if more else most + 1
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more and size <= max(DISCARDED, most):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                    else:
                        parts.clear()
        except TimeoutError:
            raise _Refused(408, f"the body did not arrive within {BODY_SECONDS:g} s; send it again") from None
        if size > most:
            raise _Refused(413, f"the body has more than {most:,} bytes, the limit; send a shorter prompt")
        if kind != b"application/json":
            raise _Refused(415, "the body is not declared as JSON; send the header Content-Type: application/json")
        return b"".join(parts)


def is_allowed(host: str, names: frozenset[str]) -> bool:
    """Return whether a Host header is one of `names`, or an address: no DNS leads there. A port may follow."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    try:
        if found["address"]:
            return bool(ipaddress.IPv6Address(found["address"]))
        name = found["name"].lower().removesuffix(".")
        return name in names or bool(ipaddress.IPv4Address(name))
    except ValueError:
        return False


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once, and then all that comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def first() -> Message:
        return messages.pop() if messages else await receive()

    return first


def _in_parts(send: Send, statuses: list[int]) -> Send:
    """Return a `send` that hands a body on in parts, and notes the status in `statuses`."""

    async def one_by_one(message: Message) -> None:
        if "status" in message:
            statuses.append(message["status"])
            return await send(message)
        body, has_more = message.get("body", b""), message.get("more_body", False)
        for start in range(0, max(1, len(body)), PART):
            end = start + PART
            await send({**message, "body": body[start:end], "more_body": has_more or end < len(body)})

    return one_by_one


async def _answer(refused: _Refused, send: Send) -> None:
    body = json.dumps(refused.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status in (429, 503):
        headers.append((b"retry-after", str(RETRY_SECONDS).encode()))
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.status in (400, 408, 413):
        headers.append((b"connection", b"close"))  # the rest of the body was not read, or may be another request
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
