"""Three replicas under load: tokens of one engine, also when replicas are killed; prefixes are found where they are."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from pagedkv.engine import Engine, SamplingParams
from pagedkv.errors import InvalidRequest

ray = pytest.importorskip("ray", reason="the ray extra is not installed")
from ray import serve  # noqa: E402
from ray.serve.config import RequestRouterConfig  # noqa: E402
from ray.serve.request_router import FIFOMixin, RequestRouter  # noqa: E402

from pagedkv.integrations.ray import PagedReplica, generate, replicas  # noqa: E402

pytestmark = pytest.mark.slow

FRAMES = 200
GROUPS, TURNS, PREFIX, TAIL = 6, 8, 320, 20
KILLS, EVERY = 8, 15.0


class RoundRobin(FIFOMixin, RequestRouter):
    """The router to compare with."""

    def initialize_state(self, **_: Any) -> None:
        self.turn = 0

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        self.turn += 1
        ordered = sorted(candidate_replicas, key=lambda replica: str(replica.replica_id))
        at = self.turn % max(1, len(ordered))
        return [[replica] for replica in (*ordered[at:], *ordered[:at])]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def alone() -> Engine:
    return Engine.load(num_frames=FRAMES)


def prompts(seed: int = 0) -> list[list[int]]:
    """Prompts of several groups; those of a group begin alike. Neighbours are of different groups."""
    draw = random.Random(seed)
    prefixes = [draw.choices(range(10, 600), k=PREFIX) for _ in range(GROUPS)]
    every = [prefix + draw.choices(range(10, 600), k=TAIL) for _ in range(TURNS) for prefix in prefixes]
    draw.shuffle(every)
    return every


async def reply(handle: Any, prompt: Sequence[int], found: list[int], most: int = 12) -> list[int]:
    tokens: AsyncIterator[int] = generate(handle, prompt, {"max_tokens": most, "ignore_eos": True}, found=found)
    return [token async for token in tokens]


async def replies(handle: Any, asked: Sequence[Sequence[int]], at_once: int, found: list[int]) -> list[list[int]]:
    places = asyncio.Semaphore(at_once)

    async def one(prompt: Sequence[int]) -> list[int]:
        async with places:
            return await reply(handle, prompt, found)

    return list(await asyncio.gather(*map(one, asked)))


def want(engine: Engine, asked: Sequence[Sequence[int]]) -> list[list[int]]:
    done = engine.generate([list(p) for p in asked], SamplingParams(max_tokens=12, ignore_eos=True))
    return [request.completions[0].token_ids for request in done]


def test_prefixes_are_found_more_often_than_in_turn(cluster: None, alone: Engine) -> None:
    """The share of prompt tokens that was found, by prefix and in turn. A pool holds five groups, and there are six."""
    shares, asked = {}, prompts()
    for name in ("prefix", "in turn"):
        app = replicas(3, num_frames=FRAMES // 2)
        if name == "in turn":
            deployment = app._bound_deployment.options(
                request_router_config=RequestRouterConfig(request_router_class=RoundRobin)
            )
            app = deployment.bind(None, num_frames=FRAMES // 2)
        handle = serve.run(app, name=name.replace(" ", "-"))  # a process keeps one router for each name
        time.sleep(2.0)  # the router learns where the events are
        found: list[int] = []
        assert asyncio.run(replies(handle, asked, 3, found)) == want(alone, asked)
        shares[name] = sum(found) / sum(map(len, asked))
        serve.delete(name.replace(" ", "-"))
    print(f"found by prefix {shares['prefix']:.2f}, in turn {shares['in turn']:.2f}")
    assert shares["prefix"] > shares["in turn"] + 0.1


def test_replicas_that_are_killed_cost_no_token_and_double_none(cluster: None, alone: Engine) -> None:
    handle = serve.run(replicas(3, num_frames=FRAMES), name="fire")

    async def under_fire() -> tuple[list[list[int]], list[list[int]], int]:
        draw, asked, tokens, kills = random.Random(1), list[list[int]](), list[list[int]](), 0
        next_kill = time.monotonic() + EVERY / 2
        while kills < KILLS:
            part = prompts(draw.randrange(1000))[:12]
            running = asyncio.ensure_future(replies(handle, part, 6, []))
            while not running.done():
                if time.monotonic() > next_kill and kills < KILLS:
                    kill_one(draw)
                    kills, next_kill = kills + 1, time.monotonic() + EVERY
                await asyncio.sleep(0.02)
            asked += part
            tokens += running.result()
        return asked, tokens, kills

    asked, tokens, kills = asyncio.run(under_fire())
    assert kills == KILLS
    assert tokens == want(alone, asked)
    serve.delete("fire")


def kill_one(draw: random.Random) -> None:
    names = [one for one in ray.util.list_named_actors(all_namespaces=True) if "SERVE_REPLICA" in one["name"]]
    chosen = draw.choice(names)
    ray.kill(ray.get_actor(chosen["name"], namespace=chosen["namespace"]), no_restart=True)


class Watched(PagedReplica):
    """A replica that tells what its pool holds."""

    async def mapped(self) -> int:
        return self._engine.cache.stats().mapped


@pytest.mark.parametrize("way", ["aclose", "cancel"])
def test_a_caller_that_leaves_gives_the_frames_of_its_reply_back(cluster: None, way: str) -> None:
    handle = serve.run(serve.deployment(Watched, name="watched").bind(num_frames=FRAMES, interface="127.0.0.1"))

    async def leave() -> tuple[int, list[int]]:
        seen = list[int]()
        tokens = generate(handle, list(range(10, 100)), {"max_tokens": 3000, "ignore_eos": True})

        async def read() -> None:
            async for token in tokens:
                seen.append(token)

        reader = asyncio.ensure_future(read()) if way == "cancel" else None
        if reader is None:
            seen.append(await anext(tokens))
        while not seen:
            await asyncio.sleep(0.01)
        held = await handle.mapped.remote()
        if reader is None:
            await tokens.aclose()
        else:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        left = [held]
        for _ in range(20):
            left.append(await handle.mapped.remote())
            if not left[-1]:
                break
            await asyncio.sleep(0.05)
        return held, left

    try:
        held, left = asyncio.run(leave())
    finally:
        serve.delete("default")
    assert held > 0
    assert left[-1] == 0, left


def test_errors_reach_the_caller(cluster: None) -> None:
    handle = serve.run(replicas(1, num_frames=FRAMES), name="errors")
    with pytest.raises(InvalidRequest, match="go on elsewhere with"):
        asyncio.run(_first(generate(handle, [1, 2], {"stop": "x"})))
    for wrong in (10**6, 2**40):  # the router can name no block of the second
        with pytest.raises(InvalidRequest, match="vocabulary|fit int32"):
            asyncio.run(asyncio.wait_for(_first(generate(handle, [wrong], {})), 60))
    serve.delete("errors")


async def _first(tokens: AsyncIterator[int]) -> int:
    return await anext(tokens)
