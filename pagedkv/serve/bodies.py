"""Bodies: the JSON of OpenAI's completions and chat completions, checked, as prompts and SamplingParams. No HTTP.

A field that would change the answer and that pagedkv does not know is refused, unless its value asks for nothing
(NEUTRAL, or null). IGNORED fields change no answer. Ranges of sampling parameters are those of SamplingParams.

Lists have limits because the stepping thread looks through them for each token.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from pydantic import BaseModel, Field, ValidationError

from pagedkv.errors import InvalidRequest
from pagedkv.sampling.params import SamplingParams

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from pagedkv.checkpoint.tokenizer import Tokenizer

IGNORED: Final = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "parallel_tool_calls".split()
)
"""Fields that change no answer."""

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Fields of OpenAI that pagedkv does not know, and values of them that ask for nothing."""

SAMPLING: Final = (
    "temperature top_p top_k min_p repetition_penalty frequency_penalty presence_penalty logit_bias seed min_tokens "
    "ignore_eos"
).split()
"""Fields that are also fields of SamplingParams."""

COMPLETION_TOKENS: Final = 16
"""The max_tokens of a completion that names none, as in OpenAI's API reference. A chat has the rest of the context."""

MOST_SCHEMA: Final = 2**16
"""Characters of a JSON schema. One of 3,000 fields with patterns, 167,000, held each step up for 0.2 s on a core."""

MUST: Final = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text of at most 256 characters, or a list of at most 16",
    "content": 'a text, or a list of parts {"type": "text", "text": "..."}',
}
"""In words, the fields that have several forms."""

