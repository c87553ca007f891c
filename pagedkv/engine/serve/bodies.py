"""Bodies: the JSON of OpenAI's completions and chat completions, checked, as prompts and SamplingParams. No HTTP.

One law holds for each object of a body, at any depth (Asked): a field that is null, empty or at its default is as if
absent, and another field that pagedkv does not know is refused by its name. Ranges of sampling parameters are those of
SamplingParams.

The first mistake ends the reading, because a body of 4 MiB has room for a million of them: lists fail fast, and the
type of a value says which of several forms is read. Lists have limits because the stepping thread looks through them
for each token.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json, to_json

from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from pagedkv.engine.checkpoint.tokenizer import Tokenizer

Values = dict[str, tuple[Any, ...]]

NOTHING: Final[Values] = {
    "best_of": (1,),
    "detokenize": (True,),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logprobs": (False,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "num_beams": (1,),
    "repeat_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "stream_reasoning": (True,),
    "tfs_z": (1,),
    "tool_choice": ("none", "auto"),
    "top_a": (0,),
    "top_k": (-1,),
    "top_logprobs": (0,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
"""Values that ask for nothing, of fields of OpenAI, vLLM, SGLang and llama.cpp: clients send their defaults."""

IGNORED: Final = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key parallel_tool_calls".split()
)
"""Fields that change no answer."""

RETENTION: Final = {"24h": 86400.0, "1h": 3600.0, "5m": 300.0}
"""Seconds of `prompt_cache_retention` and of the `ttl` of `cache_control`."""

SAMPLING: Final = (
    "temperature top_p top_k min_p repetition_penalty frequency_penalty presence_penalty logit_bias seed min_tokens "
    "ignore_eos skip_special_tokens"
).split()
"""Fields that are also fields of SamplingParams."""

COMPLETION_TOKENS: Final = 16
"""The max_tokens of a completion that names none, as in OpenAI's API reference. A chat has the rest of the context."""

MOST_SCHEMA: Final = 2**16
"""Bytes of a JSON schema. One of 3,000 fields with patterns, 167,000, held each step up for 0.2 s on a core."""

MOST_BIASES: Final = 1024

MOST_IDS: Final = 2**17
"""Token ids of a text to make. Their decoder holds the interpreter, 0.1 s for as many."""

MOST_OBJECTS: Final = 2**17
"""Lists and objects of a body. Two million in 4 MiB held the interpreter for 1 s: Python's collector visits each."""

_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)

MUST: Final = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text of at most 256 characters, or a list of at most 16",
    "content": 'a text, or a list of parts {"type": "text", "text": "..."}',
}
"""In words, the fields that have several forms."""

_PLAIN: Final = {
    r"^\w+ should": "it must",
    "a valid integer": "an integer",
    "a valid dictionary": "an object",
    " valid ": " ",
    " after validation, not .*": "",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}
"""Phrases of pydantic, and those that a client reads."""

TEXT, LIST, IDS, ROWS = FORMS = ("<text>", "<list>", "<list of ids>", "<list of lists>")
"""The forms of a value, as they stand in the path of an error of pydantic."""


def _form(value: object) -> str:
    if not isinstance(value, list):
        return TEXT
    first = value[0] if value else None
    return IDS if isinstance(first, int) else ROWS if isinstance(first, list) else LIST


def _check_biases(value: object) -> object:
    """Raise for too many biases before one of them is read: a dict of pydantic does not fail fast."""
    if isinstance(value, dict) and len(value) > MOST_BIASES:
        raise PydanticCustomError("too_long", f"Input should have at most {MOST_BIASES:,} entries")
    return value


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Raise for a schema that would take a step's time to compile."""
    if (size := len(to_json(schema))) > MOST_SCHEMA:
        raise PydanticCustomError("too_long", f"the schema has {size:,} bytes, the limit is {MOST_SCHEMA:,}")
    return schema


