"""`pagedkv serve`: the options become an engine and a bound socket; engine/serve/process.py serves. No HTTP here."""

from __future__ import annotations

import socket
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Final

from pagedkv import debug
from pagedkv.cli.options import Loading, Serving, amount
from pagedkv.engine.serve.keys import ApiKeys
from pagedkv.errors import ConcurrentUse, InvalidRequest

_SAME: Final = ("key_share", "shared_priorities", "max_waiting", "max_prompt", "max_connections")
"""Options that have the same name in Listening."""
_EVENTS: Final = 1 << 16
"""KV events that are kept until they are published."""


def run(serving: Serving, loading: Loading) -> int:
    """Serve until a signal. Returns: the status of the process. Raises: PagedKVError before the server listens"""
    _require("`pagedkv serve`", "serve", "fastapi", "uvicorn", "prometheus_client")
    if serving.kv_events is not None:
        _require("--kv-events", "events", "zmq", "msgspec")
    keys = _keys_of(serving)
    loading.check()
    sock = _bound(serving.host, serving.port)
    from pagedkv.cli.compiling import announced  # numba

    with announced(quiet=False) as screen:
        from pagedkv.cli.generate import load  # torch, while another process compiles
        from pagedkv.engine.serve import process

        is_shared = keys is not None and keys.num_tenants > 1  # the shares of tenants bound what waits, not one queue
        more: dict[str, Any] = {"limits": {"max_waiting": None if is_shared else serving.max_waiting}}
        more["hints"] = serving.hints
        if serving.kv_events is not None:
            more["events"] = _EVENTS
        engine = load(loading, screen, **more)
        listening = process.Listening(
            name=serving.name or process.name_of(loading.model, loading.folder()),
            keys=keys,
            hosts=tuple(serving.allowed_host or ()),
            max_body=amount("--max-body", serving.max_body),
            **{name: getattr(serving, name) for name in _SAME},
            drain_s=serving.drain,
            step_s=serving.step_timeout,
            retain_s=serving.max_retain,
            events=serving.kv_events,
            events_replay=serving.kv_events_replay,
            events_topic=serving.kv_events_topic,
        )
        try:
            return process.run(sock, engine, listening)
        finally:
            with suppress(ConcurrentUse):  # the last step hangs
                engine.close()


def _require(needs: str, extra: str, *packages: str) -> None:
    """Raise InvalidRequest if a package of an extra is missing."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise InvalidRequest(f"{needs} needs {missing[0]}; install it with: pip install 'pagedkv[{extra}]'")


def _keys_of(serving: Serving) -> ApiKeys | None:
    """Return the API keys, or None for a server without any. Raises: InvalidRequest, which shows no key"""
    key = serving.api_key or debug.api_key()
    if serving.api_keys is None:
        return None if key is None else ApiKeys.of(key)
    if key is not None:
        raise InvalidRequest("--api-keys and --api-key or PAGEDKV_API_KEY name keys; give one of them")
    return ApiKeys.read(serving.api_keys)


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound, and does not listen yet. Raises: InvalidRequest"""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # of connections, too: a client may vanish
        sock.bind(address)
    except (OSError, UnicodeError) as error:  # the latter for names with empty or long parts
        reason = getattr(error, "strerror", None) or "this is no name of a host"
        raise InvalidRequest(f"cannot listen on {host}:{port}: {reason}; give another --host or --port") from None
    return sock
