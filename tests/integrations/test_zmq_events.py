"""A reader of vLLM's events reads ours: messages, numbers, replays, and what it knows equals what the pool has."""

from __future__ import annotations

import functools
import importlib
import operator
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagedkv.core import MemoryManager, page_digests
from pagedkv.errors import InvalidRequest
from tests.tiers.stores import free_port

zmq = pytest.importorskip("zmq", reason="the events extra is not installed")
msgspec = pytest.importorskip("msgspec", reason="the events extra is not installed")

from pagedkv.integrations import zmq_events  # noqa: E402
from pagedkv.integrations.zmq_events import EventPublisher  # noqa: E402

Name = int | bytes
KEYS = [("block_hashes", list[Name])]
STORED = [
    *KEYS, ("parent_block_hash", Name | None), ("token_ids", list[int]), ("block_size", int), ("lora_id", int | None),
    ("medium", str | None), ("lora_name", str | None), ("extra_keys", list[tuple[Any, ...] | None] | None, None),
    ("group_idx", int | None, None), ("kv_cache_spec_kind", str | None, None),
    ("kv_cache_spec_sliding_window", int | None, None),
]  # fmt: skip
REMOVED = [*KEYS, ("medium", str | None), ("group_idx", int | None, None)]
EVENTS = [
    msgspec.defstruct(name, fields, tag=True)
    for name, fields in (("BlockStored", STORED), ("BlockRemoved", REMOVED), ("AllBlocksCleared", []))
]
"""The events of vLLM since 0.24, by the fields of its vllm/distributed/kv_events.py; those with a default may be left
out."""
EVENT: Any = functools.reduce(operator.or_, EVENTS)
BATCH = msgspec.defstruct(
    "KVEventBatch", [("ts", float), ("events", list[EVENT]), ("data_parallel_rank", int | None, None)], array_like=True
)


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

    def read(self, timeout: int = 60_000) -> bool:
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
def join() -> Iterator[Callable[[int], Reader]]:
    """Make readers, and close them: a context that is not closed holds up the end of a test run that failed."""
    made: list[Reader] = []

    def one(port: int) -> Reader:
        made.append(Reader(port))
        return made[-1]

    yield one
    for each in made:
        each.close()


@pytest.fixture
def reader(ports: tuple[int, int], join: Callable[[int], Reader]) -> Reader:
    return join(ports[0])


@pytest.fixture
def stranger(join: Callable[[int], Reader]) -> Reader:
    """A reader that hears no publisher, and may ask one for a replay."""
    return join(free_port())


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
    return {digest for block in mm.events_snapshot().blocks for digest in block.block_hashes}


@pytest.mark.parametrize("kept", [1 << 14, 8])
def test_a_reader_knows_what_the_pool_has(ports: tuple[int, int], reader: Reader, kept: int) -> None:
    """With a log of 8 events the publisher falls behind, and begins again."""
    mm, draw = MemoryManager(32, 4, events=kept), random.Random(0)
    publisher = publisher_of(mm, ports, form="digests")
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


@pytest.mark.parametrize("form", ["map", "digests"])
def test_a_message_is_decoded_by_the_types_of_vllm(ports: tuple[int, int], form: str) -> None:
    """Names are the last 64 bits of a digest, as vLLM's are by default; Dynamo reads only those."""
    mm = MemoryManager(8, 4, events=64)
    publisher = publisher_of(mm, ports, form=form, medium="CPU")
    space = mm.open(tenant=b"acme")
    mm.commit(mm.plan([space], [9]), range(9))
    publisher.publish()
    space.release()
    mm.evict(1)
    mm.forget()
    publisher.publish()
    events = [
        event
        for _, content in publisher._kept
        for event in msgspec.msgpack.decode(content, type=BATCH).events  # type: ignore[attr-defined]
    ]
    assert [type(event).__name__ for event in events] == ["BlockStored"] * 2 + ["BlockRemoved", "AllBlocksCleared"]
    names: list[Any] = page_digests(range(9), 4, tenant=b"acme")
    if form == "map":
        names = [int.from_bytes(name[-8:], "big") for name in names]
    stored = [(one.block_hashes, one.parent_block_hash) for one in events[:2]]
    assert stored == [([names[0]], None), ([names[1]], names[0])]
    first = events[0]
    assert (first.token_ids, first.block_size, first.medium) == ([0, 1, 2, 3], 4, "CPU")
    assert (first.extra_keys, first.group_idx) == ([(b"acme",)], 0)
    assert events[2].block_hashes == [names[1]]
    publisher.close()