Stop = Annotated[str, Field(max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class BadBody(InvalidRequest):
    """Raised for a body that cannot be used. param: the field, or None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param: str | None = param


class Asked(BaseModel, strict=True, allow_inf_nan=False, protected_namespaces=()):
    """An object of a body, of which only what asks for something is read.

    kind: the only `type` of such an object, if it has one. Another type is refused before its fields.
    nothing: values that are as if absent, by field, besides null and empty ones. A field that no model has and that is
        named here may have these values only.
    ignored: fields that may have any value.
    """

    kind: ClassVar[str] = ""
    nothing: ClassVar[Values] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _only_what_asks(cls, given: Any) -> Any:
        """Return the fields that ask for something. Raises: PydanticCustomError for the first unknown one"""
        if not isinstance(given, dict):
            return given
        if cls.kind and given.get("type", cls.kind) != cls.kind:
            raise PydanticCustomError("kind", f"Input should have the type {cls.kind}")
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        asked = {}
        for name, value in given.items():
            field = fields.get(name)
            if field is None or not field.is_required():
                if name in cls.ignored or _is_nothing(value, cls.nothing.get(name, ())):
                    continue
                if field is None:
                    raise PydanticCustomError("unknown", "unknown", {"name": name, "known": sorted(fields)})
            asked[name] = value
        return asked


class _CacheControl(Asked):
    """The time for which the pages of a prompt are retained, as in Anthropic's API."""

    kind: ClassVar[str] = "ephemeral"

    type: Annotated[str, Field(pattern="^ephemeral$")]
    ttl: Annotated[str, Field(pattern="^(5m|1h)$")] = "5m"


class _StreamOptions(Asked):
    """Options of a stream."""

    nothing: ClassVar[Values] = {"continuous_usage_stats": (False,), "include_usage": (False,)}
    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})  # padding of events, true by default

    include_usage: bool | None = None


class Body(Asked):
    """The fields that completions and chats have in common, and those of SamplingParams that OpenAI does not have."""

    nothing: ClassVar[Values] = NOTHING
    ignored: ClassVar[frozenset[str]] = IGNORED

    model: str | None = None
    max_tokens: int | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    stop: (
        Annotated[
            Annotated[Stop, Tag(TEXT)] | Annotated[list[Stop], Field(max_length=16, fail_fast=True), Tag(LIST)],
            Discriminator(_form),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_check_biases)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    explain_cache: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_cache_retention: Annotated[str, Field(pattern="^(in_memory|in-memory|24h)$")] | None = None
    cache_control: _CacheControl | None = None

    @property
    def retain_s(self) -> float:
        """Seconds for which the pages are retained after the answer; 0 for none."""
        return max(RETENTION.get(self.prompt_cache_retention or "", 0.0), *map(_seconds, (None, *self.cache_controls)))

    @property
    def cache_controls(self) -> list[_CacheControl | None]:
        """The objects of that name in the body and in its parts."""
        return [self.cache_control]

    @property
    def num_alternatives(self) -> int | None:
        """The number of likeliest tokens to tell at each place; None for no log-probabilities."""
        return None

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of output; None for all that fit."""
        return self.max_tokens

    def prompts(self, tokenizer: Tokenizer, most: int) -> list[list[int]]:
        """Return the token ids of each prompt, at most `most`. Raises: InvalidRequest, CheckpointError"""
        raise NotImplementedError

    def shape(self) -> dict[str, Any]:
        """Return the fields of SamplingParams that only one kind of body has."""
        return {}

    def params(self, most: int) -> SamplingParams:
        """Return the sampling parameters. most: the tokens that fit behind the prompt. Raises: InvalidRequest"""
        given = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        if self.seed is not None:
            given["seed"] = self.seed % 2**63  # OpenAI takes negative ones
        ends: dict[str, Any] = {"max_tokens": most if self.most_tokens is None else self.most_tokens}
        ends |= {"stop": () if self.stop is None else self.stop, "stop_ids": self.stop_token_ids or ()}
        ends["include_stop"] = bool(self.include_stop_str_in_output)
        return SamplingParams(**{"temperature": 1.0, **given, **self.shape(), **ends}, logprobs=self.num_alternatives)


class CompletionBody(Body):
    """The body of POST /v1/completions."""

    nothing: ClassVar[Values] = {**NOTHING, "add_special_tokens": (True,)}

    prompt: Annotated[
        Annotated[str, Tag(TEXT)]
        | Annotated[list[str], Field(min_length=1, max_length=256, fail_fast=True), Tag(LIST)]
        | Annotated[Ids, Tag(IDS)]
        | Annotated[list[Ids], Field(max_length=256, fail_fast=True), Tag(ROWS)],
        Discriminator(_form),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None

    @property
    def num_alternatives(self) -> int | None:
        """The number of likeliest tokens to tell at each place; None for no log-probabilities."""
        return self.logprobs

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of output."""
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self, tokenizer: Tokenizer, most: int) -> list[list[int]]:
        """Return the token ids of each prompt; OpenAI's rules make a list of ids one prompt."""
        given: Any = self.prompt if _form(self.prompt) in (LIST, ROWS) else [self.prompt]
        for each in given:
            _check_length(each, tokenizer, most)
        prompts = [tokenizer.encode(each) if isinstance(each, str) else each for each in given]
        for each in prompts:
            _check_length(each, tokenizer, most)
        return prompts

    def shape(self) -> dict[str, Any]:
        """Return the fields of SamplingParams that only one kind of body has."""
        is_scored = self.echo and (self.logprobs is not None or self.max_tokens == 0)
        return {"prompt_logprobs": self.logprobs or 0} if is_scored else {}


