"""A reader of vLLM's events reads ours: messages, numbers, replays, and what it knows equals what the pool has."""

from __future__ import annotations

import functools
import importlib
import operator
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

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


def ask(reader: Reader, port: int, first: int) -> Any:
    asking = reader.context.socket(zmq.DEALER)
    asking.connect(f"tcp://127.0.0.1:{port}")
    asking.send_multipart([b"", first.to_bytes(8, "big")])
    return asking


def replayed(asking: Any) -> list[int]:
    """Take in a replay to its end. Return the numbers of its messages."""
    numbers = []
    while asking.poll(5000):
        _, number, _ = asking.recv_multipart()
        if number == zmq_events.END:
            return numbers
        numbers.append(int.from_bytes(number, "big"))
    pytest.fail(f"the replay has no end; {len(numbers)} messages came")


def many(publisher: EventPublisher, num_messages: int, size: int) -> None:
    """Let a publisher keep messages of `size` bytes."""
    publisher._kept.extend((number, bytes(size)) for number in range(num_messages))


def test_a_reader_that_stands_still_or_asks_nonsense_holds_up_no_end(
    ports: tuple[int, int], stranger: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_events, "PATIENCE", 0.3)
    publisher = publisher_of(MemoryManager(32, 4, events=64), ports)
    many(publisher, 10_000, 5000)
    standing = ask(stranger, ports[1], 0)
    gone = ask(stranger, ports[1], 0)
    time.sleep(0.5)
    gone.close(0)
    asking = stranger.context.socket(zmq.DEALER)
    asking.connect(f"tcp://127.0.0.1:{ports[1]}")
    asking.send_multipart([b"no request"])
    assert replayed(ask(stranger, ports[1], 9_999)) == [9_999]
    monkeypatch.setattr(zmq_events, "PATIENCE", 60.0)
    began = time.monotonic()
    publisher.close()
    assert time.monotonic() - began < 5
    standing.close(0)


