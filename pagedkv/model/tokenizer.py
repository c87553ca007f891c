"""Text to token ids and back: tokenizer.json, the chat template, the end tokens, and text that grows as tokens arrive. No tensors.

Files read, all of one Hugging Face folder: tokenizer.json, which must be there; tokenizer_config.json, chat_template.jinja,
generation_config.json and config.json, which may lack.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from tokenizers import Tokenizer as RawTokenizer

from pagedkv.errors import CheckpointError, InvalidRequest
from pagedkv.model.config import read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from jinja2 import Template

REPLACEMENT: Final = "\ufffd"
"""What a decoder shows in place of bytes that are no character, or not yet one."""


class Tokenizer:
    """The tokenizer of a checkpoint.

    eos_ids: tokens that end a text (of generation_config.json, else config.json, and the tokenizer's own).
    bos_id:  the token that begins one, or None.
    """

    def __init__(self, raw: RawTokenizer, *, config: dict[str, Any] | None = None, eos_ids: Iterable[int] = ()) -> None:
        self.raw: RawTokenizer = raw
        self.config: dict[str, Any] = config or {}
        own = self._id_of("eos_token")
        self.eos_ids: frozenset[int] = frozenset((*eos_ids, *(() if own is None else (own,))))
        self.bos_id: int | None = self._id_of("bos_token")
        self.special_ids: frozenset[int] = frozenset(
            i for i, token in raw.get_added_tokens_decoder().items() if token.special
        )
        self._template: Template | None = None

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face folder.

        Raises: CheckpointError if tokenizer.json is missing or damaged, or another file is not what its name says.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json; save the tokenizer in the fast format (tokenizer.model is not read)"
            )
        try:
            raw = RawTokenizer.from_file(str(path))
        except Exception as why:  # the library raises bare Exception
            raise CheckpointError(
                f"{path} is no tokenizer ({why}); it is truncated or not the real file. Fetch it again"
            ) from None
        config = _read_if_there(folder / "tokenizer_config.json")
        if (folder / "chat_template.jinja").is_file():
            config["chat_template"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(raw, config=config, eos_ids=_eos_ids(folder))

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included; a model may have rows for more."""
        return self.raw.get_vocab_size()

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. special_tokens: with what the tokenizer puts around a text; a rendered chat has it already.

        Raises: InvalidRequest if half of a surrogate pair stands alone: that is no text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as why:
            raise InvalidRequest(
                f"character {why.start} of the text is {text[why.start]!r}, half of a surrogate pair; give valid Unicode"
            ) from None
        return list(self.raw.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids that are no token of the tokenizer say nothing."""
        return self.raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A stream that turns tokens into text as they arrive."""
        return TextStream(self, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text that the chat template makes of `messages`, each {"role": ..., "content": ...}; encode it without special tokens.

        Raises: InvalidRequest if there is no template, or it refuses the messages; CheckpointError if it is not valid.
        """
        from jinja2 import TemplateError

        self._template = self._template or _compile(self._chat_template())
        known = {
            name: self._text_of(name)
            for name in self.config
            if name.endswith("_token") and self._text_of(name) is not None
        }
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**known, **variables},
            )
        except (TemplateError, TypeError) as why:
            raise InvalidRequest(f"the checkpoint's chat template refuses these messages: {why}") from None

    def _chat_template(self) -> str:
        template = self.config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {part.get("name"): part.get("template") for part in template if isinstance(part, dict)}.get(
                "default"
            )
        if not isinstance(template, str):
            raise InvalidRequest(
                "this checkpoint has no chat template; give plain text, or a checkpoint tuned for chat"
            )
        return template

    def _text_of(self, name: str) -> str | None:
        token = self.config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None

    def _id_of(self, name: str) -> int | None:
        text = self._text_of(name)
        return None if text is None else self.raw.token_to_id(text)


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _eos_ids(folder: Path) -> list[int]:
    """eos_token_id of generation_config.json, or else of config.json: one id or several."""
    config = _read_if_there(folder / "config.json")
    places = (_read_if_there(folder / "generation_config.json"), config, config.get("text_config") or {})
    found: Any = next((place["eos_token_id"] for place in places if place.get("eos_token_id") is not None), [])
    ids = found if isinstance(found, list) else [found]
    if not all(isinstance(i, int) for i in ids):
        raise CheckpointError(f"{folder}: eos_token_id is {found!r}; it must be a token id or a list of them")
    return ids


def _compile(source: str) -> Template:
    """A chat template with the names and settings that such templates are written for, in a sandbox: it came with the checkpoint."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what a model said, for training; here it only shows its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # Not jinja's own, which escapes for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as why:
        raise CheckpointError(
            f"the checkpoint's chat template is not valid ({why}); fetch it again, or give plain text"
        ) from None


class TextStream:
    """Text that grows as tokens arrive. What it has given out, joined, is at the end exactly `decode` of all tokens.

    A token may be part of a character, so the end of the text so far may still change. Held back until that is settled:
      - trailing U+FFFD: bytes that may yet become a character;
      - a run of byte tokens (<0xE2>): if it does not end as valid UTF-8, its decoder replaces all of it.
    Only a window of the last tokens is decoded anew, so n tokens cost O(n):

        ids  .. | context | fresh ..      context: settled and given out; it is decoded along, because the first token of a text
                                          may lose its leading space, and the first of `fresh` must not
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window: list[int] = []
        self._num_context = 0
        self._given = ""  # of the text of the window

    def push(self, token_id: int) -> str:
        """Take one more token; return the text that is settled now and was not given out yet (often "", when characters take several)."""
        piece = self._tokenizer.raw.id_to_token(token_id)
        if piece is None or (self._skip and token_id in self._tokenizer.special_ids):
            return ""  # says nothing, and must not part two halves of a character
        self._window.append(token_id)
        if _is_byte(piece):
            return ""
        text = self._text(self._window)
        if text.endswith(REPLACEMENT):
            return ""
        fresh, self._given = text[len(self._given) :], text
        self._slide()
        return fresh

    def finish(self) -> str:
        """What is still held back. The stream is empty afterwards."""
        rest = self._text(self._window)[len(self._given) :]
        self._window, self._num_context, self._given = [], 0, ""
        return rest

    def _slide(self) -> None:
        """All of the window is settled: what was fresh becomes the context."""
        self._window = self._window[self._num_context :]
        self._num_context, self._given = len(self._window), self._text(self._window)

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


def _is_byte(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
