"""A reader of vLLM's events reads ours: messages, numbers, replays, and what it knows equals what the pool has."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pagedkv import KVSpec, PagedKVCache
from pagedkv.core import MemoryManager, Observe, page_digests
from pagedkv.errors import InvalidRequest
from tests.tiers.stores import free_port

zmq = pytest.importorskip("zmq", reason="the events extra is not installed")
msgspec = pytest.importorskip("msgspec", reason="the events extra is not installed")

from pagedkv.integrations.zmq_events import EventPublisher  # noqa: E402


class Reader:
    """A subscriber with an index of blocks, as a router has it. numbers: of the messages that it read."""

    def __init__(self, port: int) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self.blocks: set[bytes] = set()
        self.numbers: list[int] = []
        self.events: list[dict[str, Any]] = []

    def read(self, timeout: int = 2000) -> bool:
        """Take in one message. Return whether one came."""
        if not self.socket.poll(timeout):
            return False
        topic, number, content = self.socket.recv_multipart()
        assert topic == b"kv@pod@model"
        self.take(int.from_bytes(number, "big"), content)
        return True

    def take(self, number: int, content: bytes) -> None:
        seconds, events, rank = msgspec.msgpack.decode(content)
        assert seconds > 1e9
        assert rank == 3
        self.numbers.append(number)
        self.events += events
        for event in events:
            if event["type"] == "BlockStored":
                self.blocks.update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                self.blocks.difference_update(event["block_hashes"])
            else:
                self.blocks.clear()

    def close(self) -> None:
        self.context.destroy(0)


@pytest.fixture
def ports() -> tuple[int, int]:
    return free_port(), free_port()


@pytest.fixture
def reader(ports: tuple[int, int]) -> Iterator[Reader]:
    made = Reader(ports[0])
    yield made
    made.close()


def publisher_of(cache: Any, ports: tuple[int, int], **options: Any) -> EventPublisher:
    endpoint, replay = (f"tcp://*:{port}" for port in ports)
    return EventPublisher(cache, endpoint, replay=replay, topic="kv@pod@model", rank=3, **options)


def meet(publisher: EventPublisher, reader: Reader) -> None:
    """Publish until the reader has joined: what a PUB socket sends before is lost."""
    while not reader.read(20):
        publisher.publish()
    while reader.read(20):
        pass


def known(mm: MemoryManager) -> set[bytes]:
    return {digest for block in mm.snapshot().blocks for digest in block.block_hashes}


@pytest.mark.parametrize("kept", [1 << 14, 8])
def test_a_reader_knows_what_the_pool_has(ports: tuple[int, int], reader: Reader, kept: int) -> None:
    """With a log of 8 events the publisher falls behind, and begins again."""
    mm, draw = MemoryManager(32, 4, observe=Observe(events=kept)), random.Random(0)
    publisher = publisher_of(mm, ports)
    meet(publisher, reader)
    for turn in range(60):
        ids = [draw.randrange(3) for _ in range(draw.randrange(1, 30))]
        space = mm.open(ids, tenant=draw.choice([b"", b"acme"]))
        mm.commit(mm.plan([space], [len(ids) - len(space)]), ids[len(space) :])
        space.release()
        if turn % 20 == 19:
            mm.forget()
        if draw.random() < 0.5 and publisher.publish():
            assert reader.read()
            assert reader.blocks == known(mm)
    assert publisher.publish() == 0 or reader.read()
    assert reader.blocks == known(mm)
    assert reader.numbers == list(range(reader.numbers[0], reader.numbers[-1] + 1))
    publisher.close()


def test_the_message_is_that_of_vllm(ports: tuple[int, int], reader: Reader) -> None:
    spec = KVSpec(1, 1, 16, block_size=4, dtype="float32")
    cache = PagedKVCache(spec, num_frames=8, observe=Observe(events=64))
    publisher = publisher_of(cache, ports, medium="CPU")
    meet(publisher, reader)
    reader.events.clear()
    space = cache.open(tenant=b"acme")
    cache.commit(cache.plan([space], [9]), range(9))
    assert publisher.publish() == 2
    assert reader.read()
    first, second = reader.events
    assert first["type"] == second["type"] == "BlockStored"
    assert (first["token_ids"], first["block_size"], first["medium"]) == ([0, 1, 2, 3], 4, "CPU")
    assert (first["parent_block_hash"], second["parent_block_hash"]) == (None, first["block_hashes"][0])
    assert first["extra_keys"] == [[b"acme"]]
    assert [*first["block_hashes"], *second["block_hashes"]] == page_digests(range(9), 4, tenant=b"acme")
    publisher.close()


def test_a_reader_that_missed_messages_asks_for_them(ports: tuple[int, int]) -> None:
    mm, reader = MemoryManager(32, 4, observe=Observe(events=64)), Reader(free_port())  # which hears no publisher
    publisher = publisher_of(mm, ports, kept=3)
    for turn in range(5):
        space = mm.open()
        mm.commit(mm.plan([space], [4]), [turn] * 4)
        assert publisher.publish() == 1
    asking = reader.context.socket(zmq.DEALER)
    asking.connect(f"tcp://127.0.0.1:{ports[1]}")
    asking.send_multipart([b"", (3).to_bytes(8, "big")])
    while True:
        _, number, content = asking.recv_multipart()
        if number == (-1).to_bytes(8, "big", signed=True):
            break
        reader.take(int.from_bytes(number, "big"), content)
    assert reader.numbers == [3, 4]
    reader.close()
    publisher.close()


def test_older_readers_get_arrays(ports: tuple[int, int]) -> None:
    mm = MemoryManager(8, 4, observe=Observe(events=64))
    publisher = publisher_of(mm, ports, form="array")
    space = mm.open()
    mm.commit(mm.plan([space], [4]), [1] * 4)
    publisher.publish()
    [(number, content)] = publisher._kept
    [event] = msgspec.msgpack.decode(content)[1]
    assert (number, event[0], event[3], event[4]) == (0, "BlockStored", [1, 1, 1, 1], 4)
    publisher.close()
    publisher.close()


def test_what_cannot_be_published_is_refused(ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match=r"observe=Observe\(events=N\)"):
        EventPublisher(MemoryManager(4, 4))
    mm = MemoryManager(4, 4, observe=Observe(events=4))
    with pytest.raises(InvalidRequest, match="give 'map' or 'array'"):
        EventPublisher(mm, form="json")
    with pytest.raises(InvalidRequest, match=r"give addresses such as tcp://\*:5557"):
        EventPublisher(mm, "tcp://*:nowhere")
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "pagedkv.integrations.zmq_events")
    with pytest.raises(ImportError, match=r"pagedkv\[events\]"):
        importlib.import_module("pagedkv.integrations.zmq_events")
