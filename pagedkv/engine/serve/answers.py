"""Answers: completions as the JSON of OpenAI, whole or in chunks, and errors. Knows requests and tokens; no HTTP.

    whole     {"id", "object", "created", "model", "choices": [choice ..], "usage"}
    chunks    the same object for each piece, one choice each, then usage with no choice if it was asked for

The choices of several prompts follow one another: sample s of prompt p of n samples each is choice p * n + s.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pagedkv.engine.checkpoint.tokenizer import TextStream, Tokenizer
    from pagedkv.engine.requests.request import Completion, Request
    from pagedkv.engine.sampling.sampler import TokenLogprobs
    from pagedkv.engine.serve.streaming import Piece

    Entries = Iterable[tuple[int, TokenLogprobs | None]]


def _usage(requests: Sequence[Request]) -> dict[str, Any]:
    """Return the tokens of all requests; those of a prompt count once for all of its samples."""
    prompt = sum(len(request.prompt_ids) for request in requests)
    made = sum(len(completion.token_ids) for request in requests for completion in request.completions)
    cached = sum(request.completions[0].cached_tokens for request in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


_IN_LINE: Final = 4
"""Receipts in the line of an answer: proxies limit the bytes of a header."""


def receipts(requests: Sequence[Request]) -> tuple[Any, str]:
    """Return the receipts of requests, of several as a list, and the first of them as one line.

    Clients without keys and salts are one tenant. They learn no token of one another, nor where in a page it is.
    """
    told: list[tuple[Any, float]] = []
    for request in requests:
        receipt, seconds = request.completions[0].receipt, request.completions[0].latency.prefill_s
        is_alone = bool(request.tenant or request.salt)
        told.append((receipt if receipt is None or is_alone else receipt.coarse, seconds))
    whole = [None if receipt is None else receipt.as_dict(seconds) for receipt, seconds in told]
    lines = ["not admitted yet" if receipt is None else str(receipt) for receipt, _ in told]
    more = [f"and {len(lines) - _IN_LINE} more"] if len(lines) > _IN_LINE else []
    return whole[0] if len(whole) == 1 else whole, " | ".join([*lines[:_IN_LINE], *more])


def error(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in the form of OpenAI."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event with JSON."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class TokenTexts:
    """The texts of single tokens. A token has no text alone if it holds a part of a character only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Decoders drop the space of a first token, so each token is decoded behind a word.
        texts = ((i, tokenizer.decode([i])) for i in range(tokenizer.vocab_size))
        self._before, self._length = next((([i], len(text)) for i, text in texts if text.isalnum()), ([], 0))
        self.of: Callable[[int], str] = lru_cache(4096)(self._of)

    def stream(self, request: Request, *, is_echo: bool) -> TextStream:
        """Return a stream of the text behind the prompt of a request, or of the prompt and what is behind it."""
        prompt, skips = () if is_echo else request.prompt_ids, request.params.skip_special_tokens
        return self._tokenizer.stream(prompt, skip_special_tokens=skips)

    def of_prompt(self, request: Request) -> str:
        """Return the text of the prompt."""
        return self._tokenizer.decode(request.prompt_ids, skip_special_tokens=request.params.skip_special_tokens)

    def _of(self, token: int) -> str:
        """Return the text of a token; a special token as it is written. Call it as `of`, which remembers texts."""
        if token in self._tokenizer.special_ids:
            return self._tokenizer.raw.id_to_token(token) or ""
        return self._tokenizer.decode([*self._before, token])[self._length :]


@dataclass
class _Place:
    """The place of a completion's next token in its text.

    is_begin: whether the decoder drops the space of that token, as at the begin of a text
    """

    stream: TextStream
    num_characters: int = 0
    is_begin: bool = True

    def take(self, token: int, text: str) -> tuple[str, int]:
        """Go behind a token; return the text that it has here, and where that begins.

        A part of a character begins where the character does.
        """
        piece, before = self.stream.push(token), self.num_characters
        self.num_characters += len(piece)
        self.is_begin = self.is_begin and text.startswith(" ") and piece == text[1:]
        text = text[self.is_begin :]
        return text, max(before, self.num_characters - len(text))


