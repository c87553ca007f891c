"""Bodies: what asks for nothing is as if absent, at any depth; the first mistake ends the reading of a large one."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'pagedkv[serve]'")

from pydantic import ValidationError
from pydantic_core import from_json

from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.serve import bodies
from pagedkv.engine.serve.bodies import Asked, BadBody, Body, ChatBody, CompletionBody, read
from pagedkv.errors import InvalidRequest

SIZE = 2**20


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": content, **fields}]}


def parts(**fields: Any) -> dict[str, Any]:
    return chat([{"type": "text", "text": "b"}, {"type": "text", "text": "", **fields}])


def form(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    json_schema = {"schema": {"type": "object"}, **schema}
    return {**chat("b"), "response_format": {"type": "json_schema", "json_schema": json_schema, **fields}}


def stream(asked: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return {**asked, "stream": True, "stream_options": {"include_usage": True, **options}}


Place = tuple[type[Body], Callable[[dict[str, Any]], dict[str, Any]], str]
"""A kind of body, a function of some fields: a body with these fields inside of an object, and that object's path."""

PLACES: dict[tuple[type[Asked], str], Place] = {
    (CompletionBody, "body"): (CompletionBody, lambda fields: {"prompt": "a", "n": 2, **fields}, ""),
    (ChatBody, "body"): (ChatBody, lambda fields: {**chat("b"), "n": 2, **fields}, ""),
    (bodies._Message, "message"): (ChatBody, lambda fields: chat("b", **fields), "messages.1."),
    (bodies._TextPart, "part"): (ChatBody, lambda fields: parts(**fields), "messages.1.content.1."),
    (bodies._CacheControl, "body"): (
        CompletionBody,
        lambda fields: {"prompt": "a", "cache_control": {"type": "ephemeral", **fields}},
        "cache_control.",
    ),
    (bodies._CacheControl, "part"): (
        ChatBody,
        lambda fields: parts(cache_control={"type": "ephemeral", **fields}),
        "messages.1.content.1.cache_control.",
    ),
    (bodies._StreamOptions, "completion"): (CompletionBody, partial(stream, {"prompt": "a"}), "stream_options."),
    (bodies._StreamOptions, "chat"): (ChatBody, partial(stream, chat("b")), "stream_options."),
    (bodies._ResponseFormat, "form"): (ChatBody, lambda fields: form({}, **fields), "response_format."),
    (bodies._JsonSchema, "schema"): (ChatBody, form, "response_format.json_schema."),
}


def read_in(place: Place, fields: dict[str, Any]) -> Body:
    kind, body, _ = place
    return read(kind, json.dumps(body(fields)).encode())


@pytest.mark.parametrize(("kind", "name"), PLACES)
def test_null_empty_and_default_values_are_as_if_absent_at_every_depth(kind: type[Asked], name: str) -> None:
    place = PLACES[kind, name]
    plain = read_in(place, {})
    given = set(json.dumps(place[1]({})).replace('"', " ").split())  # a field of the plain body asks for something
    optional = {each for each, field in kind.model_fields.items() if not field.is_required()}
    for field in {*optional, *kind.nothing, "no_such_field"} - given:
        for value in (None, "", [], {}, {"a": None}, {"a": {"b": []}}, *kind.nothing.get(field, ())):
            assert read_in(place, {field: value}) == plain, (field, value)


@pytest.mark.parametrize(("kind", "name"), PLACES)
def test_an_unknown_field_at_any_depth_is_refused_by_its_name(kind: type[Asked], name: str) -> None:
    place = PLACES[kind, name]
    for value in (0, 1, False, True, -0.5, "a", [None], [[]], {"a": False}, {"a": None, "b": 0}):
        where = place[2] + "no_such_field"
        with pytest.raises(BadBody, match="'no_such_field' is not supported") as refused:
            read_in(place, {"no_such_field": value})
        assert refused.value.param == where
        assert where in str(refused.value).replace("'", "")


