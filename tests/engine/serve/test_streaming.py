"""Streams: the same text as `generate`, whatever a reader does; a closed stream gives its frames back."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from pagedkv.engine import Engine, Limits, SamplingParams
from pagedkv.engine.serve import AsyncEngine, Piece, Stream
from pagedkv.errors import EngineStopped, InvalidRequest, QueueFull

FACTS = "Mira keeps a red lamp in the cellar. Otto lives in Ghent. "
ASKED = [f"{FACTS}Where is the lamp of Mira?", f"{FACTS}Where does Otto live?"]
LONG = SamplingParams(max_tokens=2000, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> Engine:
    return Engine.load(num_frames=256, limits=Limits(max_waiting=60))


def running(engine: Engine, story: Callable[[AsyncEngine], Any]) -> Any:
    """Return the result of a coroutine over the engine, while a thread steps it."""

    async def whole() -> Any:
        async with AsyncEngine(engine) as served:
            return await story(served)

    return asyncio.run(whole())


async def text_of(stream: Stream) -> str:
    return "".join([piece.text async for piece in stream])


async def no_frame_is_mapped(served: AsyncEngine) -> None:
    deadline = time.monotonic() + 300
    while served.engine.has_work or served.engine.cache.stats().mapped:
        assert time.monotonic() < deadline, "the frames were not given back"
        await asyncio.sleep(0.002)


def test_the_pieces_of_a_stream_are_the_text_and_the_tokens_of_generate(engine: Engine) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=7, stop=["Ghent"])
    expected = engine.generate([ASKED[1]], params, num_samples=3)[0].completions

    async def story(served: AsyncEngine) -> tuple[list[Piece], Stream]:
        stream = served.stream(ASKED[1], params, num_samples=3)
        return [piece async for piece in stream], stream

    pieces, stream = running(engine, story)
    for sample, completion in zip(expected, stream.requests[0].completions, strict=True):
        own = [piece for piece in pieces if piece.completion is completion]
        assert "".join(piece.text for piece in own) == sample.text
        assert completion.token_ids == sample.token_ids
        assert [piece.finish_reason for piece in own] == [""] * (len(own) - 1) + [sample.finish_reason]
        counts = [piece.num_tokens for piece in own]
        assert counts == sorted(counts)
        assert counts[-1] == len(sample.token_ids)


def test_many_streams_have_each_their_own_text(engine: Engine) -> None:
    prompts = [f"{FACTS * (n % 3)}{ASKED[n % 2]}" for n in range(20)]
    params = [SamplingParams(max_tokens=20, temperature=0.8, seed=n) for n in range(20)]
    expected = [request.completions[0].text for request in engine.generate(prompts, params)]

    async def story(served: AsyncEngine) -> list[str]:
        return await asyncio.gather(*(text_of(served.stream(p, q)) for p, q in zip(prompts, params, strict=True)))

    assert running(engine, story) == expected


def test_a_slow_reader_gets_the_whole_text_in_few_pieces_and_stalls_no_step(engine: Engine) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    (expected,) = engine.generate([ASKED[0]], params)

    async def story(served: AsyncEngine) -> list[Piece]:
        slow = served.stream(ASKED[0], params)
        pieces = [await anext(slow)]
        await text_of(served.stream(ASKED[1], params))  # the same steps serve both
        await no_frame_is_mapped(served)
        return pieces + [piece async for piece in slow]

    pieces = running(engine, story)
    assert "".join(piece.text for piece in pieces) == expected.completions[0].text
    assert len(pieces) == 2, "all that was made meanwhile is one piece"


@pytest.mark.parametrize("how", ["close", "async with", "break", "cancelled task"])
def test_a_stream_that_is_not_read_to_its_end_gives_its_frames_back(engine: Engine, how: str) -> None:
    async def reads(served: AsyncEngine) -> None:
        async with served.stream(ASKED[0], LONG) as stream:
            async for _ in stream:
                pass

    cancelled = engine.meter.finished["cancelled"]

    async def story(served: AsyncEngine) -> None:
        if how == "cancelled task":
            task = asyncio.create_task(reads(served))
            while not served.engine.cache.stats().mapped:
                await asyncio.sleep(0.001)
            task.cancel()
        elif how == "break":
            async for _ in served.stream(ASKED[0], LONG):
                break
            gc.collect()
        elif how == "async with":
            async with served.stream(ASKED[0], LONG) as stream:
                await anext(stream)
        else:
            stream = served.stream(ASKED[0], LONG, num_samples=3)
            await anext(stream)
            stream.close()
            assert [piece async for piece in stream if piece.finish_reason] == []
        await no_frame_is_mapped(served)
        assert engine.meter.finished["cancelled"] > cancelled
        assert await text_of(served.stream(ASKED[1])) == "Otto lives in Ghent."

    running(engine, story)


def test_a_stream_closed_while_it_is_submitted_computes_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, go = threading.Event(), threading.Event()
    submit = engine.submit

    def held(*args: Any, **options: Any) -> Any:
        came.set()
        go.wait()
        return submit(*args, **options)

    async def story(served: AsyncEngine) -> None:
        computed = engine.meter.computed_tokens
        monkeypatch.setattr(engine, "submit", held)
        stream = served.stream(ASKED[0], LONG)
        task = asyncio.create_task(stream.begin())
        await asyncio.to_thread(came.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        while not stream.requests:
            await asyncio.sleep(0.001)
        await no_frame_is_mapped(served)
        assert engine.meter.computed_tokens == computed
        assert stream.requests[0].completions[0].finish_reason == "cancelled"

    running(engine, story)


def test_of_several_prompts_all_are_submitted_or_none(engine: Engine) -> None:
    async def story(served: AsyncEngine) -> None:
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            await served.stream_all([ASKED[0], []], LONG).begin()
        with pytest.raises(QueueFull):
            await served.stream_all([ASKED[0]] * 200, LONG).begin()
        await no_frame_is_mapped(served)

    running(engine, story)


def test_an_engine_that_is_closed_ends_its_streams(engine: Engine) -> None:
    async def story() -> None:
        served = AsyncEngine(engine)
        with pytest.raises(EngineStopped, match="not started"):
            await anext(served.stream(ASKED[0]))
        served.start()
        with pytest.raises(InvalidRequest, match="started before"):
            served.start()
        stream = served.stream(ASKED[0], LONG)
        await anext(stream)
        await served.aclose()
        with pytest.raises(EngineStopped, match="closed"):
            await text_of(stream)
        with pytest.raises(EngineStopped, match="closed"):
            await served.stream(ASKED[1]).begin()

    asyncio.run(story())
    assert engine.generate([ASKED[1]])[0].completions[0].text == "Otto lives in Ghent."


def test_a_step_that_fails_once_costs_no_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = engine.forward, []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) in (3, 5, 6):
            raise RuntimeError("out of luck")
        return forward(*args)

    monkeypatch.setattr(engine, "forward", failing)
    assert running(engine, lambda served: text_of(served.stream(ASKED[1]))) == "Otto lives in Ghent."
    assert len(calls) > 6


def test_an_error_after_a_step_costs_no_request(engine: Engine) -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise ValueError("no reader of mine")

    async def story() -> str:
        async with AsyncEngine(engine, after_step=fail) as served:
            return await text_of(served.stream(ASKED[1]))

    assert asyncio.run(story()) == "Otto lives in Ghent."
    assert len(calls) > 3