def _chat_logprobs(entries: Entries, texts: TokenTexts, place: _Place) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for token, told in entries:
        assert told is not None, "only the first token of an echo has no log-probability, and a chat has no echo"
        text, _ = place.take(token, texts.of(token))
        top = [_entry(_here(texts.of(other), place), logprob) for other, logprob in told.top]
        content.append({**_entry(text, told.logprob), "top_logprobs": top})
        place.is_begin = False
    return {"content": content, "refusal": None}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _here(text: str, place: _Place) -> str:
    """Return the text that another token has in place of the one that was taken."""
    return text.removeprefix(" ") if place.is_begin else text


def _text_logprobs(entries: Entries, texts: TokenTexts, place: _Place) -> dict[str, Any]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    told: dict[str, Any] = {name: [] for name in names}
    for token, each in entries:
        text, offset = place.take(token, texts.of(token))
        owners: dict[str, int] = {text: token}
        top: dict[str, float] = {}
        for other, logprob in each.top if each else ():
            key = _here(texts.of(other), place)
            # one token has the text as its key: the drawn one, or else the likeliest
            top[key if owners.setdefault(key, other) == other else f"token_id:{other}"] = logprob
        shown = (each.logprob, top) if each else (None, None)
        for name, value in zip(names, (text, *shown, offset), strict=True):
            told[name].append(value)
        place.is_begin = False
    return told


@dataclass
class Answer:
    """The answer to one body, of a chat or not; `chunk` remembers how far each completion was told.

    is_echo: whether each text begins with that of its prompt.
    """

    model: str
    is_chat: bool
    num_samples: int
    has_logprobs: bool
    texts: TokenTexts
    explains: bool = False
    is_echo: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    _told: dict[Completion, int] = field(default_factory=dict)
    _places: dict[Completion, _Place] = field(default_factory=dict)
    _echoed: set[Completion] = field(default_factory=set)

    def whole(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Return the object of finished requests."""
        choices = [
            self._choice(prompt, completion, completion.text, 0, len(completion.token_ids), completion.finish_reason)
            for prompt, request in enumerate(requests)
            for completion in request.completions
        ]
        return {**self._head("chat.completion"), "choices": choices, **self._behind(requests)}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Return the object of one piece."""
        completion, first = piece.completion, self._told.get(piece.completion, -1)
        self._told[completion] = piece.num_tokens
        choice = self._choice(
            piece.prompt, completion, piece.text, max(0, first), piece.num_tokens, piece.finish_reason or None
        )
        if self.is_chat:
            delta = {"content": piece.text} if piece.text else {}
            choice["delta"] = {"role": "assistant", "content": "", **delta} if first < 0 else delta
            del choice["message"]
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def last(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Return the object behind all pieces, with the usage and no choice."""
        return {**self._head("chat.completion.chunk"), "choices": [], **self._behind(requests)}

    def _behind(self, requests: Sequence[Request]) -> dict[str, Any]:
        told: dict[str, Any] = {"usage": _usage(requests)}
        return told | {"cache_receipt": receipts(requests)[0]} if self.explains else told

    def _head(self, kind: str) -> dict[str, Any]:
        prefix, kind = ("chatcmpl", kind) if self.is_chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(
        self, prompt: int, completion: Completion, text: str, first: int, last: int, reason: str | None
    ) -> dict[str, Any]:
        echoed = self.is_echo and completion not in self._echoed
        if echoed:
            self._echoed.add(completion)
            text = self.texts.of_prompt(completion.request) + text
        shown: dict[str, Any] = {"text": text}
        if self.is_chat:
            shown = {"message": {"role": "assistant", "content": text, "refusal": None}}
        told: dict[str, Any] | None = None
        if self.has_logprobs:
            request = completion.request
            if completion not in self._places:
                self._places[completion] = _Place(self.texts.stream(request, is_echo=self.is_echo))
            of = _chat_logprobs if self.is_chat else _text_logprobs
            entries: Entries = zip(completion.token_ids[first:last], completion.logprobs[first:last], strict=True)
            if echoed:
                # A request that failed has fewer.
                entries = chain(zip(request.prompt_ids, request.prompt_logprobs, strict=False), entries)
            told = of(entries, self.texts, self._places[completion])
        index = prompt * self.num_samples + completion.index
        return {"index": index, **shown, "logprobs": told, "finish_reason": reason}