@pytest.mark.parametrize(("kind", "name"), PLACES)
def test_a_field_that_is_not_done_is_refused_unless_it_asks_for_nothing(kind: type[Asked], name: str) -> None:
    for field in kind.nothing.keys() - kind.model_fields.keys():
        for value in (-7, "all", [0], {"a": 1}, 0.5):
            with pytest.raises(BadBody) as refused:
                read_in(PLACES[kind, name], {field: value})
            assert refused.value.param == PLACES[kind, name][2] + field


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        ({"prompt": "a"}, 0.0),
        ({"prompt": "a", "prompt_cache_key": "mine"}, 0.0),
        ({"prompt": "a", "prompt_cache_retention": "in_memory"}, 0.0),
        ({"prompt": "a", "prompt_cache_retention": "24h"}, 86400.0),
        ({"prompt": "a", "cache_control": {"type": "ephemeral"}}, 300.0),
        ({"prompt": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}, "prompt_cache_retention": None}, 3600.0),
        (parts(cache_control={"type": "ephemeral", "ttl": "5m"}), 300.0),
        ({**parts(cache_control={"type": "ephemeral"}), "cache_control": {"type": "ephemeral", "ttl": "1h"}}, 3600.0),
    ],
)
def test_the_longest_time_that_is_asked_for_counts(body: dict[str, Any], seconds: float) -> None:
    assert read(CompletionBody if "prompt" in body else ChatBody, json.dumps(body).encode()).retain_s == seconds


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_retention": "1y"}, "prompt_cache_retention"),
        ({"cache_control": {"type": "for ever"}}, "cache_control"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
    ],
)
def test_another_time_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadBody) as refused:
        read(CompletionBody, json.dumps({"prompt": "a", **fields}).encode())
    assert refused.value.param == param


def test_false_is_no_zero_and_true_no_one() -> None:
    assert read(CompletionBody, b'{"prompt": "a", "logprobs": 0}').num_alternatives == 0
    assert read(CompletionBody, b'{"prompt": "a", "logprobs": false}').num_alternatives is None
    for text in (b'{"prompt": "a", "echo": 0}', b'{"prompt": "a", "best_of": true}', b'{"prompt": "a", "best_of": 2}'):
        with pytest.raises(BadBody):
            read(CompletionBody, text)


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@pytest.mark.parametrize("no_stream", [{}, {"stream": None}, {"stream": False}])
def test_options_of_a_stream_are_refused_without_one(kind: type[Body], no_stream: dict[str, Any]) -> None:
    asked = {"prompt": "a"} if kind is CompletionBody else chat("b")
    with pytest.raises(BadBody, match="stream_options is given and stream is not true") as refused:
        read(kind, json.dumps({**asked, **no_stream, "stream_options": {"include_usage": True}}).encode())
    assert refused.value.param == "stream_options"
    for options in (None, {}, {"include_usage": None}, {"include_usage": False}):
        read(kind, json.dumps({**asked, **no_stream, "stream_options": options}).encode())


DEFAULTS = {
    "openai": {
        "audio": None, "frequency_penalty": 0, "function_call": None, "functions": None, "logit_bias": {},
        "metadata": {}, "logprobs": False, "top_logprobs": 0, "modalities": ["text"], "n": 1,
        "parallel_tool_calls": True,
        "prediction": None, "presence_penalty": 0, "reasoning_effort": None, "response_format": {"type": "text"},
        "seed": None, "service_tier": "auto", "stop": [], "store": False, "stream_options": None,
        "tool_choice": "auto", "tools": [], "top_p": 1, "user": "", "verbosity": "medium",
    },
    "vllm": {
        "add_generation_prompt": True, "allowed_token_ids": None, "bad_words": [], "best_of": None, "cache_salt": None,
        "chat_template": None, "chat_template_kwargs": {}, "continue_final_message": False, "documents": [],
        "echo": False, "guided_json": None, "ignore_eos": False, "include_reasoning": True,
        "include_stop_str_in_output": False, "length_penalty": 1.0, "min_p": 0, "min_tokens": 0,
        "mm_processor_kwargs": None, "priority": 0, "prompt_logprobs": None, "repetition_penalty": 1.0,
        "return_tokens_as_token_ids": False, "skip_special_tokens": True, "spaces_between_special_tokens": True,
        "stop": "", "stop_token_ids": [], "stream_options": {}, "top_k": -1, "truncate_prompt_tokens": None,
        "use_beam_search": False, "vllm_xargs": {},
    },
    "others": {
        "ebnf": None, "lora_path": None, "mirostat": 0, "no_stop_trim": False, "regex": "", "repeat_penalty": 1.0,
        "session_params": {}, "tfs_z": 1, "top_a": 0, "top_k": 0, "typical_p": 1.0, "tool_choice": "none",
    },
}  # fmt: skip
"""Fields that clients send although their users set none."""


