"""A replica without Ray's processes: who leaves is cancelled, errors are heard of, and the thread ends with it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from pagedkv.engine import Engine, SamplingParams
from pagedkv.errors import EngineStopped, InvalidRequest

ray = pytest.importorskip("ray", reason="the ray extra is not installed")

from pagedkv.integrations.ray import PagedReplica, replicas  # noqa: E402

PARAMS = {"max_tokens": 20, "ignore_eos": True}


@pytest.fixture
def replica() -> Iterator[Any]:
    made: Any = PagedReplica(num_frames=64, interface="127.0.0.1")
    yield made
    made.close()


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


async def reply(replica: Any, prompt: list[int], params: dict[str, Any] | None = None) -> list[int]:
    return [token async for tokens, _, _ in replica.generate(prompt, params or PARAMS) for token in tokens]


def test_replies_are_those_of_an_engine(replica: Any) -> None:
    async def all_of(prompts: list[list[int]]) -> list[list[int]]:
        return list(await asyncio.gather(*(reply(replica, prompt) for prompt in prompts)))

    prompts = [list(range(10 + i, 40 + i)) for i in range(8)]
    engine = Engine.load(num_frames=64)
    done = engine.generate([list(p) for p in prompts], SamplingParams(max_tokens=20, ignore_eos=True))
    assert asyncio.run(all_of(prompts)) == [request.completions[0].token_ids for request in done]


def test_a_reader_that_leaves_gives_its_frames_back(replica: Any) -> None:
    async def leave() -> Any:
        tokens = replica.generate(list(range(10, 100)), {"max_tokens": 900, "ignore_eos": True})
        await anext(tokens)
        [open_reply] = replica._replies
        await tokens.aclose()
        return open_reply.request.completions[0]

    completion = asyncio.run(leave())
    wait_until(lambda: not replica._engine.has_work)
    assert completion.finish_reason == "cancelled"
    assert not replica._replies
    assert replica._engine.cache.stats().mapped == 0


def test_a_reply_of_a_replica_that_is_closed_ends_with_an_error() -> None:
    replica: Any = PagedReplica(num_frames=64, interface="127.0.0.1")

    async def close() -> None:
        tokens = replica.generate(list(range(10, 100)), {"max_tokens": 900, "ignore_eos": True})
        await anext(tokens)
        await asyncio.to_thread(replica.close)
        async for _ in tokens:
            pass

    for ask in (close, lambda: reply(replica, [10, 11, 12])):
        with pytest.raises(EngineStopped, match="the replica was closed"):
            asyncio.run(asyncio.wait_for(ask(), 300))


def test_a_step_that_fails_is_heard_of_by_readers_and_by_serve(replica: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replica.check_health()

    with monkeypatch.context() as patch:
        patch.setattr(replica._engine, "forward", Mock(side_effect=ValueError("the model is broken")))
        with pytest.raises(ValueError, match="the model is broken"):
            asyncio.run(reply(replica, [10, 11, 12]))
        wait_until(lambda: not replica._engine.has_work)
        with pytest.raises(RuntimeError, match="does not step: the model is broken"):
            replica.check_health()
    assert len(asyncio.run(reply(replica, [10, 11, 12]))) == 20
    replica.check_health()


def test_events_are_published_on_one_interface_only(replica: Any) -> None:
    assert replica.record_routing_stats()["events"].startswith("tcp://127.0.0.1:")
    with pytest.raises(InvalidRequest, match="ZMQ refuses 'tcp://192.0.2.1:"):
        PagedReplica(num_frames=64, interface="192.0.2.1")


def test_a_closed_replica_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    replica: Any = PagedReplica(num_frames=64, interface="127.0.0.1")
    assert set(threading.enumerate()) - before
    replica.__del__()  # as Ray Serve does
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="its thread has ended"):
        replica.check_health()
    replica.close()


def test_what_replicas_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="least is 0; give the blocks"):
        replicas(3, least=0)
