"""`pagedkv serve` as a process: uvicorn over an engine and a socket, and the signals that end it.

    bound socket, engine ─▶ listen, say the address on stderr ─▶ serve ─▶ SIGTERM ─▶ drain ─▶ status 0
                                                                              SIGINT: status 130 at once
                                                                              the engine stopped: status 1

Draining: no connection is accepted any more; requests that run end, for `drain_s` seconds at most.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvicorn

from pagedkv.model.engine import Engine
from pagedkv.serve.app import Routes, Service
from pagedkv.serve.gate import Gate
from pagedkv.serve.streaming import AsyncEngine

SWITCH_SECONDS: Final = 0.0005
"""The time for which the event loop may hold the interpreter while a step waits for it."""

FAILED: Final = 1


@dataclass(frozen=True)
class Listening:
    """The place and the limits of a server.

    key: the API key, or None. max_waiting: requests beyond those that run. max_prompt: tokens; None for those that fit.
    max_body: bytes. drain_s: seconds.
    """

    host: str
    port: int
    name: str
    key: str | None
    max_waiting: int
    max_prompt: int | None
    max_body: int
    drain_s: int


def run(sock: socket.socket, engine: Engine, listening: Listening) -> int:
    """Serve until a signal ends it, or the engine stops. Returns: the status of the process"""
    logging.basicConfig(format="pagedkv: %(message)s", level=logging.ERROR)  # a client's bad bytes are no news
    sys.setswitchinterval(SWITCH_SECONDS)
    return asyncio.run(_serve(sock, engine, listening))


async def _serve(sock: socket.socket, engine: Engine, listening: Listening) -> int:
    async with AsyncEngine(engine) as served:
        routes = Routes(Service(served, listening.name, listening.max_prompt))
        most = engine.scheduler.limits.max_sequences + listening.max_waiting
        gate: Any = Gate(routes.app, key=listening.key, max_body=listening.max_body, max_requests=most)
        config = uvicorn.Config(
            gate, lifespan="off", log_config=None, access_log=False, server_header=False, ws="none",
            timeout_graceful_shutdown=listening.drain_s,
        )  # fmt: skip
        server = _Server(config, served, listening)
        await server.serve(sockets=[sock])
        if served.stopped is not None:
            print(f"pagedkv: error: {served.stopped}", file=sys.stderr, flush=True)
        return FAILED if served.stopped is not None else 0


class _Server(uvicorn.Server):
    """uvicorn's server with our signals: SIGTERM drains, and SIGINT keeps the handler of the process."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, listening: Listening) -> None:
        super().__init__(config)
        self._engine, self._listening = engine, listening

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain at SIGTERM."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, setattr, self, "should_exit", True)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say where."""
        host, port = sockets[0].getsockname()[:2] if sockets else ("", 0)
        await super().startup(sockets)
        if self._listening.key is None and not _is_loopback(host):
            print("pagedkv: without an API key, all who reach this address can use it", file=sys.stderr, flush=True)
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        print(f"pagedkv: {self._listening.name} is served at http://{place}/v1", file=sys.stderr, flush=True)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end: as uvicorn decides, or because the engine stopped."""
        return await super().on_tick(counter) or self._engine.stopped is not None


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def name_of(model: str | None, folder: Path | None) -> str:
    """Return the name under which a checkpoint is served: owner/name, the name of its folder, or "bundled"."""
    if model is None or folder is None:
        return "bundled"
    return folder.resolve().name if Path(model).exists() else model
