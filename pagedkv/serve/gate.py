"""The gate before the routes: key, number of requests, size and time of a body. Plain ASGI; knows no engine.

    request ─▶ key? ─▶ fewer than max_requests inside? ─▶ body whole, small, in time? ─▶ the routes
                401         429, Retry-After                413, 408, 415

The key is asked for before a byte of the body is read. A body must be declared as JSON: a page of another site in a
browser cannot send that without leave (CORS), and no leave is ever given.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from pagedkv.serve.answers import error

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

BODY_SECONDS: Final = 30.0
"""The limit for a body to arrive."""

SEND_SECONDS: Final = 60.0
"""The limit for a client to take what fills the buffers of its connection; then the request is cancelled."""

DISCARDED: Final = 2**26
"""Bytes of a body over the limit that are read and dropped, so that the client reads the answer before a reset."""

RETRY_SECONDS: Final = 1


class _Refused(Exception):
    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None) -> None:
        self.status, self.body = status, error(message, kind, code=code)


class _Stalled(Exception):
    pass


class Gate:
    """An ASGI application before another one. num_inside: the POSTs that were let in and have no whole answer yet."""

    def __init__(self, app: App, *, key: str | None, max_body: int, max_requests: int) -> None:
        self.num_inside: int = 0
        self._app, self._max_body, self._max_requests = app, max_body, max_requests
        self._key = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve a request as ASGI has it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        send = _impatient(send)
        try:
            self._check_key(scope)
            if scope["method"] != "POST":
                return await self._app(scope, receive, send)
            self._check_number()
            self.num_inside += 1
            try:
                body = await self._body(scope, receive)
                if body is not None:
                    await self._app(scope, _replayed(body, receive), send)
            finally:
                self.num_inside -= 1
        except _Refused as refused:
            await _answer(refused, send)
        except _Stalled:  # uvicorn closes a connection whose answer has no end
            return None

    def _check_key(self, scope: Message) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        if self._key is not None and scope["path"].startswith("/v1/") and not hmac.compare_digest(given, self._key):
            raise _Refused(
                401,
                "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
            )

    def _check_number(self) -> None:
        if self.num_inside >= self._max_requests:
            raise _Refused(
                429,
                f"{self.num_inside} requests run or wait already, the limit of this server; send it again later",
                "rate_limit_error",
                "rate_limit_exceeded",
            )

    async def _body(self, scope: Message, receive: Receive) -> bytes | None:
        """Return the whole body; None if the client went away."""
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                more = True
                while more and size <= max(DISCARDED, self._max_body):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size <= self._max_body:
                        parts.append(part)
                    else:
                        parts.clear()
        except TimeoutError:
            raise _Refused(408, f"the body did not arrive within {BODY_SECONDS:g} s; send it again") from None
        if size > self._max_body:
            raise _Refused(413, f"the body has more than {self._max_body:,} bytes, the limit; send a shorter prompt")
        if kind != b"application/json":
            raise _Refused(415, "the body is not declared as JSON; send the header Content-Type: application/json")
        return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once, and then all that comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def first() -> Message:
        return messages.pop() if messages else await receive()

    return first


def _impatient(send: Send) -> Send:
    """Return a `send` that raises after SEND_SECONDS without a byte taken."""

    async def limited(message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)
        except TimeoutError:
            raise _Stalled from None

    return limited


async def _answer(refused: _Refused, send: Send) -> None:
    body = json.dumps(refused.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status == 429:
        headers.append((b"retry-after", str(RETRY_SECONDS).encode()))
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.status in (408, 413):
        headers.append((b"connection", b"close"))  # the rest of the body was not read
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
