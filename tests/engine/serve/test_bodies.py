"""Bodies: what asks for nothing is as if absent, at any depth; the first mistake ends the reading of a large one."""

from __future__ import annotations

import inspect
import json
import threading
import time
from collections.abc import Callable, Iterator
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
from tests.engine.serve.server import ANSWER, ASKED, Answer, Server

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SIZE = 2**20


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": content, **fields}]}


def schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, **fields}}


Place = Callable[[dict[str, Any]], tuple[type[Body], dict[str, Any], str]]
"""A function of some fields: a body with these fields inside of an object, and the path of that object."""

PLACES: dict[tuple[type[Asked], str], Place] = {
    (CompletionBody, "body"): lambda fields: (CompletionBody, {"prompt": "a", "n": 2, **fields}, ""),
    (ChatBody, "body"): lambda fields: (ChatBody, {**chat("b"), "n": 2, **fields}, ""),
    (bodies._Message, "message"): lambda fields: (ChatBody, chat("b", **fields), "messages.1."),
    (bodies._TextPart, "part"): lambda fields: (
        ChatBody,
        chat([{"type": "text", "text": "b"}, {"type": "text", "text": "", **fields}]),
        "messages.1.content.1.",
    ),
    (bodies._StreamOptions, "completion"): lambda fields: (
        CompletionBody,
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": True, **fields}},
        "stream_options.",
    ),
    (bodies._StreamOptions, "chat"): lambda fields: (
        ChatBody,
        {**chat("b"), "stream": True, "stream_options": {"include_usage": True, **fields}},
        "stream_options.",
    ),
    (bodies._ResponseFormat, "form"): lambda fields: (
        ChatBody,
        {**chat("b"), "response_format": {**schema(), **fields}},
        "response_format.",
    ),
    (bodies._JsonSchema, "schema"): lambda fields: (
        ChatBody,
        {**chat("b"), "response_format": schema(**fields)},
        "response_format.json_schema.",
    ),
}


def read_in(place: Place, fields: dict[str, Any]) -> Body:
    kind, body, _ = place(fields)
    return read(kind, json.dumps(body).encode())


def kinds() -> Iterator[type[Asked]]:
    found = [each for each in vars(bodies).values() if inspect.isclass(each) and issubclass(each, Asked)]
    return (each for each in found if each not in (Asked, Body))


def test_every_object_of_a_body_has_a_place_here() -> None:
    assert set(kinds()) == {kind for kind, _ in PLACES}


@pytest.mark.parametrize(("kind", "name"), PLACES)
def test_null_empty_and_default_values_are_as_if_absent_at_every_depth(kind: type[Asked], name: str) -> None:
    place = PLACES[kind, name]
    plain = read_in(place, {})
    given = set(json.dumps(place({})[1]).replace('"', " ").split())  # a field of the plain body asks for something
    optional = {each for each, field in kind.model_fields.items() if not field.is_required()}
    for field in {*optional, *kind.nothing, "no_such_field"} - given:
        for value in (None, "", [], {}, {"a": None}, {"a": {"b": []}}, *kind.nothing.get(field, ())):
            assert read_in(place, {field: value}) == plain, (field, value)


@pytest.mark.parametrize(("kind", "name"), PLACES)
def test_an_unknown_field_at_any_depth_is_refused_by_its_name(kind: type[Asked], name: str) -> None:
    place = PLACES[kind, name]
    for value in (0, 1, False, True, -0.5, "a", [None], [[]], {"a": False}, {"a": None, "b": 0}):
        where = place({})[2] + "no_such_field"
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
            assert refused.value.param == PLACES[kind, name]({})[2] + field


def test_false_is_no_zero_and_true_no_one() -> None:
    assert read(CompletionBody, b'{"prompt": "a", "logprobs": 0}').num_alternatives == 0
    assert read(CompletionBody, b'{"prompt": "a", "logprobs": false}').num_alternatives is None
    for text in (b'{"prompt": "a", "echo": 0}', b'{"prompt": "a", "best_of": true}', b'{"prompt": "a", "best_of": 2}'):
        with pytest.raises(BadBody):
            read(CompletionBody, text)


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@pytest.mark.parametrize("stream", [{}, {"stream": None}, {"stream": False}])
def test_options_of_a_stream_are_refused_without_one(kind: type[Body], stream: dict[str, Any]) -> None:
    asked = {"prompt": "a"} if kind is CompletionBody else chat("b")
    with pytest.raises(BadBody, match="stream_options is given and stream is not true") as refused:
        read(kind, json.dumps({**asked, **stream, "stream_options": {"include_usage": True}}).encode())
    assert refused.value.param == "stream_options"
    for options in (None, {}, {"include_usage": None}, {"include_usage": False}):
        read(kind, json.dumps({**asked, **stream, "stream_options": options}).encode())


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