def ask(reader: Reader, port: int, first: int, *instead: bytes) -> Any:
    asking = reader.context.socket(zmq.DEALER)
    asking.connect(f"tcp://127.0.0.1:{port}")
    asking.send_multipart(instead or [b"", first.to_bytes(8, "big")])
    return asking


def replayed(asking: Any) -> list[int]:
    """Take in a replay to its end. Return the numbers of its messages."""
    numbers = []
    while asking.poll(60_000):
        _, number, _ = asking.recv_multipart()
        if number == zmq_events.END:
            asking.close(0)
            return numbers
        numbers.append(int.from_bytes(number, "big"))
    pytest.fail(f"the replay has no end; {len(numbers)} messages came")


def many(publisher: EventPublisher, num_messages: int, size: int) -> None:
    """Let a publisher keep messages of `size` bytes."""
    publisher._kept.extend((number, bytes(size)) for number in range(num_messages))


def test_no_reader_and_no_end_waits_for_a_slow_reader_or_for_nonsense(
    ports: tuple[int, int], stranger: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_events, "PATIENCE", 1e9)
    publisher = publisher_of(MemoryManager(32, 4, events=64), ports)
    many(publisher, 10_000, 5000)
    slow, standing, gone = (ask(stranger, ports[1], 0) for _ in range(3))
    for each in (slow, standing, gone):
        assert each.poll(60_000)
    gone.close(0)
    nonsense = ask(stranger, ports[1], 0, b"no request")
    assert replayed(ask(stranger, ports[1], 9_990)) == list(range(9_990, 10_000))
    assert replayed(slow) == list(range(10_000))
    closing = threading.Thread(target=publisher.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    for each in (standing, nonsense):
        each.close(0)


def test_a_replay_has_the_messages_that_are_kept(ports: tuple[int, int], stranger: Reader) -> None:
    mm = MemoryManager(32, 4, events=64)
    alone = EventPublisher(mm, "tcp://127.0.0.1:*")
    publisher = publisher_of(mm, ports, kept=3)
    for turn in range(5):
        space = mm.open()
        mm.commit(mm.plan([space], [4]), [turn] * 4)
        space.release()
        assert publisher.publish() == alone.publish() == 1
    assert not alone._kept  # it has no socket for replays
    assert [number for number, _ in publisher._kept] == [2, 3, 4]
    assert replayed(ask(stranger, ports[1], 3)) == [3, 4]
    publisher.publish_all()
    assert replayed(ask(stranger, ports[1], 0)) == [5]
    for each in (alone, publisher):
        each.close()
        each.close()


def test_what_cannot_be_published_is_refused(ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="events=N"):
        EventPublisher(MemoryManager(4, 4))
    mm = MemoryManager(4, 4, events=4)
    with pytest.raises(InvalidRequest, match="give 'map', 'digests', 'array'"):
        EventPublisher(mm, form="json")
    with pytest.raises(InvalidRequest, match=r"give one such as tcp://\*:5557"):
        EventPublisher(mm, "tcp://*:nowhere")
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "pagedkv.integrations.zmq_events")
    with pytest.raises(ImportError, match=r"pagedkv\[events\]"):
        importlib.import_module("pagedkv.integrations.zmq_events")
