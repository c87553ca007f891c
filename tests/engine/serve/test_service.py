"""The routes of one service in this process: health, tenants, priorities, and parsing beside the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'pagedkv[serve]'")

from pagedkv.engine import Engine, Limits
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.serve import AsyncEngine, app, streaming
from pagedkv.engine.serve.app import Routes, Service
from pagedkv.engine.serve.bodies import ChatBody, CompletionBody, read
from tests.engine.sampling.test_grammar import byte_tokenizer
from tests.engine.serve.server import ASKED, FACTS


@pytest.fixture(scope="module")
def loaded() -> Engine:
    return Engine.load(num_frames=256)


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    yield loaded
    while loaded.has_work:
        loaded.step()
    assert loaded.cache.stats().mapped == 0


def during(engine: Engine, story: Callable[[Routes, AsyncEngine], Awaitable[Any]], step_s: float = 300) -> Any:
    async def whole() -> Any:
        async with AsyncEngine(engine) as served:
            return await asyncio.wait_for(story(Routes(Service(served, "bundled", step_s=step_s)), served), 60)

    return asyncio.run(whole())


class Sent:
    """A request as a route gets it, whose client waits for ever."""

    def __init__(self, body: dict[str, Any], tenant: bytes = b"") -> None:
        prompt = {} if "messages" in body else {"prompt": ASKED}
        self._data = json.dumps({**prompt, "temperature": 0, **body}).encode()
        self.state = SimpleNamespace(tenant=tenant)

    async def body(self) -> bytes:
        return self._data

    async def receive(self) -> Any:
        await asyncio.Event().wait()


def test_health_tells_of_a_step_that_does_not_end(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, go_on, forward = threading.Event(), threading.Event(), engine.forward

    def hangs(*arguments: Any) -> Any:
        hanging.set()
        go_on.wait(20)
        return forward(*arguments)

    monkeypatch.setattr(engine, "forward", hangs)

    async def story(routes: Routes, served: AsyncEngine) -> list[Any]:
        healths = [await routes.health()]
        answer = asyncio.ensure_future(routes.completions(Sent({})))  # type: ignore[arg-type]
        await asyncio.to_thread(hanging.wait)
        for now in (0.9, 1.1):  # seconds after the step began
            with monkeypatch.context() as patch:
                since = served._busy_since or 0.0
                patch.setattr(streaming, "time", SimpleNamespace(monotonic=lambda at=since + now: at))
                healths.append(await routes.health())
        go_on.set()
        await answer
        await asyncio.sleep(0.3)
        return [*healths, await routes.health()]

    healths = during(engine, story, step_s=1)
    assert [health.status_code for health in healths] == [200, 200, 503, 200]
    assert json.loads(healths[2].body) == {"status": "hung", "reason": "a step began 1 s ago and has not ended"}


def test_tenants_do_not_see_the_pages_of_one_another(engine: Engine) -> None:
    async def story(routes: Routes, _: AsyncEngine) -> list[int]:
        cached = []
        for tenant in (b"acme", b"zebra", b"acme", b"zebra"):
            sent: Any = Sent({"prompt": FACTS * 5 + ASKED}, tenant)
            told = json.loads((await routes.completions(sent)).body)
            cached.append(told["usage"]["prompt_tokens_details"]["cached_tokens"])
        return cached

    first, second, third, fourth = during(engine, story)
    assert first == second == 0
    assert third == fourth > 0


def test_a_priority_reaches_the_scheduler(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    submit = engine.submit

    def noted(*arguments: Any, **options: Any) -> Any:
        request = submit(*arguments, **options)
        seen.append(request.priority)
        return request

    monkeypatch.setattr(engine, "submit", noted)

    async def story(routes: Routes, _: AsyncEngine) -> None:
        for body in ({"priority": -3}, {"priority": None}, {}):
            await routes.completions(Sent(body))  # type: ignore[arg-type]

    during(engine, story)
    assert seen == [-3, 0, 0]


def test_under_a_window_a_chat_has_all_tokens_that_fit_in_chunks() -> None:
    engine = Engine.load(num_frames=20, window=64, limits=Limits(prefill_chunk=32))
    asked = {"messages": [{"role": "user", "content": FACTS * 40 + ASKED}], "ignore_eos": True}

    async def story(routes: Routes, _: AsyncEngine) -> Any:
        noted = routes._prepared(ChatBody, await Sent(asked).body(), 9)
        return noted[1][0], noted[2]

    prompt, params = during(engine, story)
    assert len(prompt) > 20 * 16, "more than the pool holds at once"
    assert params.max_tokens == engine.decoder.config.max_position_embeddings - len(prompt)


def test_one_body_is_read_at_a_time_beside_the_event_loop(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader holds the interpreter. Between two of them the event loop and the steps have their turn."""
    inside, most, threads = [0], [0], set()

    def noted(*arguments: Any) -> Any:
        threads.add(threading.get_ident())
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        return read(*arguments)

    monkeypatch.setattr(app, "read", noted)

    async def story(routes: Routes, _: AsyncEngine) -> None:
        await asyncio.gather(*(routes.completions(Sent({})) for _ in range(8)))  # type: ignore[arg-type]

    during(engine, story)
    assert most == [1]
    assert threads
    assert threading.get_ident() not in threads