def test_no_reader_waits_for_a_slow_one(
    ports: tuple[int, int], stranger: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that takes little at a time gets all, in the publisher's time and not in that of other readers."""
    mm = MemoryManager(32, 4, events=64)
    publisher = publisher_of(mm, ports)
    many(publisher, 10_000, 5000)
    slow = ask(stranger, ports[1], 0)
    while slow.getsockopt(zmq.EVENTS) & zmq.POLLIN == 0:
        time.sleep(0.01)
    time.sleep(0.5)
    monkeypatch.setattr(zmq_events, "PATIENCE", 60.0)
    began = time.monotonic()
    assert replayed(ask(stranger, ports[1], 9_990)) == list(range(9_990, 10_000))
    assert time.monotonic() - began < 20
    assert replayed(slow) == list(range(10_000))
    slow.close(0)
    publisher.close()


def test_a_reader_that_asks_again_gets_the_answer_to_its_last_question(
    ports: tuple[int, int], stranger: Reader
) -> None:
    """Else a reader that asks and asks, and takes nothing, would fill the memory of the publisher."""
    mm = MemoryManager(32, 4, events=64)
    publisher = publisher_of(mm, ports)
    many(publisher, 10_000, 5000)
    asking = ask(stranger, ports[1], 0)
    time.sleep(0.5)
    asking.send_multipart([b"", (9_995).to_bytes(8, "big")])
    time.sleep(0.5)
    numbers = replayed(asking)
    assert numbers[-5:] == list(range(9_995, 10_000))
    assert numbers[:-5] == list(range(len(numbers) - 5))
    assert len(numbers) < 9_995
    asking.close(0)
    publisher.close()


def test_a_replay_during_a_snapshot_has_what_was_before(
    ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mm, seen = MemoryManager(32, 4, events=64), list[int]()
    publisher = publisher_of(mm, ports)
    many(publisher, 3, 10)
    send = publisher._send

    def watched(events: list[Any]) -> int:
        seen.append(len(publisher._kept))
        return send(events)

    monkeypatch.setattr(publisher, "_send", watched)
    publisher.publish_all()
    assert seen == [3]
    assert len(publisher._kept) == 1
    publisher.close()


def test_a_replay_has_the_messages_that_are_kept(ports: tuple[int, int], stranger: Reader) -> None:
    mm = MemoryManager(32, 4, events=64)
    alone = EventPublisher(mm, "tcp://127.0.0.1:*")
    publisher = publisher_of(mm, ports, kept=3)
    for turn in range(5):
        space = mm.open()
        mm.commit(mm.plan([space], [4]), [turn] * 4)
        assert publisher.publish() == alone.publish() == 1
    assert not alone._kept  # it has no socket for replays
    assert [number for number, _ in publisher._kept] == [2, 3, 4]
    assert replayed(ask(stranger, ports[1], 3)) == [3, 4]
    publisher.publish_all()
    assert replayed(ask(stranger, ports[1], 0)) == [5]
    for each in (alone, publisher):
        each.close()
        each.close()


def test_readers_that_join_one_after_the_other_wait_for_one_snapshot(
    ports: tuple[int, int], reader: Reader, join: Callable[[int], Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot takes microseconds a page, in the thread that steps: a reader that joins often must not stop it."""
    monkeypatch.setattr(zmq_events, "SHARE", 1e-9)
    mm = MemoryManager(64, 4, events=64)
    space = mm.open()
    mm.commit(mm.plan([space], [80]), [1] * 80)
    publisher = publisher_of(mm, ports)
    meet(publisher, reader)
    assert len(reader.events) == 21
    others = [join(ports[0]) for _ in range(3)]
    while not publisher._owes_snapshot:
        assert publisher.publish() == 0
    mm.commit(mm.plan([space], [4]), [1] * 4)
    assert publisher.publish() == 1
    publisher._next_snapshot = 0.0
    assert publisher.publish() == 22
    assert publisher.publish() == 0
    names = {int.from_bytes(name[-8:], "big") for name in known(mm)}
    for other in others:
        for _ in range(200):
            if other.read(50) and names <= other.blocks:
                break
            publisher._next_snapshot = 0.0  # this reader joined after the others
            publisher.publish()
        assert names <= other.blocks
    publisher.close()


def test_a_reader_that_joins_without_end_holds_up_no_step(ports: tuple[int, int]) -> None:
    mm = MemoryManager(32, 4, events=64)
    publisher = publisher_of(mm, ports)
    socket = mock.Mock(poll=mock.Mock(return_value=1), recv=mock.Mock(side_effect=[b"\x01"] * 10_000))
    with mock.patch.object(publisher, "_socket", socket):
        publisher.publish()
    assert 0 < socket.recv.call_count <= zmq_events.MOST_JOINS
    socket.send_multipart.assert_called_once()
    publisher.close()


def test_an_address_without_a_star_is_bound_if_asked_for(ports: tuple[int, int], reader: Reader) -> None:
    mm = MemoryManager(32, 4, events=64)
    publisher = EventPublisher(mm, f"tcp://127.0.0.1:{ports[0]}", topic="kv@pod@model", rank=3, bind=True)
    meet(publisher, reader)
    assert publisher.endpoint == f"tcp://127.0.0.1:{ports[0]}"
    publisher.close()
    with pytest.raises(InvalidRequest, match="publish was called after close"):
        publisher.publish()
    with pytest.raises(InvalidRequest, match="publish_all was called after close"):
        publisher.publish_all()


def test_older_readers_get_arrays(ports: tuple[int, int]) -> None:
    mm = MemoryManager(8, 4, events=64)
    publisher = publisher_of(mm, ports, form="array")
    space = mm.open()
    mm.commit(mm.plan([space], [4]), [1] * 4)
    publisher.publish()
    [(number, content)] = publisher._kept
    [event] = msgspec.msgpack.decode(content)[1]
    assert (number, event[0], event[3], event[4]) == (0, "BlockStored", [1, 1, 1, 1], 4)
    publisher.close()


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
