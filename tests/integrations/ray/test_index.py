"""The index of a router follows the events of replicas, over real sockets, through gaps and restarts.

The router ranks replicas by what they know, hears of them between requests, and outlives what it cannot read.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pagedkv.core import Group, MemoryManager, page_digests

pytest.importorskip("ray", reason="the ray extra is not installed")

import zmq

from pagedkv.integrations.ray import router as routers
from pagedkv.integrations.ray.index import EventReader, PrefixIndex
from pagedkv.integrations.ray.router import PrefixRouter
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


class Replica:
    """A replica as the router sees it, with a pool and a publisher."""

    def __init__(self, name: str) -> None:
        self.replica_id = name
        self.mm = MemoryManager(64, 4, events=1024)
        self.publisher = EventPublisher(self.mm, "tcp://127.0.0.1:*", form="digests")
        self.routing_stats: dict[str, Any] = {"events": self.publisher.endpoint, "block_size": 4}


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    made = [Replica("a"), Replica("b"), Replica("c")]
    yield made
    for each in made:
        each.publisher.close()


def router_of(replicas: list[Any]) -> Any:
    router: Any = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state()
    router._replicas = {replica.replica_id: replica for replica in replicas}
    return router


def request(ids: Any, **options: Any) -> Any:
    return SimpleNamespace(args=(ids,), kwargs=options)


async def heard(router: Any, replicas: list[Any]) -> None:
    """Wait until the router has joined all replicas."""
    await router.choose_replicas(replicas, None)
    for _ in range(10_000):
        for replica in replicas:
            replica.publisher.publish()
        await asyncio.sleep(0.01)
        await router.choose_replicas(replicas, None)
        if all(router._readers[replica.replica_id]._next for replica in replicas):
            return
    pytest.fail("the events did not come")


async def ranks(router: Any, replicas: list[Any], asked: Any) -> list[list[str]]:
    return [[one.replica_id for one in rank] for rank in await router.choose_replicas(replicas, asked)]


def test_replicas_are_ranked_by_the_prefix_that_they_know_of_a_tenant(replicas: list[Replica]) -> None:
    async def scenario() -> None:
        router = router_of(replicas)
        await heard(router, replicas)
        run(replicas[0].mm, list(range(8)))
        run(replicas[2].mm, list(range(20)))
        for replica in replicas:
            replica.publisher.publish()
        while await ranks(router, replicas, request(list(range(30)))) != [["c"], ["a"], ["b"]]:
            await asyncio.sleep(0.01)
        assert await ranks(router, replicas, request(list(range(30)), tenant=b"other")) == [["a", "b", "c"]]

    asyncio.run(asyncio.wait_for(scenario(), 300))


@pytest.mark.parametrize("ids", [[2**40], ["a"], [[1], [2, 3]], 7, None])
def test_a_prompt_without_names_goes_to_any_replica(replicas: list[Replica], ids: Any) -> None:
    """An error of a router would leave the request waiting forever."""
    assert asyncio.run(ranks(router_of(replicas), replicas, request(ids))) == [["a", "b", "c"]]
    wrong = request(list(range(8)), tenant="no bytes")
    assert asyncio.run(ranks(router_of(replicas), replicas, wrong)) == [["a", "b", "c"]]


def test_events_are_heard_and_dead_replicas_forgotten_between_requests(
    replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers, "LISTEN", 0.01)

    async def scenario() -> None:
        router = router_of(replicas)
        await heard(router, replicas)
        run(replicas[0].mm, list(range(8)))
        replicas[0].publisher.publish()
        while router._index.size("a") != 2:
            await asyncio.sleep(0.01)
        del router._replicas["a"]
        while router._index.size("a") or list(router._readers) != ["b", "c"]:
            await asyncio.sleep(0.01)
        router._replicas.clear()
        await router._listening
        assert not router._readers

    asyncio.run(asyncio.wait_for(scenario(), 300))
