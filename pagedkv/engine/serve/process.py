"""`pagedkv serve` as a process: uvicorn over an engine and a socket, and the signals that end it.

    bound socket, engine ─▶ listen, say the address on stderr ─▶ serve ─▶ SIGTERM ─▶ drain ─▶ status 0
                                                                   │         └ SIGTERM again: status 143 at once
                                                                   ├ SIGINT: status 130 behind the step
                                                                   └ the engine stopped: status 1

Draining: connections are accepted, and new requests refused with status 503; requests that run end, for `drain_s`
seconds at most. Then the listening socket is closed, and what clients have not taken FLUSH_SECONDS later is dropped.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware

from pagedkv.engine.serve.app import Routes, Service
from pagedkv.engine.serve.gate import Gate, Rules
from pagedkv.engine.serve.keys import ApiKeys
from pagedkv.engine.serve.shares import Shares
from pagedkv.engine.serve.streaming import AsyncEngine
from pagedkv.engine.step.engine import Engine

SWITCH_SECONDS: Final = 0.0005
"""The time for which the event loop may hold the interpreter while a step waits for it."""

BACKLOG: Final = 256
"""Connections that wait for `accept`."""

FILES: Final = 64
"""Descriptors besides those of connections."""

FLUSH_SECONDS: Final = 5.0
"""The time for clients to take the ends of their answers when the server ends."""

FAILED, TERMINATED = 1, 128 + signal.SIGTERM
"""Exit statuses."""


@dataclass(frozen=True)
class Listening:
    """The place and the limits of a server.

    name:            the name of the model. keys: None for a server without keys.
    key_share:       the part of the places to run and to wait that one of several tenants may have.
    shared_priorities: whether priorities count among the requests of all tenants.
    hosts:           names besides those of this machine that a Host header may have, or *.example.com.
    max_waiting:     the longest queue. max_prompt: the most tokens of a prompt; None: as many as fit.
    max_body:        bytes. max_connections: connections open at once, of which each has at most one request.
    drain_s:         seconds to end in.
    retain_s:        seconds for which a client may let the pages of an answer be retained, at most.
    step_s:          seconds that a step may take before /health says that it hangs.
    events:          the address where KV events are published, None for none; `events_replay` and `events_topic` are
                     `replay` and `topic` of EventPublisher.
    """

    name: str = "bundled"
    keys: ApiKeys | None = None
    key_share: float = 0.5
    shared_priorities: bool = False
    hosts: tuple[str, ...] = ()
    max_waiting: int = 256
    max_prompt: int | None = None
    max_body: int = 2**22
    max_connections: int = 1024
    drain_s: float = 60
    step_s: float = 300
    retain_s: float = 3600
    events: str | None = None
    events_replay: str | None = None
    events_topic: str = ""


def run(sock: socket.socket, engine: Engine, listening: Listening) -> int:
    """Serve until a signal ends it, or the engine stops. Returns: the status of the process"""
    logging.basicConfig(format="pagedkv: %(message)s", level=logging.ERROR)  # a client's bad bytes are no news
    sys.setswitchinterval(SWITCH_SECONDS)
    return asyncio.run(serve(sock, engine, listening))


async def serve(sock: socket.socket, engine: Engine, listening: Listening) -> int:
    """Serve in this event loop, whose thread is the main one. Arguments and result: as `run`"""
    if listening.events is None:
        return await _serve(sock, AsyncEngine(engine), listening)
    from pagedkv.integrations.zmq_events import EventPublisher  # an extra

    replay, topic = listening.events_replay, listening.events_topic
    with closing(EventPublisher(engine.cache, listening.events, replay=replay, topic=topic)) as publisher:
        return await _serve(sock, AsyncEngine(engine, after_step=publisher.publish), listening)


async def _serve(sock: socket.socket, engine: AsyncEngine, listening: Listening) -> int:
    async with engine as served:
        server = _Server(sock, served, listening)
        await server.serve(sockets=[sock])
        if served.stopped is None or server.is_draining:
            return 0
        print(f"pagedkv: error: {served.stopped}", file=sys.stderr, flush=True)
        return FAILED


class _Server(uvicorn.Server):
    """uvicorn's server with the gate and our signals; SIGINT keeps the handler of the process."""

    def __init__(self, sock: socket.socket, engine: AsyncEngine, listening: Listening) -> None:
        self._engine, self._listening = engine, listening
        own = listening.name, listening.max_prompt, listening.step_s, listening.retain_s
        self._routes = Routes(Service(engine, *own))
        running = engine.engine.scheduler.limits.max_sequences
        most = running + listening.max_waiting
        rules = Rules(listening.keys, listening.max_body, most, _shares(listening, running))
        self._gate = Gate(self._routes.app, rules, self._routes.count)
        gate: Any = self._gate
        app: Any = _KnownHosts(gate, _hosts(sock, listening), www_redirect=False)
        super().__init__(
            uvicorn.Config(
                app, http="h11", lifespan="off", log_config=None, access_log=False, server_header=False, ws="none",
                limit_concurrency=_allowed_connections(listening.max_connections) + 1,  # uvicorn refuses the last one
                backlog=BACKLOG, timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_draining(self) -> bool:
        """Whether SIGTERM came."""
        return self._gate.is_draining

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain at SIGTERM."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say where."""
        host, port = sockets[0].getsockname()[:2] if sockets else ("", 0)
        await super().startup(sockets)
        if self._listening.keys is None and not _is_loopback(host):
            print("pagedkv: without an API key, all who reach this address can use it", file=sys.stderr, flush=True)
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        print(f"pagedkv: {self._listening.name} is served at http://{place}/v1", file=sys.stderr, flush=True)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end: as uvicorn decides, or because the engine stopped."""
        return await super().on_tick(counter) or (self._engine.stopped is not None and not self.is_draining)

    def _terminate(self) -> None:
        """Drain, or end at once if the server drains already."""
        if self.is_draining:
            os._exit(TERMINATED)
        self._gate.is_draining = self._routes.is_draining = True
        self._tasks.append(asyncio.create_task(self._drain()))

    async def _drain(self) -> None:
        """Wait until all requests have ended, or their time has; then let uvicorn shut down."""
        await self._empty(self._listening.drain_s)
        if self._gate.num_inside:
            await self._engine.aclose(f"the server ended {self._listening.drain_s:g} s after it was told to")
            await self._empty(FLUSH_SECONDS)
        logging.getLogger("uvicorn.error").disabled = True  # it logs a traceback of each client that takes nothing
        self.should_exit = True

    async def _empty(self, seconds: float) -> None:
        """Return when no request is inside, or after some seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._gate.num_inside and loop.time() < end:
            await asyncio.sleep(0.05)


def _shares(listening: Listening, max_sequences: int) -> Shares | None:
    """Return the shares of tenants; None if there is one tenant, which may have all."""
    if listening.keys is None or listening.keys.num_tenants < 2:
        return None
    running, waiting = (max(1, int(listening.key_share * most)) for most in (max_sequences, listening.max_waiting))
    return Shares(running, waiting, shares_priorities=listening.shared_priorities)


def _hosts(sock: socket.socket, listening: Listening) -> list[str]:
    """Return the names that a Host header may have: a page may give its own name to this machine (DNS rebinding)."""
    host = sock.getsockname()[0]
    if not listening.hosts and not _is_loopback(host):
        return ["*"]
    return ["localhost", *listening.hosts]


class _KnownHosts(TrustedHostMiddleware):
    """Starlette's check of the Host header, which lets addresses pass, and HTTP/1.0 without it: no DNS leads there."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request of the application, or refuse it."""
        host = dict(scope.get("headers", ())).get(b"host")
        check = self.app if host is None or _is_address(host.decode("latin-1")) else super().__call__
        await check(scope, receive, send)


def _is_address(host: str) -> bool:
    """Return whether a Host header is an IP address, with or without a port."""
    parts = re.fullmatch(r"\[?([0-9a-fA-F.:]*?)\]?(:\d+)?", host)
    try:
        return parts is not None and bool(ipaddress.ip_address(parts[1]))
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def _allowed_connections(max_connections: int) -> int:
    """Raise this process's limit of open files if it may be, and return how many connections it allows."""
    needed = max_connections + BACKLOG + FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = needed if soft == resource.RLIM_INFINITY else min(needed, soft)
    return max(1, allowed - BACKLOG - FILES)


def name_of(model: str | None, folder: Path | None) -> str:
    """Return the name under which a checkpoint is served: owner/name, the name of its folder, or "bundled"."""
    if model is None or folder is None:
        return "bundled"
    return folder.resolve().name if Path(model).exists() else model
