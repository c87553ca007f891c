"""`pagedkv serve`: the options become an engine and a bound socket; pagedkv/serve/process.py serves. No HTTP here."""

from __future__ import annotations

import socket
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from pagedkv import debug
from pagedkv.checkpoint import hub
from pagedkv.errors import ConcurrentUse, InvalidRequest
from pagedkv.serve.keys import ApiKeys
from pagedkv.spec import parse_bytes

NEEDED: Final = ("fastapi", "uvicorn", "prometheus_client")
"""Packages of the extra."""
NEEDED_BY_EVENTS: Final = ("zmq", "msgspec")
EVENTS: Final = 1 << 16
"""KV events that are kept until they are published."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of one run. listening: fields of Listening. limits: of Limits. loading: options of Engine.load."""

    model: str | None
    host: str
    port: int
    name: str | None
    api_key: str | None
    api_keys: Path | None
    max_body: str
    listening: dict[str, Any]
    limits: dict[str, Any]
    loading: dict[str, Any]


def run(args: Arguments) -> int:
    """Serve until a signal. Returns: the status of the process. Raises: PagedKVError before the server listens"""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise InvalidRequest(f"`pagedkv serve` needs {missing[0]}; install it with: pip install 'pagedkv[serve]'")
    _require_events(args.listening)
    _require_hosts(args.listening)
    keys, folder = keys_of(args), None if args.model is None else hub.find(args.model)
    max_body = parse_bytes(args.max_body)
    sock = bound(args.host, args.port)
    from pagedkv.cli.compiling import announced  # numba

    with announced(quiet=False) as screen:
        from pagedkv.cli.generate import device  # torch, while other processes compile
        from pagedkv.core import Observe
        from pagedkv.model import Engine, Limits
        from pagedkv.serve import process

        with screen.status("loading", spinner="line") if screen.is_terminal else nullcontext():
            loading = {**args.loading, "device": device(args.loading["device"])}
            if args.listening["events"] is not None:
                loading["observe"] = Observe(events=EVENTS)
            limits = dict(args.limits)
            if keys is not None and keys.num_tenants > 1:
                limits["max_waiting"] = None  # the shares of tenants bound what waits, so that none fills one queue
            engine = Engine.load(folder, limits=Limits(**limits), **loading)
        name = args.name or process.name_of(args.model, folder)
        most = {"max_body": max_body, "max_waiting": args.limits["max_waiting"]}
        try:
            return process.run(sock, engine, process.Listening(name, keys, **most, **args.listening))
        finally:
            with suppress(ConcurrentUse):  # the last step hangs
                engine.close()


def _require_events(listening: dict[str, Any]) -> None:
    """Raise InvalidRequest if KV events are asked for in part, or their packages are missing."""
    if listening["events"] is None:
        if listening["events_replay"] is not None or listening["events_topic"]:
            raise InvalidRequest("--kv-events-replay and --kv-events-topic need --kv-events; give it an address, too")
    elif missing := [name for name in NEEDED_BY_EVENTS if find_spec(name) is None]:
        raise InvalidRequest(f"--kv-events needs {missing[0]}; install it with: pip install 'pagedkv[events]'")


def _require_hosts(listening: dict[str, Any]) -> None:
    """Raise InvalidRequest for a pattern that is not the names of one domain."""
    for name in listening["hosts"]:
        if "*" in name.removeprefix("*.") or not name:
            raise InvalidRequest(f"--allowed-host is {name!r}; give a name, or *.example.com for all of a domain")


def keys_of(args: Arguments) -> ApiKeys | None:
    """Return the API keys, or None for a server without any. Raises: InvalidRequest, which shows no key"""
    if args.api_key == "":
        raise InvalidRequest("--api-key is empty; give a key, or leave the option out to serve without one")
    key = args.api_key or debug.api_key()
    if args.api_keys is None:
        return None if key is None else ApiKeys.of(key)
    if key is not None:
        raise InvalidRequest("--api-keys and --api-key or PAGEDKV_API_KEY name keys; give one of them")
    return ApiKeys.read(args.api_keys)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound, and does not listen yet. Raises: InvalidRequest"""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:  # the latter for names with empty or long parts
        reason = getattr(error, "strerror", None) or "this is no name of a host"
        raise InvalidRequest(f"cannot listen on {host}:{port}: {reason}; give another --host or --port") from None
    return sock