CHAT_ALONE = {"add_generation_prompt", "continue_final_message"}


@pytest.mark.parametrize("client", DEFAULTS)
def test_the_defaults_of_clients_ask_for_nothing(client: str) -> None:
    for kind, asked in ((CompletionBody, {"prompt": "a"}), (ChatBody, chat("b"))):
        fields = {name: value for name, value in DEFAULTS[client].items() if kind is ChatBody or name not in CHAT_ALONE}
        plain, full = (read(kind, json.dumps({**asked, **each}).encode()) for each in ({}, fields))
        assert full.params(9) == plain.params(9)
        assert (full.n or 1, full.priority or 0, full.stream) == (1, 0, None)


def test_a_message_is_replayed_as_any_server_sent_it() -> None:
    empty = {
        "name": "", "refusal": None, "audio": None, "function_call": None, "tool_calls": [], "annotations": [],
        "reasoning": "", "reasoning_content": "", "tool_call_id": None, "prefix": False,
    }  # fmt: skip
    said = {"role": "assistant", "content": "Mira keeps a red lamp in the cellar."}
    for message in (said, {**said, **empty}, {**said, "content": [{"type": "text", "text": said["content"]}]}):
        assert read(ChatBody, json.dumps({"messages": [message]}).encode()).messages[0].as_variables() == said
    for content in (None, "", []):
        assert read(ChatBody, json.dumps(chat(content)).encode()).messages[1].as_variables()["content"] == ""
    assert read(ChatBody, b'{"messages": [{"role": "assistant"}]}').messages[0].as_variables()["content"] == ""
    for message in ({"role": "user"}, {"role": "user", "content": None}, {"role": "system"}):
        with pytest.raises(BadBody, match=r"messages.0.content is missing; give a text, or a list of parts"):
            read(ChatBody, json.dumps({"messages": [message]}).encode())


def filled(begin: str, item: str, end: str) -> bytes:
    """Return a body of SIZE bytes of items."""
    count = (SIZE - len(begin) - len(end)) // (len(item) + 1)
    return f"{begin}{','.join([item] * count)}{end}".encode()


PARTS = ('{"messages": [{"role": "user", "content": [', "]}]}")
MESSAGES, PROMPT, ROW = ('{"messages": [', "]}"), ('{"prompt": [', "]}"), ('{"prompt": [[', "]]}")
LARGE = {
    "empty parts": filled(PARTS[0], "{}", PARTS[1]),
    "messages without a role": filled(MESSAGES[0], '{"content":"a"}', MESSAGES[1]),
    "negative ids": filled(PROMPT[0], "-1", PROMPT[1]),
    "texts": filled(PROMPT[0], '"a"', PROMPT[1]),
    "texts of ids": filled('{"prompt": ["a",', "1", "]}"),
    "lists of an id": filled(PROMPT[0], "[7]", PROMPT[1]),
    "negative ids in a list": filled(ROW[0], "-1", ROW[1]),
    "deep lists": filled(PROMPT[0], "[" * 100 + "]" * 100, PROMPT[1]),
    "lists without an end": b'{"prompt": ' + b"[" * SIZE,
    "stops": filled('{"prompt": "a", "stop": [', "5", "]}"),
    "stop ids": filled('{"prompt": "a", "stop_token_ids": [', "-1", "]}"),
    "biases": filled('{"prompt": "a", "logit_bias": {"0": "a",', '"1":"a"', "}}"),
    "fields": f'{{"prompt": "a",{",".join(f"{chr(34)}{n:x}{chr(34)}:0" for n in range(SIZE // 9))}}}'.encode(),
    "a schema": filled('{"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": [', "[]", "]}}}}"),
    "tools": filled('{"messages": [{"role": "user", "content": "a"}], "tools": [', "{}", "]}"),
    "a long name": b'{"prompt": "a", "' + b"a" * SIZE + b'": 1}',
    "a long value": b'{"prompt": "a", "n": "' + b"a" * SIZE + b'"}',
}


def kind_of(name: str) -> type[Body]:
    return ChatBody if b'"messages"' in LARGE[name] or b"response_format" in LARGE[name][:30] else CompletionBody