def text_of(answer: Answer, *, stream: bool) -> str:
    """Return the text of an answer, whole or streamed."""
    lines = [line[6:] for line in answer.body.decode().split("\n") if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines] if stream else answer.json["choices"]
    assert all(choice["logprobs"] is None for choice in choices)
    texts = [choice if "text" in choice else choice.get("delta", choice.get("message")) for choice in choices]
    return "".join(text.get("text", text.get("content", "")) for text in texts)


@pytest.mark.parametrize("client", DEFAULTS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_defaults_of_clients_change_no_answer_whole_or_streamed(server: Server, client: str, stream: bool) -> None:
    for path, asked in ((TEXT, {"prompt": ASKED}), (CHAT, {"messages": [{"role": "user", "content": ASKED}]})):
        fields = {name: value for name, value in DEFAULTS[client].items() if path == CHAT or name not in CHAT_ALONE}
        plain, full = (server.ask(path, {**asked, **each, "temperature": 0, "stream": stream}) for each in ({}, fields))
        assert full.status == 200, full.body
        assert text_of(full, stream=stream) == text_of(plain, stream=stream)
        assert ANSWER in text_of(full, stream=stream)


def test_a_message_is_replayed_as_any_server_sent_it(server: Server) -> None:
    empty = {
        "name": "", "refusal": None, "audio": None, "function_call": None, "tool_calls": [], "annotations": [],
        "reasoning": "", "reasoning_content": "", "tool_call_id": None, "prefix": False,
    }  # fmt: skip
    said = {"role": "assistant", "content": "Mira keeps a red lamp in the cellar."}
    asked = {"role": "user", "content": ASKED}
    found = []
    for message in (said, {**said, **empty}, {**said, "content": [{"type": "text", "text": said["content"]}]}):
        answer = server.ask(CHAT, {"messages": [asked, message, asked], "temperature": 0})
        found.append(answer.json["choices"][0]["message"]["content"])
    assert found == found[:1] * 3
    for content in (None, "", []):
        assert read(ChatBody, json.dumps(chat(content)).encode()).messages[1].as_variables()["content"] == ""
    assert read(ChatBody, b'{"messages": [{"role": "assistant"}]}').messages[0].as_variables()["content"] == ""
    for message in ({"role": "user"}, {"role": "user", "content": None}, {"role": "system"}):
        with pytest.raises(BadBody, match=r"messages.0.content is missing; give a text, or a list of parts"):
            read(ChatBody, json.dumps({"messages": [message]}).encode())


# --- large bodies ---


def filled(begin: str, item: str, end: str) -> bytes:
    """Return a body of SIZE bytes of items."""
    count = (SIZE - len(begin) - len(end)) // (len(item) + 1)
    return f"{begin}{','.join([item] * count)}{end}".encode()


PARTS = ('{"messages": [{"role": "user", "content": [', "]}]}")
MESSAGES, PROMPT, ROW = ('{"messages": [', "]}"), ('{"prompt": [', "]}"), ('{"prompt": [[', "]]}")
LARGE = {
    "empty parts": filled(PARTS[0], "{}", PARTS[1]),
    "null parts": filled(PARTS[0], "null", PARTS[1]),
    "texts as parts": filled(PARTS[0], '"a"', PARTS[1]),
    "messages of null": filled(MESSAGES[0], "null", MESSAGES[1]),
    "messages without a role": filled(MESSAGES[0], '{"content":"a"}', MESSAGES[1]),
    "negative ids": filled(PROMPT[0], "-1", PROMPT[1]),
    "ids of texts": filled('{"prompt": [1,', '"a"', "]}"),
    "texts": filled(PROMPT[0], '"a"', PROMPT[1]),
    "texts of ids": filled('{"prompt": ["a",', "1", "]}"),
    "empty lists": filled(PROMPT[0], "[]", PROMPT[1]),
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
    began = time.thread_time()
    with pytest.raises(BadBody) as refused:
        read(kind_of(name), LARGE[name])
    assert time.thread_time() - began < 0.3, "0.05 s on an idle machine"
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


def test_a_prompt_is_refused_by_its_length_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, encode = Tokenizer.load(BUNDLED), Tokenizer.encode

    def short(self: Tokenizer, text: str, **options: Any) -> list[int]:
        assert len(text) < 100_000, "a long text was encoded whole"
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", short)
    words = "Otto lives " * 100_000
    for kind, asked in (
        (CompletionBody, {"prompt": words}),
        (CompletionBody, {"prompt": ["a", words]}),
        (CompletionBody, {"prompt": "[{" * 500_000}),
        (CompletionBody, {"prompt": [5] * 31}),
        (CompletionBody, {"prompt": [[5], [5] * 31]}),
        (ChatBody, chat(words)),
        (ChatBody, chat([{"type": "text", "text": "Otto lives "}] * 10_000)),
    ):
        body = read(kind, json.dumps(asked).encode())
        with pytest.raises(InvalidRequest, match=r"the prompt has .*\d tokens, the limit of this server is 30"):
            body.prompts(tokenizer, 30)
    for ids in ([5] * 30, [[5], [5] * 30]):
        assert read(CompletionBody, json.dumps({"prompt": ids}).encode()).prompts(tokenizer, 30)[-1] == [5] * 30


@pytest.mark.slow
def test_no_large_body_holds_the_health_of_a_server(server: Server) -> None:
    for name, body in LARGE.items():
        waited, ended = [0.0], []

        def watch(waited: list[float] = waited, ended: list[int] = ended) -> None:
            while not ended:
                began = time.monotonic()
                assert server.ask("/health").status == 200
                waited.append(time.monotonic() - began)
                time.sleep(0.01)

        watching = threading.Thread(target=watch)
        watching.start()
        answer = server.ask(CHAT if kind_of(name) is ChatBody else TEXT, body[: SIZE - 1])
        ended.append(1)
        watching.join()
        assert answer.status == 400, name
        assert max(waited) < 1, name  # 0.2 s on an idle machine


# --- numbers ---

NUMBERS = [
    "0", "-0.0", "1", "-1", "1e-45", "1e-310", "-1e-45", "1e300", "-1e300", "1e999", "NaN", "-Infinity", "0.5", "2.5",
    str(2**31), str(-(2**31) - 1), str(2**63), str(-(2**63) - 1), "9" * 400, "true", "false", '"1"', '""', "[1]", "{}",
]  # fmt: skip


def numeric(kind: type[Body]) -> list[str]:
    fields = {name: str(field.annotation) for name, field in kind.model_fields.items()}
    return [name for name, shown in fields.items() if "int" in shown.replace("Discriminator", "") or "float" in shown]


def test_no_number_in_any_field_is_a_failure_of_the_server(server: Server) -> None:
    for path, kind in ((TEXT, CompletionBody), (CHAT, ChatBody)):
        assert {"n", "temperature", "repetition_penalty", "priority", "seed", "logit_bias"} <= set(numeric(kind))
        for field in set(numeric(kind)) - {"prompt"}:
            for number in NUMBERS:
                value = f'{{"5": {number}}}' if field == "logit_bias" else number
                value = f"[{number}]" if field == "stop_token_ids" else value
                given = {"prompt": '"a b"'} if path == TEXT else {"messages": '[{"role": "user", "content": "a"}]'}
                given |= {"max_tokens": "2", field: value}
                body = "{" + ",".join(f'"{name}": {text}' for name, text in given.items()) + "}"
                answer = server.ask(path, body.encode())
                assert answer.status in (200, 400), (field, number, answer.body)
                if answer.status == 400:
                    named = field.replace("completion_", "")  # both of a chat are one limit
                    assert field in answer.error["message"] or named in answer.error["message"], (field, number)


def test_a_part_that_is_no_text_is_refused_by_its_type() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with pytest.raises(BadBody, match=r"messages.0.content must be a text, or a list of parts"):
        read(ChatBody, json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode())