class _TextPart(Asked):
    """A part of a message; parts that are no text are refused by its type."""

    kind: ClassVar[str] = "text"

    type: Annotated[str, Field(pattern="^text$")]
    text: str
    cache_control: _CacheControl | None = None


class _Message(Asked):
    """A message of a chat. Other fields that say something are refused: a template would lose them in silence."""

    nothing: ClassVar[Values] = {"prefix": (False,)}

    role: Annotated[str, Field(max_length=64)]
    content: (
        Annotated[
            Annotated[str, Tag(TEXT)] | Annotated[list[_TextPart], Field(fail_fast=True), Tag(LIST)],
            Discriminator(_form),
        ]
        | None
    ) = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_content(cls, given: Any) -> Any:
        """Raise for a missing content. A message of the assistant needs none: servers send none with tool calls."""
        if isinstance(given, dict) and given.get("role", "assistant") != "assistant" and given.get("content") is None:
            raise PydanticCustomError("no_content", "no content")
        return given

    def as_variables(self) -> dict[str, Any]:
        """Return the message as a chat template reads it: the text parts are joined."""
        parts = self.content if isinstance(self.content, list) else []
        content = "".join(part.text for part in parts) if isinstance(self.content, list) else self.content
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content or "", **named}


class _JsonSchema(Asked):
    """The schema of a response_format. The text always follows it strictly, whatever its name is."""

    ignored: ClassVar[frozenset[str]] = frozenset({"name", "description", "strict"})

    schema_: Annotated[dict[str, Any], AfterValidator(_check_schema), Field(alias="schema")]


class _ResponseFormat(Asked):
    """The form of the text: any text, a JSON object, or JSON that follows a schema."""

    type: Annotated[str, Field(pattern="^(text|json_object|json_schema)$")]
    json_schema: _JsonSchema | None = None


_Messages = Annotated[list[_Message], Field(min_length=1, fail_fast=True)]


class _Rendered(Asked):
    """The fields of a chat, and of a request for its tokens, that make its text."""

    messages: _Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def text(self, tokenizer: Tokenizer) -> str:
        """Return the messages in the checkpoint's chat template. Raises: InvalidRequest, CheckpointError"""
        variables, messages = self.chat_template_kwargs or {}, self.messages or []
        if taken := {"messages", "self", "continues"} & set(variables):
            raise BadBody(f"chat_template_kwargs has {min(taken)}, a name that is taken", "chat_template_kwargs")
        continues = bool(self.continue_final_message)
        if continues and messages[-1].role != "assistant":
            raise BadBody(
                f"continue_final_message is true and the last message is of {_shown(messages[-1].role)}; "
                "end with a message of the assistant",
                "continue_final_message",
            )
        variables = {"add_generation_prompt": self.add_generation_prompt is not False, **variables}
        return tokenizer.render_chat([message.as_variables() for message in messages], continues=continues, **variables)


class ChatBody(_Rendered, Body):
    """The body of POST /v1/chat/completions."""

    nothing: ClassVar[Values] = {
        **NOTHING,
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "continue_final_message": (False,),
    }

    messages: _Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: _ResponseFormat | None = None

    @property
    def num_alternatives(self) -> int | None:
        """The number of likeliest tokens to tell at each place; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of output; None for all that fit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def cache_controls(self) -> list[_CacheControl | None]:
        """The objects of that name in the body, and in the text parts of its messages."""
        contents = [message.content for message in self.messages if isinstance(message.content, list)]
        return [self.cache_control, *(part.cache_control for parts in contents for part in parts)]

    def prompts(self, tokenizer: Tokenizer, most: int) -> list[list[int]]:
        """Return the token ids of the messages in the checkpoint's chat template."""
        text = self.text(tokenizer)
        _check_length(text, tokenizer, most)
        ids = tokenizer.encode(text, special_tokens=False)
        _check_length(ids, tokenizer, most)
        return [ids]

    def shape(self) -> dict[str, Any]:
        """Return the fields of SamplingParams that only one kind of body has."""
        asked = self.response_format
        if asked is not None and asked.type != "json_schema" and asked.json_schema is not None:
            raise BadBody(f"response_format has a json_schema and the type {asked.type}; drop one", "response_format")
        if asked is None or asked.type == "text":
            return {}
        if asked.type == "json_object":
            return {"json_schema": {"type": "object"}}
        if asked.json_schema is None:
            raise BadBody("response_format has the type json_schema and no json_schema; give one", "response_format")
        return {"json_schema": asked.json_schema.schema_}