Stop = Annotated[str, Field(max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class BadBody(InvalidRequest):
    """Raised for a body that cannot be used. param: the field, or None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param: str | None = param


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool | None = None


class Body(BaseModel, extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=()):
    """The fields that completions and chats have in common, and those of SamplingParams that OpenAI does not have."""

    model: str | None = None
    max_tokens: int | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None

    @property
    def num_drawn(self) -> int:
        """The outputs that are drawn for each prompt."""
        return self.n or 1

    @property
    def num_alternatives(self) -> int | None:
        """The number of likeliest tokens to tell at each place; None for no log-probabilities."""
        return None

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of output; None for all that fit."""
        return self.max_tokens

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Return the token ids of each prompt. Raises: InvalidRequest, CheckpointError"""
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
        return SamplingParams(**{"temperature": 1.0, **given, **self.shape(), **ends}, logprobs=self.num_alternatives)


class CompletionBody(Body):
    """The body of POST /v1/completions."""

    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=256)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=256)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def num_drawn(self) -> int:
        """The outputs that are drawn for each prompt."""
        return max(super().num_drawn, self.best_of or 1)

    @property
    def num_alternatives(self) -> int | None:
        """The number of likeliest tokens to tell at each place; None for no log-probabilities."""
        return self.logprobs

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of output."""
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def shape(self) -> dict[str, Any]:
        """Return the fields of SamplingParams that only one kind of body has."""
        best_of, num_samples = self.best_of or 1, self.n or 1
        if best_of == 1:
            return {}
        if best_of < num_samples:
            raise BadBody(f"best_of is {best_of} and n is {num_samples}; give n <= best_of", "best_of")
        if self.stream and best_of > num_samples:
            raise BadBody(f"best_of is {best_of} with stream: the best is known at the end; drop stream", "best_of")
        return {"best_of": best_of}

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Return the token ids of each prompt; OpenAI's rules make a list of ids one prompt."""
        given: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if isinstance(given[0], int):
            return [given]
        return [tokenizer.encode(each) if isinstance(each, str) else each for each in given]


class TextPart(BaseModel, strict=True):
    """A part of a message; parts that are no text are refused by its type."""

    type: Annotated[str, Field(pattern="^text$")]
    text: str


class Message(BaseModel, extra="allow", strict=True):
    """A message of a chat. Fields beside these, but null, are refused: a template would lose them in silence."""

    role: Annotated[str, Field(max_length=64)]
    content: str | list[TextPart] | None
    name: str | None = None

    def as_variables(self) -> dict[str, Any]:
        """Return the message as a chat template reads it: the text parts are joined."""
        parts = self.content if isinstance(self.content, list) else []
        content = "".join(part.text for part in parts) if isinstance(self.content, list) else self.content
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content or "", **named}


class JsonSchema(BaseModel, strict=True):
    """The schema of a response_format."""

    name: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(BaseModel, strict=True):
    """The form of the text: any text, a JSON object, or JSON that follows a schema."""

    type: Annotated[str, Field(pattern="^(text|json_object|json_schema)$")]
    json_schema: JsonSchema | None = None


class ChatBody(Body):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def num_alternatives(self) -> int | None:
        """The number of likeliest tokens to tell at each place; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of output; None for all that fit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Return the token ids of the messages in the checkpoint's chat template."""
        for number, message in enumerate(self.messages):
            _refuse_unknown(message, f"messages.{number}.")
        variables = self.chat_template_kwargs or {}
        if taken := {"messages", "self"} & set(variables):
            raise BadBody(f"chat_template_kwargs has {min(taken)}, a name that is taken", "chat_template_kwargs")
        text = tokenizer.render_chat([message.as_variables() for message in self.messages], **variables)
        return [tokenizer.encode(text, special_tokens=False)]

    def shape(self) -> dict[str, Any]:
        """Return the fields of SamplingParams that only one kind of body has."""
        asked = self.response_format
        if asked is None or asked.type == "text":
            return {}
        if asked.type == "json_object":
            return {"json_schema": {"type": "object"}}
        if asked.json_schema is None:
            raise BadBody("response_format has the type json_schema and no json_schema; give one", "response_format")
        schema = asked.json_schema.schema_
        if (size := len(json.dumps(schema))) > MOST_SCHEMA:
            raise BadBody(f"the schema has {size:,} characters, the limit is {MOST_SCHEMA:,}", "response_format")
        return {"json_schema": schema}


AnyBody = TypeVar("AnyBody", bound=Body)


def read(kind: type[AnyBody], data: bytes) -> AnyBody:
    """Return a body from its bytes. Raises: BadBody for other JSON, or a field that pagedkv cannot do justice to"""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _in_words(error.errors(include_url=False)[0]) from None
    _refuse_unknown(body)
    if isinstance(body, ChatBody) and body.top_logprobs is not None and not body.logprobs:
        raise BadBody("top_logprobs is given and logprobs is not true; give both", "top_logprobs")
    return body


def _refuse_unknown(given: BaseModel, where: str = "") -> None:
    """Raise BadBody for a field beside those of the model, unless it changes no answer."""
    for name, value in (given.model_extra or {}).items():
        if value is None or name in IGNORED or any(value == harmless for harmless in NEUTRAL.get(name, ())):
            continue
        known = ", ".join(sorted(type(given).model_fields))
        raise BadBody(
            f"{where}{_shown(name)} is not supported, and the answer would not be what it asks for; leave it out. "
            f"Supported: {known}",
            where + name,
        )


def _in_words(error: ErrorDetails) -> BadBody:
    """Return the error of pydantic as one sentence about one field."""
    path = [str(part) for part in error["loc"]]
    if error["type"] == "json_invalid":
        return BadBody(f"the body is not JSON: {error['ctx']['error']}; send a JSON object")
    if not path:
        return BadBody("the body is JSON, but no object; send a JSON object")
    named = [part for part in path if part in MUST]
    if error["type"] == "missing":
        return BadBody(f"{'.'.join(path)} is missing; give {MUST.get(path[-1], 'it')}", ".".join(path))
    if named:  # the error is about one of several forms
        until = path.index(named[0]) + 1
        return BadBody(f"{'.'.join(path[:until])} must be {MUST[named[0]]}", ".".join(path[:until]))
    return BadBody(f"{'.'.join(path)} is {_shown(error['input'])}: {error['msg']}", ".".join(path))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