def test_an_answer_has_the_form_that_was_asked_for(loaded: Engine) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    letters = byte_tokenizer()  # the bundled tokenizer has no bytes of tokens
    tokenizer = Tokenizer(letters.raw, config={"chat_template": "{{ messages[0].content }}"}, eos_ids=letters.eos_ids)
    engine = Engine(loaded.decoder, tokenizer, loaded.cache)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    asked = {"messages": [{"role": "user", "content": "n?"}], "response_format": form, "max_tokens": 60}

    async def story(routes: Routes, _: AsyncEngine) -> list[str]:
        found = [await routes.chat(Sent({**asked, "seed": seed})) for seed in (-1, 2)]  # type: ignore[arg-type]
        return [json.loads(answer.body)["choices"][0]["message"]["content"] for answer in found]

    assert all(json.loads(text) in ("yes", "no") for text in during(engine, story))


@pytest.mark.parametrize("seed", [-1, -(2**63), 0, 2**63 - 1])
def test_any_seed_of_openai_is_taken_and_negative_ones_differ(seed: int) -> None:
    body = read(CompletionBody, json.dumps({"prompt": "a", "seed": seed}).encode())
    params = body.params(10)
    assert params.seed == (seed if seed >= 0 else seed + 2**63)


def test_a_step_that_hangs_does_not_keep_the_engine_from_closing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagedkv.engine.serve import streaming
    from pagedkv.errors import EngineStopped

    hanging, go_on, forward = threading.Event(), threading.Event(), engine.forward

    def hangs(*arguments: Any) -> Any:
        hanging.set()
        go_on.wait(20)
        return forward(*arguments)

    monkeypatch.setattr(engine, "forward", hangs)
    monkeypatch.setattr(streaming, "CLOSE_SECONDS", 0.2)

    async def story(_: Routes, served: AsyncEngine) -> None:
        reading = asyncio.ensure_future(anext(served.stream(ASKED)))
        await asyncio.to_thread(hanging.wait)
        await served.aclose("told to")
        with pytest.raises(EngineStopped, match="told to"):
            await reading
        go_on.set()
        assert served._thread is not None
        served._thread.join()

    during(engine, story)


def test_a_panic_of_a_library_stops_the_engine_with_its_words(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries in Rust raise a BaseException: a thread that it ended would leave all streams waiting."""
    from pagedkv.errors import EngineStopped

    class PanicException(BaseException):
        pass

    def panics(*_: Any) -> Any:
        raise PanicException("index out of bounds")

    async def story(_: Routes, served: AsyncEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "forward", panics)
            with pytest.raises(EngineStopped, match="3 times in a row: PanicException: index out of bounds"):
                await anext(served.stream(ASKED))

    during(engine, story)