@pytest.mark.parametrize("name", LARGE)
def test_the_first_mistake_of_a_large_body_ends_its_reading(name: str) -> None:
    """Each mistake was an error of its own of 700 bytes, once for each form of a prompt: 5 s for 1 MiB."""
    with pytest.raises(BadBody) as refused:
        read(kind_of(name), LARGE[name])
    assert len(str(refused.value)) < 1000
    assert refused.value.param is None or len(refused.value.param) < 200
    with pytest.raises(ValueError) as error:  # noqa: PT011 (or no JSON at all)
        kind_of(name).model_validate(from_json(LARGE[name]))
    assert not isinstance(error.value, ValidationError) or error.value.error_count() <= 2


def test_brackets_of_a_text_are_no_lists() -> None:
    text = '[{"\\' * (bodies.MOST_OBJECTS // 2)
    assert read(CompletionBody, json.dumps({"prompt": text}).encode()).prompt == text  # type: ignore[attr-defined]
    rows = {"prompt": "a", "user": [[] for _ in range(bodies.MOST_OBJECTS + 1)]}
    with pytest.raises(BadBody, match="the body has 131,075 lists and objects, the limit is 131,072; send fewer"):
        read(CompletionBody, json.dumps(rows).encode())
    with pytest.raises(BadBody, match="the body is not JSON"):
        read(CompletionBody, b'{"prompt": "' + b'\\"[' * SIZE)


class Short(Tokenizer):
    """A tokenizer that encodes no long text."""

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        assert len(text) < 100_000, "a long text was encoded whole"
        return super().encode(text, special_tokens=special_tokens)


def test_a_prompt_is_refused_by_its_length_before_it_is_encoded() -> None:
    tokenizer, words = Short.load(BUNDLED), "Otto lives " * 100_000
    for kind, asked in (
        (CompletionBody, {"prompt": ["a", words]}),
        (CompletionBody, {"prompt": [[5], [5] * 31]}),
        (ChatBody, chat(words)),
        (ChatBody, chat([{"type": "text", "text": "Otto lives "}] * 10_000)),
    ):
        body = read(kind, json.dumps(asked).encode())
        with pytest.raises(InvalidRequest, match=r"the prompt has .*\d tokens, the limit of this server is 30"):
            body.prompts(tokenizer, 30)
    for ids in ([5] * 30, [[5], [5] * 30]):
        assert read(CompletionBody, json.dumps({"prompt": ids}).encode()).prompts(tokenizer, 30)[-1] == [5] * 30


NUMBERS = [
    "0", "-0.0", "1", "-1", "1e-45", "1e-310", "-1e-45", "1e300", "-1e300", "1e999", "NaN", "-Infinity", "0.5", "2.5",
    str(2**31), str(-(2**31) - 1), str(2**63), str(-(2**63) - 1), "9" * 400, "true", "false", '"1"', '""', "[1]", "{}",
]  # fmt: skip


def numeric(kind: type[Body]) -> list[str]:
    fields = {name: str(field.annotation) for name, field in kind.model_fields.items()}
    return [name for name, shown in fields.items() if "int" in shown.replace("Discriminator", "") or "float" in shown]


def test_a_number_in_any_field_is_taken_or_refused_by_its_name() -> None:
    for kind, asked in ((CompletionBody, {"prompt": '"a"'}), (ChatBody, {"messages": '[{"role": "assistant"}]'})):
        assert {"n", "temperature", "repetition_penalty", "priority", "seed", "logit_bias"} <= set(numeric(kind))
        for field in set(numeric(kind)) - {"prompt"}:
            for number in NUMBERS:
                value = f'{{"5": {number}}}' if field == "logit_bias" else number
                value = f"[{number}]" if field == "stop_token_ids" else value
                given = {**asked, "max_tokens": "2", field: value}
                body = "{" + ",".join(f'"{name}": {text}' for name, text in given.items()) + "}"
                try:
                    read(kind, body.encode()).params(9)
                except InvalidRequest as error:
                    named = field.replace("completion_", "")  # both of a chat are one limit
                    assert field in str(error) or named in str(error), (field, number)  # noqa: PT017


def test_any_seed_of_openai_is_taken_and_negative_ones_differ() -> None:
    for seed in (-1, -(2**63), 0, 2**63 - 1):
        body = read(CompletionBody, json.dumps({"prompt": "a", "seed": seed}).encode())
        assert body.params(10).seed == seed % 2**63


def test_a_part_that_is_no_text_is_refused_by_its_type() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with pytest.raises(BadBody, match=r"messages.0.content must be a text, or a list of parts"):
        read(ChatBody, json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode())
