"""`--kv-events`: readers of vLLM's events hear what the server can find."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.serve.server import ASKED, serving
from tests.tiers.stores import free_port

zmq = pytest.importorskip("zmq", reason="the events extra is not installed")
msgspec = pytest.importorskip("msgspec", reason="the events extra is not installed")

TOPIC = "kv@pod@bundled"


@pytest.fixture
def reader() -> Iterator[Any]:
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
    yield socket
    socket.close(0)
    context.destroy(0)


def heard(socket: Any) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the topic and the events of the next message."""
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
