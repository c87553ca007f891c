"""The router ranks replicas by what they know, hears of them between requests, and outlives what it cannot read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pagedkv.core import MemoryManager

pytest.importorskip("ray", reason="the ray extra is not installed")


from pagedkv.integrations.ray import router as routers
from pagedkv.integrations.ray.router import PrefixRouter
from pagedkv.integrations.zmq_events import EventPublisher

from .test_index import run


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
