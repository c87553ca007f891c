"""The official client of OpenAI over loopback: the same text as `generate`, whole or streamed, alone or among fifty."""

from __future__ import annotations

from typing import Any

import pytest

from pagedkv.engine import Engine, SamplingParams
from tests.engine.serve.server import ANSWER, ASKED, FACTS, Server

openai = pytest.importorskip("openai", reason="openai is not installed")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(num_frames=1024)


@pytest.fixture
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60)


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def test_streamed_text_is_whole_text_is_the_text_of_generate(client: Any, engine: Engine) -> None:
    for seed in range(3):
        asked: dict[str, Any] = {"temperature": 1.5, "seed": seed, "max_tokens": 30, "top_p": 0.9}
        (request,) = engine.generate([ASKED], SamplingParams(**asked), num_samples=2)
        expected = [completion.text for completion in request.completions]
        whole = client.completions.create(model="bundled", prompt=ASKED, n=2, **asked)
        assert [choice.text for choice in whole.choices] == expected
        assert [choice.index for choice in whole.choices] == [0, 1]
        assert [c.finish_reason for c in whole.choices] == [c.finish_reason for c in request.completions]
        texts = ["", ""]
        for chunk in client.completions.create(model="bundled", prompt=ASKED, n=2, stream=True, **asked):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == expected


def test_usage_counts_tokens_and_those_found_in_the_cache(client: Any, engine: Engine) -> None:
    prompt = f"{FACTS * 9}Who is asked first? {ASKED}"
    (request,) = engine.generate([prompt], SamplingParams(max_tokens=5), num_samples=3)
    usages = [
        client.completions.create(model="bundled", prompt=prompt, n=3, max_tokens=5, temperature=0).usage
        for _ in range(2)
    ]
    assert [usage.prompt_tokens for usage in usages] == [len(request.prompt_ids)] * 2
    assert usages[0].completion_tokens == sum(len(c.token_ids) for c in request.completions)
    assert usages[0].total_tokens == usages[0].prompt_tokens + usages[0].completion_tokens
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert cached[1] == (len(request.prompt_ids) - 1) // 16 * 16 > cached[0]


def test_a_chat_goes_through_the_template_of_the_checkpoint(client: Any, engine: Engine) -> None:
    told = messages(FACTS, "Where does Otto live?")
    ids = engine.tokenizer.encode(engine.tokenizer.render_chat(told), special_tokens=False)
    (request,) = engine.generate([ids], SamplingParams(max_tokens=40))
    answer = client.chat.completions.create(model="bundled", messages=told, temperature=0)
    assert answer.choices[0].message.content == request.completions[0].text == ANSWER
    assert answer.usage.prompt_tokens == len(ids)
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": FACTS}]}, *told[1:]]
    stream = client.chat.completions.create(
        model="bundled", messages=parts, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], len(request.completions[0].token_ids))


def test_several_prompts_and_token_ids_are_answered_in_order(client: Any, engine: Engine) -> None:
    other = f"{FACTS}Where is the lamp of Mira?"
    answer = client.completions.create(model="bundled", prompt=[ASKED, other], n=2, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [ANSWER] * 2 + ["Mira keeps a red lamp in the cellar."] * 2
    ids = engine.tokenizer.encode(ASKED)
    assert client.completions.create(model="bundled", prompt=ids, temperature=0).choices[0].text == ANSWER
    texts = ["", ""]
    for chunk in client.completions.create(model="bundled", prompt=[ids, ids], temperature=0, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [ANSWER] * 2


def test_log_probabilities_are_those_of_the_engine_whole_and_streamed(client: Any, engine: Engine) -> None:
    told = messages(ASKED)
    ids = engine.tokenizer.encode(engine.tokenizer.render_chat(told), special_tokens=False)
    (expected,) = engine.generate([ids], SamplingParams(logprobs=2))[0].completions
    asked: dict[str, Any] = {
        "model": "bundled",
        "messages": told,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == whole
    assert [entry.logprob for entry in whole] == pytest.approx([each.logprob for each in expected.logprobs], abs=1e-3)
    assert "".join(entry.token for entry in whole) == f"{ANSWER}</s>"
    assert [bytes(entry.bytes).decode() for entry in whole] == [entry.token for entry in whole]
    assert all(len(entry.top_logprobs) <= 2 and entry.top_logprobs[0].token == entry.token for entry in whole)

    (choice,) = client.completions.create(model="bundled", prompt=ASKED, temperature=0, logprobs=1).choices
    assert "".join(choice.logprobs.tokens) == f"{ANSWER}</s>"
    assert choice.logprobs.text_offset[:3] == [0, 4, 10]
    assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.top_logprobs) == len(choice.logprobs.tokens)


def test_the_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["bundled"]
    assert client.models.retrieve("bundled").owned_by == "pagedkv"
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here; the model is 'bundled'"):
        client.completions.create(model="gpt-4", prompt="a")


def test_a_refusal_is_an_error_of_the_client_with_the_field(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1.0; it must be a number of at least 0") as bad:
        client.completions.create(model="bundled", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
