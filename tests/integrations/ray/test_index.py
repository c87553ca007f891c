"""The index of a router follows the events of replicas, over real sockets, through gaps and restarts."""

from __future__ import annotations

import random

import pytest

from pagedkv.core import Group, MemoryManager, page_digests

pytest.importorskip("ray", reason="the ray extra is not installed")

import zmq

from pagedkv.integrations.ray.index import EventReader, PrefixIndex
from pagedkv.integrations.zmq_events import EventPublisher


def run(mm: MemoryManager, ids: list[int]) -> None:
    space = mm.open(ids)
    mm.commit(mm.plan([space], [len(ids) - len(space)]), ids[len(space) :])
    space.release()


def until_known(index: PrefixIndex[str], reader: EventReader, publisher: EventPublisher, names: list[bytes]) -> None:
    for _ in range(10_000):
        publisher.publish()
        index.apply("a", reader.read())
        if index.known("a", names) == len(names):
            return
        reader._socket.poll(10)
    pytest.fail("the events did not come")


def test_a_reader_that_joins_late_knows_what_was_there_and_what_comes() -> None:
    mm, index = MemoryManager(64, 4, events=1024), PrefixIndex[str]()
    publisher = EventPublisher(mm, "tcp://127.0.0.1:*", form="digests")
    run(mm, list(range(20)))
    publisher.publish()
    context = zmq.Context()
    reader = EventReader(context, publisher.endpoint)
    until_known(index, reader, publisher, page_digests(range(20), 4))
    run(mm, list(range(24)))
    until_known(index, reader, publisher, page_digests(range(24), 4))
    assert index.known("a", page_digests([*range(8), 7, 7, 7, 7], 4)) == 2
    assert index.known("b", page_digests(range(24), 4)) == 0
    mm.evict(64)
    publisher.publish()
    reader._socket.poll(60_000)
    index.apply("a", reader.read())
    assert index.size("a") == 0
    reader.close()
    publisher.close()
    context.destroy(0)


def test_a_gap_in_the_numbers_is_filled_by_all_that_can_be_found() -> None:
    mm, index, draw = MemoryManager(64, 4, events=1024), PrefixIndex[str](), random.Random(0)
    publisher = EventPublisher(mm, "tcp://127.0.0.1:*", form="digests")
    context = zmq.Context()
    reader = EventReader(context, publisher.endpoint)
    run(mm, list(range(20)))
    until_known(index, reader, publisher, page_digests(range(20), 4))
    publisher._number += 5  # five messages were dropped
    prompt = draw.choices(range(100), k=40)
    run(mm, prompt)
    until_known(index, reader, publisher, page_digests(prompt, 4))
    until_known(index, reader, publisher, page_digests(range(20), 4))
    assert index.size("a") == len(mm.events_snapshot().blocks)
    index.drop("a")
    index.drop("a")
    assert index.size("a") == 0
    reader.close()
    publisher.close()
    context.destroy(0)


def test_pages_behind_a_window_are_no_gap_in_a_prefix() -> None:
    """The group with a window gives back pages that the other group keeps: the prompt is found as before."""
    mm = MemoryManager(64, 4, groups=(Group(), Group(window=4)), events=1024)
    publisher = EventPublisher(mm, "tcp://127.0.0.1:*", form="digests")
    index, ids = PrefixIndex[str](), list(range(40))
    context = zmq.Context()
    reader = EventReader(context, publisher.endpoint)
    space = mm.open(ids)
    for at in range(0, 40, 8):
        mm.commit(mm.plan([space], [8]), ids[at : at + 8])
    space.release()
    until_known(index, reader, publisher, page_digests(ids, 4))
    mm.evict(5)
    publisher.publish()
    reader._socket.poll(60_000)
    events = reader.read()
    assert {event["group_idx"] for event in events} == {1}
    index.apply("a", events)
    assert mm.lookup([*ids, 1]) == 40
    assert index.known("a", page_digests(ids, 4)) == 10
    reader.close()
    publisher.close()
    context.destroy(0)


def test_events_of_a_later_vllm_are_passed_over() -> None:
    index, names = PrefixIndex[str](), page_digests(range(8), 4)
    stored = {"type": "BlockStored", "block_hashes": names, "a_new_field": 1}
    index.apply("a", [stored, {"type": "BlockMoved", "block_hashes": names}])
    assert index.known("a", names) == 2
