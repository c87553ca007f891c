"""A reply goes on behind its last token wherever its replica dies, and ends there when its caller leaves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pagedkv.errors import EngineStopped, InvalidRequest

pytest.importorskip("ray", reason="the ray extra is not installed")

from ray.exceptions import RayActorError, RayTaskError

from pagedkv.integrations.ray import generate

PROMPT = [7, 8, 9]


class Stream:
    """The items of one call: tokens in pieces, up to a death, or a close, after `dies` items."""

    def __init__(self, tokens: list[int], draw: random.Random, dies: int | None) -> None:
        self.items, self.dies, self.is_cancelled = list[tuple[list[int], bool, int]](), dies, False
        self.error: Exception = draw.choice([RayActorError(), RayTaskError("generate", "", EngineStopped("closed"))])
        while tokens:
            size = draw.randint(1, 3)
            self.items.append((tokens[:size], False, 0))
            tokens = tokens[size:]
        if draw.random() < 0.5:  # the end comes with the last token, or after it
            self.items[-1] = (self.items[-1][0], True, 0)
        else:
            self.items.append(([], True, 0))

    async def __aiter__(self) -> AsyncIterator[tuple[list[int], bool, int]]:
        for number, item in enumerate(self.items):
            if number == self.dies:
                raise self.error
            yield item
            await asyncio.sleep(0)

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """A deployment whose model counts on from the last token. Its calls die after a number of items in `deaths`."""

    def __init__(self, deaths: list[int | None], seed: int = 0) -> None:
        self.deaths, self.draw, self.streams = deaths, random.Random(seed), list[Stream]()
        self.generate = self

    def options(self, *, stream: bool) -> Handle:
        assert stream
        return self

    def remote(self, token_ids: list[int], params: dict[str, Any], tenant: bytes) -> Stream:
        assert tenant == b"acme"
        first = token_ids[-1] + 1
        dies = self.deaths.pop(0) if self.deaths else None
        self.streams.append(Stream(list(range(first, first + params["max_tokens"])), self.draw, dies))
        return self.streams[-1]


async def collect(handle: Any, most: int, **options: Any) -> list[int]:
    return [token async for token in generate(handle, PROMPT, {"max_tokens": most}, tenant=b"acme", **options)]


@pytest.mark.parametrize("seed", range(10))
def test_no_token_is_lost_or_doubled_wherever_replicas_die(seed: int) -> None:
    draw = random.Random(seed)
    handle = Handle([draw.randrange(6) for _ in range(5)], seed)
    assert asyncio.run(collect(handle, 12)) == list(range(10, 22))


def test_a_reply_ends_with_the_error_after_the_deaths_it_may_survive() -> None:
    with pytest.raises((RayActorError, RayTaskError)):
        asyncio.run(collect(Handle([0, 0, 0]), 12, deaths=2))
    assert asyncio.run(collect(Handle([0, 0, 0]), 12, deaths=3)) == list(range(10, 22))


LOOKING_BACK = ["stop", "presence_penalty", "frequency_penalty", "repetition_penalty", "num_beams", "json_schema"]


@pytest.mark.parametrize("name", LOOKING_BACK)
def test_parameters_that_look_back_on_the_output_are_refused(name: str) -> None:
    async def ask() -> None:
        await anext(generate(Handle([]), PROMPT, {name: 1}))  # type: ignore[arg-type]

    with pytest.raises(InvalidRequest, match=f"params has {name}; a reply can go on elsewhere with max_tokens"):
        asyncio.run(ask())
