"""The server as a process: it drains at SIGTERM, ends at Ctrl-C, and refuses in one line what it cannot do.

With `--kv-events` readers of vLLM's events hear what the server can find.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from tests.engine.serve.server import ASKED, LONG, RUNNING, serving
from tests.tiers.stores import free_port


def ended(stream: socket.socket) -> str:
    """Return all that comes on a connection until the server closes it."""
    data = b""
    while part := stream.recv(65536):
        data += part
    return data.decode()


def read_all(streams: list[socket.socket]) -> Iterator[str]:
    """Begin to read all streams to their ends."""
    return ThreadPoolExecutor(len(streams)).map(ended, streams)


def test_sigterm_lets_running_requests_end_and_refuses_new_ones(extra: None) -> None:
    with serving() as server, server.begun(LONG) as longest:
        streams = [server.begun({**LONG, "max_tokens": 100}) for _ in range(2)]
        texts = read_all(streams)
        server.process.send_signal(signal.SIGTERM)
        while (health := server.ask("/health")).status == 200:
            time.sleep(0.002)
        assert (health.status, health.json["status"]) == (503, "draining")
        refused = server.ask("/v1/completions", {"prompt": ASKED})
        assert (refused.status, refused.error["type"]) == (503, "server_error")
        assert int(refused.headers["Retry-After"]) >= 1
        longest.close()
        assert all('"finish_reason":"length"' in text and "data: [DONE]" in text for text in texts)
        _, said = server.process.communicate(timeout=300)
        assert (server.process.returncode, said) == (0, "")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)


@pytest.mark.slow
def test_a_drain_has_an_end_that_its_requests_are_told(extra: None) -> None:
    with serving("--drain", 1) as server, server.begun(LONG) as stream:
        whole = server.begun({**LONG, "stream": False})
        server.wait_until(RUNNING, 2)
        server.process.send_signal(signal.SIGTERM)
        texts = list(read_all([stream, whole]))
        why = "the server ended 1 s after it was told to"
        assert "[DONE]" not in texts[0]
        assert why in [line for line in texts[0].splitlines() if line.startswith("data: ")][-1]
        assert texts[1].startswith("HTTP/1.1 503")
        assert why in texts[1]
        _, said = server.process.communicate(timeout=30)
        assert (server.process.returncode, said) == (0, "")


@pytest.mark.slow
def test_an_open_address_without_a_key_is_named_and_a_second_sigterm_ends_at_once(extra: None) -> None:
    with serving("--host", "0.0.0.0", "--name", "mine", "--max-connections", 3) as server, server.begun(LONG):
        assert "mine is served at http://0.0.0.0:" in server.said
        assert server.ask("/v1/models").json["data"][0]["id"] == "mine"
        assert "pagedkv: without an API key, all who reach this address can use it\n" in server.said
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        assert server.ask("/health").status == 503, "the limit of connections is reached"
        for each in silent:
            each.close()
        while server.ask("/health", Host="any.example").status != 200:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        while server.ask("/health").status == 200:
            time.sleep(0.01)
        assert server.end(signal.SIGTERM) == (143, "")


def test_an_engine_that_stops_ends_the_server_with_its_reason(
    extra: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor starts the process again; /health and all others are 503 until then."""
    from pagedkv.engine import Engine
    from pagedkv.engine.serve import process

    engine = Engine.load(num_frames=64)

    monkeypatch.setattr(engine, "forward", Mock(side_effect=RuntimeError("out of luck")))
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))

    def ask() -> str:
        data = json.dumps({"prompt": ASKED}).encode()
        head = "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        while True:
            try:
                with socket.create_connection(sock.getsockname(), timeout=300) as client:
                    client.sendall(head.encode() + data)
                    return ended(client)
            except ConnectionRefusedError:
                time.sleep(0.02)

    asked = ThreadPoolExecutor(1).submit(ask)
    assert asyncio.run(process.serve(sock, engine, process.Listening(drain_s=5))) == 1
    assert "503" in asked.result()
    assert "failed 3 times in a row: RuntimeError: out of luck; restart it" in asked.result()
    assert "pagedkv: error: the engine failed 3 times in a row" in capsys.readouterr().err


TOPIC = "kv@pod@bundled"


@pytest.fixture
def reader() -> Iterator[Any]:
    zmq = pytest.importorskip("zmq", reason="the events extra is not installed")
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
    yield socket
    socket.close(0)
    context.destroy(0)


def heard(socket: Any) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the topic and the events of the next message."""
    msgspec = pytest.importorskip("msgspec", reason="the events extra is not installed")
    assert socket.poll(300_000)
    topic, _, content = socket.recv_multipart()
    return topic, msgspec.msgpack.decode(content)[1]


@pytest.mark.slow
def test_a_server_publishes_what_it_can_find_also_while_it_is_idle(extra: None, reader: Any) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with serving("--kv-events", address.replace("127.0.0.1", "*"), "--kv-events-topic", TOPIC) as server:
        reader.connect(address)
        assert heard(reader) == (TOPIC.encode(), [{"type": "AllBlocksCleared"}])  # it has joined an idle server
        assert server.ask("/v1/completions", {"prompt": ASKED, "max_tokens": 4}).status == 200
        topic, [event, *_] = heard(reader)
        assert (topic, event["type"]) == (TOPIC.encode(), "BlockStored")
        assert event["block_size"] == 16
        assert all(isinstance(name, int) for name in event["block_hashes"])
