"""Connections with clocks, over sockets and without an engine: clients that send nothing, take nothing, or are many."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'pagedkv[serve]'")

from pagedkv.serve import connection  # noqa: E402
from pagedkv.serve.connection import Connection, ConnectionTable  # noqa: E402
from pagedkv.serve.gate import Gate, Rules  # noqa: E402

HUGE = 2**24
HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


class Told:
    """A server's own view. dropped: reasons. ended: how its answers ended. table: its connections."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self.ended: list[str] = []
        self.address: Any = None
        self.table: Any = None


async def answers(told: Told, path: str, receive: Any, send: Any) -> None:
    """Send a huge body at /huge, an endless one at /endless, a short one elsewhere."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    if path == "/endless":
        gone = asyncio.ensure_future(_gone(receive))
        while not gone.done():
            await send({"type": "http.response.body", "body": b"a" * 9000, "more_body": True})
            await asyncio.sleep(0)
        return
    await send({"type": "http.response.body", "body": b"a" * (HUGE if path == "/huge" else 5)})


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def serving(*, most: int = 100, send_s: float = 60) -> AsyncIterator[Told]:
    told = Told()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answers(told, scope["path"], receive, send)
        told.ended.append(scope["path"])

    table = told.table = ConnectionTable(most, send_s, lambda reason: told.dropped.update([reason]))
    gate: Any = Gate(app, Rules(None, None, 1000, 1000), lambda _: None)
    made: Any = partial(Connection, table=table)
    config = uvicorn.Config(gate, http=made, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        told.address = sock.getsockname()
        tasks = [asyncio.ensure_future(server.serve(sockets=[sock])), asyncio.ensure_future(table.run())]
        while not server.started:
            await asyncio.sleep(0.005)
        try:
            yield told
        finally:
            server.should_exit = True
            table.abort()
            await tasks[0]
            tasks[1].cancel()


def story(told_by: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(told_by(), 30))


async def client(told: Told) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, told.address)
    return await asyncio.open_connection(sock=sock, limit=2**12)


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", ["/huge", "/endless"])
def test_a_client_that_takes_nothing_is_cut_off_and_its_answer_ends(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(connection, "TICK_SECONDS", 0.02)

    async def whole() -> None:
        async with serving(send_s=0.3) as told:
            _, writer = await client(told)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            await until(lambda: told.dropped["stalled"] == 1)
            await until(lambda: told.ended == [path])
            writer.close()

    story(whole)


def test_a_client_that_reads_slowly_but_steadily_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TICK_SECONDS", 0.02)

    async def whole() -> None:
        async with serving(send_s=2) as told:
            reader, writer = await client(told)
            writer.write(b"GET /huge HTTP/1.0\r\n\r\n")
            size, slow_until = 0, time.monotonic() + 2.5
            while part := await reader.read(2**18 if time.monotonic() > slow_until else 2**16):
                size += len(part)
                if time.monotonic() < slow_until:
                    await asyncio.sleep(0.05)
            assert size > HUGE
            assert not told.dropped
            writer.close()

    story(whole)


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HT", HEAD + b"GET /", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n"]
)
def test_a_client_that_sends_no_whole_head_is_cut_off(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connection, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)

    async def whole() -> None:
        async with serving() as told:
            _, writer = await client(told)
            writer.write(sent)
            await until(lambda: told.dropped["silent"] == 1)
            writer.close()

    story(whole)


def test_a_client_that_drips_a_body_after_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)

    async def whole() -> None:
        async with serving() as told:
            _, writer = await client(told)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n")
            while not told.dropped:
                writer.write(b"a")
                await asyncio.sleep(0.01)
            assert told.dropped == {"silent": 1}
            writer.close()

    story(whole)


def test_idle_connections_make_room_and_busy_ones_do_not() -> None:
    async def whole() -> None:
        async with serving(most=3) as told:
            idle = [await client(told) for _ in range(3)]
            await asyncio.sleep(0.05)
            reader, writer = await client(told)
            writer.write(HEAD)
            assert b"200 OK" in await reader.readline()
            assert told.dropped == {"idle": 1}
            assert await idle[0][0].read() == b"", "the one that waited for the longest"
            for _, other in idle[1:]:
                other.write(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
            busy, endless = await client(told)  # takes the place of the answered one
            endless.write(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"200 OK" in await busy.readline()
            assert told.dropped == {"idle": 2}
            refused, last = await client(told)
            assert b"503 Service Unavailable" in await refused.readline()
            assert b"the limit of connections is reached" in await refused.read()
            assert told.dropped == {"idle": 2, "full": 1}
            for each in (writer, endless, last, *(other for _, other in idle)):
                each.close()

    story(whole)


def test_a_refused_client_that_goes_on_sending_can_read_why() -> None:
    async def whole() -> None:
        async with serving(most=1) as told:
            busy, endless = await client(told)
            endless.write(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"200 OK" in await busy.readline()
            for _ in range(3):
                refused, last = await client(told)
                for _ in range(4):
                    last.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
                    await asyncio.sleep(0.02)
                answer = await refused.read()
                assert answer.startswith(b"HTTP/1.1 503 Service Unavailable")
                assert b"the limit of connections is reached" in answer
                last.close()
            assert told.dropped == {"full": 3}
            endless.close()

    story(whole)


def test_a_refused_client_that_has_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_eof(_: Any) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    async def whole() -> None:
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with serving(most=1) as told:
            busy, endless = await client(told)
            endless.write(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"200 OK" in await busy.readline()
            monkeypatch.setattr("asyncio.selector_events._SelectorSocketTransport.write_eof", write_eof)
            _, last = await client(told)
            await until(lambda: told.dropped["full"] == 1)
            assert not errors
            for writer in (last, endless):
                writer.close()

    story(whole)


def test_a_refused_client_that_stays_is_cut_off_and_too_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REFUSAL_SECONDS", 2)
    monkeypatch.setattr(connection, "MOST_REFUSED", 2)

    async def whole() -> None:
        async with serving(most=1) as told:
            busy, endless = await client(told)
            endless.write(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"200 OK" in await busy.readline()
            stay = [await client(told) for _ in range(3)]
            await until(lambda: told.dropped["full"] == 3)
            assert len(told.table.refused) == 2
            await until(lambda: not told.table.refused)
            for _, writer in (*stay, (busy, endless)):
                writer.close()

    story(whole)
