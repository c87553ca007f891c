"""The index of a router follows the events of replicas, over real sockets, through gaps and restarts."""

from __future__ import annotations

import random

import pytest

from pagedkv.core import MemoryManager, Observe, page_digests

pytest.importorskip("ray", reason="the ray extra is not installed")

import zmq

from pagedkv.integrations.ray.index import EventReader, PrefixIndex
from pagedkv.integrations.zmq_events import EventPublisher


def run(mm: MemoryManager, ids: list[int]) -> None:
    space = mm.open(ids)
    mm.commit(mm.plan([space], [len(ids) - len(space)]), ids[len(space) :])
    space.release()


def until_known(index: PrefixIndex[str], reader: EventReader, publisher: EventPublisher, names: list[bytes]) -> None:
    for _ in range(200):
        publisher.publish()
        index.apply("a", reader.read())
        if index.known("a", names) == len(names):
            return
        reader._socket.poll(10)
    pytest.fail("the events did not come")


def test_a_reader_that_joins_late_knows_what_was_there_and_what_comes() -> None:
    mm, index = MemoryManager(64, 4, observe=Observe(events=1024)), PrefixIndex[str]()
    publisher = EventPublisher(mm, "tcp://*:*", form="digests")
    run(mm, list(range(20)))
    publisher.publish()
    context = zmq.Context()
    reader = EventReader(context, publisher.endpoint.replace("0.0.0.0", "127.0.0.1"))
    until_known(index, reader, publisher, page_digests(range(20), 4))
    run(mm, list(range(24)))
    until_known(index, reader, publisher, page_digests(range(24), 4))
    assert index.known("a", page_digests([*range(8), 7, 7, 7, 7], 4)) == 2
    assert index.known("b", page_digests(range(24), 4)) == 0
    mm.evict(64)
    publisher.publish()
    reader._socket.poll(1000)
    index.apply("a", reader.read())
    assert index.size("a") == 0
    reader.close()
    publisher.close()
    context.destroy(0)


def test_a_gap_in_the_numbers_is_filled_by_all_that_can_be_found() -> None:
    mm, index, draw = MemoryManager(64, 4, observe=Observe(events=1024)), PrefixIndex[str](), random.Random(0)
    publisher = EventPublisher(mm, "tcp://*:*", form="digests")
    context = zmq.Context()
    reader = EventReader(context, publisher.endpoint.replace("0.0.0.0", "127.0.0.1"))
    run(mm, list(range(20)))
    until_known(index, reader, publisher, page_digests(range(20), 4))
    publisher._number += 5  # five messages were dropped
    prompt = draw.choices(range(100), k=40)
    run(mm, prompt)
    until_known(index, reader, publisher, page_digests(prompt, 4))
    until_known(index, reader, publisher, page_digests(range(20), 4))
    assert index.size("a") == len(mm.snapshot().blocks)
    index.drop("a")
    index.drop("a")
    assert index.size("a") == 0
    reader.close()
    publisher.close()
    context.destroy(0)
