"""The routes of one service in this process: health, tenants, priorities, and parsing beside the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'pagedkv[serve]'")

from pagedkv.engine import Engine, Limits
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.serve import AsyncEngine, streaming
from pagedkv.engine.serve.app import Routes, Service
from pagedkv.engine.serve.bodies import ChatBody
from pagedkv.errors import EngineStopped
from tests.engine.sampling.test_grammar import byte_tokenizer
from tests.engine.serve.server import ASKED, FACTS


@pytest.fixture(scope="module")
def loaded() -> Engine:
    return Engine.load(num_frames=256)


def during(engine: Engine, story: Callable[[Routes, AsyncEngine], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        async with AsyncEngine(engine) as served:
            return await story(Routes(Service(served, "bundled")), served)

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


def test_a_step_that_hangs_is_told_and_does_not_keep_the_engine_from_closing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, go_on, forward = threading.Event(), threading.Event(), engine.forward

    def hangs(*arguments: Any) -> Any:
        hanging.set()
        go_on.wait()
        return forward(*arguments)

    monkeypatch.setattr(engine, "forward", hangs)
    monkeypatch.setattr(streaming, "CLOSE_SECONDS", 0.2)

    async def story(routes: Routes, served: AsyncEngine) -> None:
        impatient = Routes(Service(served, "bundled", step_s=0))
        assert (await impatient.health()).status_code == 200
        reading = asyncio.ensure_future(anext(served.stream(ASKED)))
        await asyncio.to_thread(hanging.wait)
        assert (await routes.health()).status_code == 200
        told = await impatient.health()
        assert (told.status_code, json.loads(told.body)["status"]) == (503, "hung")
        await served.aclose("told to")
        with pytest.raises(EngineStopped, match="told to"):
            await reading
        go_on.set()
        next(thread for thread in threading.enumerate() if thread.name == "pagedkv-step").join()

    during(engine, story)


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


def test_under_a_window_a_chat_has_all_tokens_that_fit_in_chunks() -> None:
    engine = Engine.load(num_frames=20, window=64, limits=Limits(prefill_chunk=32))
    asked = {"messages": [{"role": "user", "content": FACTS * 40 + ASKED}], "ignore_eos": True}

    async def story(routes: Routes, _: AsyncEngine) -> Any:
        noted = routes._prepared(ChatBody, await Sent(asked).body(), 9)
        return noted[1][0], noted[2]

    prompt, params = during(engine, story)
    assert len(prompt) > 20 * 16, "more than the pool holds at once"
    assert params.max_tokens == engine.decoder.config.max_position_embeddings - len(prompt)


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


def test_a_panic_of_a_library_stops_the_engine_with_its_words(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries in Rust raise a BaseException: a thread that it ended would leave all streams waiting."""

    class PanicException(BaseException):
        pass

    async def story(_: Routes, served: AsyncEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "forward", Mock(side_effect=PanicException("index out of bounds")))
            with pytest.raises(EngineStopped, match="3 times in a row: PanicException: index out of bounds"):
                await anext(served.stream(ASKED))

    during(engine, story)


def test_a_client_retains_pages_for_at_most_the_time_of_the_server(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    submit = engine.submit

    def noted(*args: Any, **options: Any) -> Any:
        asked.append(options["retain_s"])
        return submit(*args, **options)

    async def story(routes: Routes, _: AsyncEngine) -> None:
        for fields in ({}, {"cache_control": {"type": "ephemeral"}}, {"prompt_cache_retention": "24h"}):
            sent: Any = Sent({"max_tokens": 1, **fields})
            assert (await routes.completions(sent)).status_code == 200

    monkeypatch.setattr(engine, "submit", noted)
    during(engine, story)
    assert asked == [0.0, 300.0, 3600.0]
    assert engine.cache.stats().pinned == 1  # the prompt has one whole page
    engine.cache.own()  # the thread that stepped has ended
    engine.cache.advise(None, "release", now=float("inf"))


def test_an_answer_says_what_the_cache_knew(engine: Engine) -> None:
    async def story(routes: Routes, _: AsyncEngine) -> None:
        for body in ({}, {"stream": True}):
            prompt = f"{FACTS} Who lives in the cellar?"
            sent: Any = Sent({"prompt": prompt, "max_tokens": 1, "explain_cache": True, **body})
            answer = await routes.completions(sent)
            line = answer.headers["X-Cache-Receipt"]
            if body:
                data = [part async for part in answer.body_iterator]  # type: ignore[attr-defined]
                told = json.loads(data[-2].removeprefix(b"data: "))
            else:
                told = json.loads(answer.body)
            shown = told["cache_receipt"]
            known = told["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (shown["cached_tokens"], shown["prompt_tokens"]) == (known, told["usage"]["prompt_tokens"])
            assert line.startswith(f"{known} of {shown['prompt_tokens']} tokens found; {shown['reason']}")
            assert shown["reason"] in (("hit",) if body else ("new", "differs"))
            assert shown["position"] == known, "clients without keys are one tenant"
            assert "was" not in shown
        for number in range(2):  # a salt makes a tenant of its own
            own: Any = Sent(
                {"prompt": FACTS * 4 + " Hi" * number, "max_tokens": 1, "explain_cache": True, "cache_salt": "s"}
            )
            told = json.loads((await routes.completions(own)).body)["cache_receipt"]
        assert told["reason"] in ("hit", "differs")
        many: Any = Sent({"prompt": [FACTS] * 9, "max_tokens": 1})
        assert (await routes.completions(many)).headers["X-Cache-Receipt"].endswith(" | and 5 more")
        plain_body: Any = Sent({"max_tokens": 1})
        plain = await routes.completions(plain_body)
        assert "cache_receipt" not in json.loads(plain.body)
        assert "X-Cache-Receipt" in plain.headers

    during(engine, story)
