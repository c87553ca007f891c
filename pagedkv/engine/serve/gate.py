"""The gate before the routes: key, number of requests, size and time of a body. Plain ASGI; knows no engine.

    request ─▶ one length? ─▶ key? ─▶ draining? fewer than max_requests inside? ─▶ body whole, small, in time?
                  400          401      503        429                                413, 408, 415  ─▶ routes

Starlette looks at the Host header before the gate, and uvicorn limits heads and connections (process.py).

The key is asked for before a byte of the body is read. A body must be declared as JSON: a page of another site in a
browser cannot send that without leave (CORS), and no leave is ever given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from pagedkv.engine.serve.answers import error
from pagedkv.engine.serve.keys import ApiKeys
from pagedkv.engine.serve.shares import Place, Shares

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

BODY_SECONDS: Final = 30.0
"""The limit for a body to arrive: a request that waits for its body has a place."""

DISCARDED: Final = 2**26
"""Bytes of a body over the limit that are read and dropped, so that the client reads the answer before a reset."""

RETRY_SECONDS: Final = 1

GONE: Final = 499
"""The status under which an answer is counted if its client went away before it began: nginx's number."""

HEADERS: Final = {
    400: {"Connection": "close"},  # what follows may be another request
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},  # and so is the rest of a body
    413: {"Connection": "close"},
    429: {"Retry-After": str(RETRY_SECONDS)},
    503: {"Retry-After": str(RETRY_SECONDS)},
}


@dataclass(frozen=True)
class Rules:
    """The rules of a gate.

    keys: None for a server without any. max_body: bytes. max_requests: POSTs inside at once.
    shares: None if a tenant may have all.
    """

    keys: ApiKeys | None
    max_body: int
    max_requests: int
    shares: Shares | None = None


class _Refused(Exception):
    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None) -> None:
        self.answer = JSONResponse(error(message, kind, code=code), status, HEADERS.get(status))


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

        async def noted(message: Message) -> None:
            if "status" in message:
                statuses.append(message["status"])
            await send(message)

        try:
            await self._serve(scope, receive, noted)
        except _Refused as refused:
            await refused.answer(scope, receive, noted)
        finally:
            if scope["path"].startswith("/v1/"):
                self._answered(statuses[0] if statuses else GONE)

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may have read the other one
            raise _Refused(400, "the request has a Content-Length and a Transfer-Encoding; send one of them")
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

    def _tenant(self, headers: Headers) -> bytes:
        if self._rules.keys is None:
            return b""
        tenant = self._rules.keys.tenant_of(headers.get("authorization", "").encode("latin-1"))
        if tenant is None:
            message = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
            raise _Refused(401, message, code="invalid_api_key")
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
        message = f"{number} requests run or wait already, the limit {owner}; send it again later"
        raise _Refused(429, message, "rate_limit_error", "rate_limit_exceeded")

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """Return the whole body; None if the client went away."""
        most, declared = self._rules.max_body, headers.get("content-length", "0")
        most_read = max(most, DISCARDED)
        body, more = bytearray(), True
        size = 0 if len(declared) < 20 and int(declared) <= most_read else most_read + 1
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more and size <= most_read:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    body += part if size <= most else b""
        except TimeoutError:
            raise _Refused(408, f"the body did not arrive within {BODY_SECONDS:g} s; send it again") from None
        if size > most:
            raise _Refused(413, f"the body has more than {most:,} bytes, the limit; send a shorter prompt")
        if headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise _Refused(415, "the body is not declared as JSON; send the header Content-Type: application/json")
        return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once, and then all that comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def first() -> Message:
        return messages.pop() if messages else await receive()

    return first
