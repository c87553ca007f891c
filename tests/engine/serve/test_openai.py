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


def test_an_echo_has_the_scores_of_the_engine(client: Any, engine: Engine) -> None:
    ids = engine.tokenizer.encode(ASKED)
    (scores,) = engine.score([ids])
    for prompt in (ASKED, [ASKED], ids, [ids]):
        asked = {"model": "bundled", "prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0}
        answer = client.completions.create(**asked)
        (choice,) = answer.choices
        assert choice.text == engine.tokenizer.decode(ids)
        assert (choice.finish_reason, answer.usage.completion_tokens) == ("length", 0)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        told = choice.logprobs
        assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
        assert told.token_logprobs[1:] == pytest.approx(scores[1:], abs=1e-3)
        assert all(len(top) == 2 for top in told.top_logprobs[1:])
        assert [choice.text[at:][: len(text)] for at, text in zip(told.text_offset[1:], told.tokens[1:], strict=True)][
            1:
        ] == told.tokens[2:]
    whole = client.completions.create(**{**asked, "max_tokens": 1, "prompt": [ids, ids[:9]], "n": 2, "temperature": 0})
    assert [len(choice.logprobs.tokens) for choice in whole.choices] == [len(ids) + 1] * 2 + [10] * 2
    texts = ["", ""]
    asked |= {"max_tokens": 9, "prompt": [ids, ids], "temperature": 0, "stream": True}
    numbers: list[list[float | None]] = [[], []]
    for chunk in client.completions.create(**asked):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        numbers[choice.index] += choice.logprobs.token_logprobs
    assert texts == [engine.tokenizer.decode(ids) + ANSWER] * 2
    assert numbers[0][1 : len(ids)] == pytest.approx(scores[1:], abs=1e-3)
    assert numbers[0].count(None) == 1


def test_an_echo_without_log_probabilities_is_the_text_alone(client: Any, engine: Engine) -> None:
    asked: dict[str, Any] = {"model": "bundled", "prompt": ASKED, "echo": True, "temperature": 0}
    text = engine.tokenizer.decode(engine.tokenizer.encode(ASKED))
    for most, answer in ((0, ""), (20, ANSWER)):
        (choice,) = client.completions.create(**asked, max_tokens=most).choices
        assert (choice.text, choice.logprobs) == (text + answer, None)
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0; it must be an integer of at least 1"):
        client.completions.create(model="bundled", prompt=ASKED, max_tokens=0)
    with pytest.raises(openai.BadRequestError, match="'echo' is not supported"):
        client.chat.completions.create(model="bundled", messages=messages(ASKED), extra_body={"echo": True})


def test_a_salt_shares_pages_with_its_equals_only(client: Any) -> None:
    found: list[int] = []
    for salt in ("one", "two", "one", "two"):
        asked = {"model": "bundled", "prompt": f"{FACTS * 3}Salted. {ASKED}", "max_tokens": 1}
        usage = client.completions.create(**asked, extra_body={"cache_salt": salt}).usage
        found.append(usage.prompt_tokens_details.cached_tokens)
    assert found[:2] == [0, 0]
    assert found[2] == found[3] > 16


def test_the_end_of_a_text_is_shown_if_asked_for(client: Any) -> None:
    asked: dict[str, Any] = {"model": "bundled", "prompt": ASKED, "temperature": 0, "stop": ["in Gh", "Ghent"]}
    shown: dict[str, Any] = {"include_stop_str_in_output": True}
    for body, text in (({}, "Otto lives "), (shown, "Otto lives in Gh")):
        assert client.completions.create(**asked, extra_body=body).choices[0].text == text
    del asked["stop"]
    special: dict[str, Any] = {"skip_special_tokens": False}
    for body, end in (({}, ""), (shown, ""), (special, ""), ({**shown, **special}, "</s>")):
        text = client.completions.create(**asked, extra_body=body).choices[0].text
        assert text.removeprefix(ANSWER).strip() == end


def test_the_last_message_is_continued(client: Any) -> None:
    begun = [*messages(ASKED), {"role": "assistant", "content": "Otto lives"}]
    asked: dict[str, Any] = {"model": "bundled", "messages": begun, "temperature": 0}
    answer = client.chat.completions.create(**asked, extra_body={"continue_final_message": True})
    assert answer.choices[0].message.content == " in Ghent."
    with pytest.raises(openai.BadRequestError, match="the last message is of 'user'; end with a message of the assis"):
        client.chat.completions.create(
            model="bundled", messages=messages(ASKED), extra_body={"continue_final_message": True}
        )


def test_texts_become_tokens_and_tokens_texts(server: Server, engine: Engine) -> None:
    tokenizer, longest = engine.tokenizer, engine.decoder.config.max_position_embeddings
    begun = [*messages(ASKED), {"role": "assistant", "content": "Otto lives"}]
    rendered = tokenizer.render_chat(messages(ASKED))
    for body, ids in (
        ({"prompt": ASKED}, tokenizer.encode(ASKED)),
        ({"prompt": ASKED, "add_special_tokens": False}, tokenizer.encode(ASKED, special_tokens=False)),
        ({"messages": messages(ASKED)}, tokenizer.encode(rendered, special_tokens=False)),
        (
            {"messages": begun, "continue_final_message": True, "add_generation_prompt": False},
            tokenizer.encode(tokenizer.render_chat(begun, continues=True), special_tokens=False),
        ),
        ({"prompt": FACTS * 2000}, tokenizer.encode(FACTS * 2000)),
    ):
        answer = server.ask("/tokenize", body)
        assert (answer.status, answer.json) == (200, {"count": len(ids), "max_model_len": longest, "tokens": ids})
    ids = tokenizer.encode(ASKED)
    assert server.ask("/detokenize", {"tokens": ids}).json == {
        "prompt": tokenizer.decode(ids, skip_special_tokens=False)
    }
    for path, body, field in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": messages("a")}, "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [5, -1]}, "tokens.1"),
        ("/detokenize", {"tokens": [5] * (2**17 + 1)}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        refused = server.ask(path, body)
        assert (refused.status, refused.error["param"]) == (400, field), refused.error
    assert server.ask("/tokenize", {"prompt": "a", "model": "gpt-4"}).status == 404


def test_the_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["bundled"]
    assert client.models.retrieve("bundled").owned_by == "pagedkv"
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here; the model is 'bundled'"):
        client.completions.create(model="gpt-4", prompt="a")


def test_a_refusal_is_an_error_of_the_client_with_the_field(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1.0; it must be a number of at least 0") as bad:
        client.completions.create(model="bundled", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