class _TokenizeBody(_Rendered):
    """The body of POST /tokenize, with a prompt or messages."""

    nothing: ClassVar[Values] = {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "return_token_strs": (False,),
    }

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Return the token ids; special tokens are added to a prompt unless refused, to messages if asked for."""
        if (self.prompt is None) == (self.messages is None):
            raise BadBody("the body has both prompt and messages, or neither; give one of them", "prompt")
        if self.prompt is not None:
            return tokenizer.encode(self.prompt, special_tokens=self.add_special_tokens is not False)
        return tokenizer.encode(self.text(tokenizer), special_tokens=bool(self.add_special_tokens))


class _DetokenizeBody(Asked):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MOST_IDS, fail_fast=True)]


AnyBody = TypeVar("AnyBody", bound=Asked)


def read(kind: type[AnyBody], data: bytes) -> AnyBody:
    """Return a body from its bytes. Raises: BadBody for other JSON, or a field that pagedkv cannot do justice to"""
    _check_number(data)
    try:
        body = kind.model_validate(from_json(data))
    except ValidationError as error:
        raise _in_words(error.errors(include_url=False)[0]) from None
    except ValueError as error:
        raise BadBody(f"the body is not JSON: {error}; send a JSON object") from None
    if isinstance(body, ChatBody) and body.top_logprobs is not None and not body.logprobs:
        raise BadBody("top_logprobs is given and logprobs is not true; give both", "top_logprobs")
    if (
        isinstance(body, Body)
        and body.stream_options is not None
        and body.stream_options.include_usage
        and not body.stream
    ):
        raise BadBody("stream_options is given and stream is not true; give both", "stream_options")
    return body


def _seconds(control: _CacheControl | None) -> float:
    return 0.0 if control is None else RETENTION[control.ttl]


def _check_number(data: bytes) -> None:
    """Raise BadBody for too many lists and objects. A bracket inside of a string is text."""
    if _num_opened(data) > MOST_OBJECTS and (number := _num_opened(_STRING.sub(b"", data))) > MOST_OBJECTS:
        raise BadBody(f"the body has {number:,} lists and objects, the limit is {MOST_OBJECTS:,}; send fewer")


def _num_opened(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def _is_nothing(value: object, harmless: tuple[Any, ...]) -> bool:
    """Return whether a value of a field that may be left out is null, empty or one of `harmless`.

    An object is empty if all of its fields are nothing.
    """
    if isinstance(value, dict):
        value = {name: each for name, each in value.items() if not _is_nothing(each, ())}
    if value is None or (isinstance(value, str | list | dict) and not value):
        return True
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless)


def _check_length(prompt: str | list[int], tokenizer: Tokenizer, most: int) -> None:
    """Raise InvalidRequest for too many tokens: of a text, before it is encoded, if its length alone says so."""
    is_text = isinstance(prompt, str)
    size = tokenizer.min_tokens(prompt) if isinstance(prompt, str) else len(prompt)
    if size > most:
        raise InvalidRequest(
            f"the prompt has {'at least ' * is_text}{size} tokens, the limit of this server is {most}; shorten it"
        )


def _in_words(error: ErrorDetails) -> BadBody:
    """Return the error of pydantic as one sentence about one field."""
    path = [str(part) for part in error["loc"] if part not in FORMS] + ["content"] * (error["type"] == "no_content")
    where, context = ".".join(path), error.get("ctx", {})
    if error["type"] == "unknown":
        name = context["name"]
        shown = ".".join([*path, _shown(name)])
        return BadBody(
            f"{shown} is not supported, and the answer would not be what it asks for; leave it out. "
            f"Supported: {', '.join(context['known'])}",
            ".".join([*path, name[:80]]),
        )
    if not path:
        return BadBody("the body is JSON, but no object; send a JSON object")
    if error["type"] in ("missing", "no_content"):
        return BadBody(f"{where} is missing; give {MUST.get(path[-1], 'it')}", where)
    for number, part in enumerate(path):
        if part in MUST:  # the error is about one of several forms
            where = ".".join(path[: number + 1])
            return BadBody(f"{where} must be {MUST[part]}", where)
    must = "Input should be an object" if error["type"] == "model_type" else error["msg"]
    for pattern, words in _PLAIN.items():
        must = re.sub(pattern, words, must)
    return BadBody(f"{_cut(where)} is {_shown(error['input'])}; {must}", _cut(where))


def _shown(value: object) -> str:
    """Return a value in at most 80 characters, and in a time that its size does not lengthen."""
    if isinstance(value, list | dict) and value:
        return f"a list of {len(value):,}" if isinstance(value, list) else f"an object of {len(value):,} fields"
    return _cut(repr(_cut(value) if isinstance(value, str) else value))


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
