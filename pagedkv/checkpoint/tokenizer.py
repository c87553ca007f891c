"""Text to token ids and back: tokenizer, chat templates, end tokens, and text that grows token by token. No tensors.

Files read, all of one Hugging Face folder: tokenizer.json (required); tokenizer_config.json, chat_template.jinja,
generation_config.json and config.json (optional).
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import tokenizers

from pagedkv.checkpoint.chat_template import ChatTemplate
from pagedkv.checkpoint.fields import shown
from pagedkv.checkpoint.files import is_present, read_bytes, read_json, read_text
from pagedkv.checkpoint.token_reach import Reach, reach
from pagedkv.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

REPLACEMENT: Final = "\ufffd"
"""The character that a decoder shows for bytes that are not, or not yet, a whole character."""

MOST_TOKENIZER_BYTES: Final = 2**27
"""Bytes of tokenizer.json. That of Gemma 3, with 262,144 tokens, has 33 million."""

SAMPLE: Final = 2**16
"""Characters at the begin of a text that `min_tokens` encodes, if the text may be one word for all it knows."""


class Tokenizer:
    """The tokenizer of a checkpoint.

    eos_ids: tokens that end a text, from generation_config.json, else from config.json, and the tokenizer's own.
    bos_id:  the token that begins a text, or None.
    """

    def __init__(
        self, raw: tokenizers.Tokenizer, *, config: dict[str, Any] | None = None, eos_ids: Iterable[int] = ()
    ) -> None:
        raw.no_truncation()  # settings of training: saved with a tokenizer, and meant for batches of examples
        raw.no_padding()
        if isinstance(raw.model, tokenizers.models.BPE):
            raw.model.dropout = None  # merges at random
        self.raw: tokenizers.Tokenizer = raw
        self.config: dict[str, Any] = config or {}
        own = self._id_of("eos_token")
        self.eos_ids: frozenset[int] = frozenset((*eos_ids, *(() if own is None else (own,))))
        self.bos_id: int | None = self._id_of("bos_token")
        self.special_ids: frozenset[int] = frozenset(
            i for i, token in raw.get_added_tokens_decoder().items() if token.special
        )
        self._template: ChatTemplate | None = None
        self._making = Lock()

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face folder.

        Raises: CheckpointError if tokenizer.json is missing or damaged, or another file does not hold what it should
        """
        if not is_present(folder, "tokenizer.json"):
            raise CheckpointError(
                f"{folder} has no tokenizer.json; save the tokenizer in the fast format (tokenizer.model is not read)"
            )
        data = read_bytes(folder / "tokenizer.json", MOST_TOKENIZER_BYTES)
        with _failures(f"{folder / 'tokenizer.json'} cannot be read as a tokenizer"):
            raw = tokenizers.Tokenizer.from_buffer(data)
        config = _read_if_present(folder, "tokenizer_config.json")
        if is_present(folder, "chat_template.jinja"):
            config["chat_template"] = read_text(folder / "chat_template.jinja")
        return cls(raw, config=config, eos_ids=_eos_ids(folder))

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added tokens included. A model may have embeddings for more."""
        return self.raw.get_vocab_size()

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        special_tokens: add the tokens that the tokenizer puts around a text; a rendered chat contains them already.
        Raises: InvalidRequest if `text` holds half of a surrogate pair; CheckpointError if the tokenizer cannot encode
            the text, for example because it has no token for unknown characters
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"character {error.start} of the text is {text[error.start]!r}, half of a surrogate pair; "
                "give valid Unicode"
            ) from None
        with _failures("tokenizer.json cannot encode the text"):  # `encode` would hold the interpreter's lock
            return list(self.raw.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids)

    def min_tokens(self, text: str) -> int:
        """Return a number of tokens that `encode` gives at least, in far less time; 0 if none is certain.

        A model of whole words has no longest token, so the tokens of the first SAMPLE characters are counted. Raises:
        as `encode`
        """
        most = self._reach.of_ascii if text.isascii() else self._reach.of_any
        if most:
            return -(-len(text) // most)
        if len(text) <= SAMPLE or not self._reach.is_by_words:
            return 0
        return len(self.encode(text[: text.rfind(" ", 0, SAMPLE) + 1], special_tokens=False))

    @cached_property
    def _reach(self) -> Reach:
        return reach(self.raw)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`. An id that the tokenizer does not have adds no text.

        Raises: CheckpointError if the tokenizer cannot decode them
        """
        try:  # a `with` would take as long as the call, and each new token is decoded twice
            return self.raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            raise _failure("tokenizer.json cannot decode tokens", error) from None

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """Return a new stream, which turns tokens into text one at a time."""
        return TextStream(self, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render `messages`, each {"role": ..., "content": ...}, with the checkpoint's chat template.

        Encode the result with special_tokens=False. variables: further names for the template; JSON values.
        The template comes from the checkpoint and is not trusted: it runs in a sandbox, in a process of its own that
        has 2 s of processor time and 1 GiB of memory for each call.
        Raises: InvalidRequest if there is no template, or the template refuses the messages; CheckpointError if the
            template is not valid, or takes too much time or memory
        """
        with self._making:  # threads of a server come here at once
            self._template = self._template or ChatTemplate(self._chat_template())
        texts = {name: self._text_of(name) for name in self.config if name.endswith("_token")}
        special_tokens = {name: text for name, text in texts.items() if text is not None}
        names = {"messages": list(messages), "tools": None, "documents": None}
        return self._template.render(
            {**names, "add_generation_prompt": add_generation_prompt, **special_tokens, **variables}
        )

    def _chat_template(self) -> str:
        """Return the source of the chat template; of several, the one named "default"."""
        template = self.config.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = (part for part in template if isinstance(part, dict) and part.get("name") == "default")
            template = next((part.get("template") for part in named), None)
        if not isinstance(template, str):
            raise InvalidRequest("the checkpoint has no chat template; give plain text, or a checkpoint tuned for chat")
        return template

    def _text_of(self, name: str) -> str | None:
        token = self.config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None

    def _id_of(self, name: str) -> int | None:
        text = self._text_of(name)
        return None if text is None else self.raw.token_to_id(text)


def _read_if_present(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if is_present(folder, name) else {}


@contextmanager
def _failures(sentence: str) -> Iterator[None]:
    """Turn an error of the library, which raises bare Exception and, if it panics, a BaseException of its own."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise _failure(sentence, error) from None


def _failure(sentence: str, error: BaseException) -> CheckpointError:
    return CheckpointError(f"{sentence} ({error}); the file is truncated or not the real one. Fetch it again")


def _eos_ids(folder: Path) -> list[int]:
    """Read the end tokens of generation_config.json, or else of config.json. The field holds one id or several."""
    config = _read_if_present(folder, "config.json")
    nested = config.get("text_config")
    configs = (_read_if_present(folder, "generation_config.json"), config, nested if isinstance(nested, dict) else {})
    found: Any = next((values["eos_token_id"] for values in configs if values.get("eos_token_id") is not None), [])
    ids = found if isinstance(found, list) else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) and -(2**31) <= i < 2**31 for i in ids):  # -1: none
        raise CheckpointError(f"{folder}: eos_token_id is {shown(found)}; it must be a token id or a list of them")
    return ids


class TextStream:
    """A stream of text that grows as tokens arrive. All returned pieces, joined, are exactly `decode` of all tokens.

    A character may take several tokens, so the end of the text may change with the next token. The stream holds back:
      - a trailing U+FFFD: bytes that may become a character;
      - a run of byte tokens (<0xE2>): the decoder replaces the whole run if it does not end as valid UTF-8.
    Only a window of the last tokens is decoded again, so n tokens cost O(n):

        ids  .. | context | fresh ..      context: tokens whose text was returned before. They are decoded again,
                                          because the first token of a text may lose its leading space, and the first
                                          token of `fresh` must keep it
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window: list[int] = []
        self._num_context = 0
        self._returned = ""  # the part of the window's text that was returned

    def push(self, token_id: int) -> str:
        """Add a token; return the new text that no later token can change: "" within a character of several tokens."""
        piece = self._tokenizer.raw.id_to_token(token_id)
        if piece is None or (self._skip and token_id in self._tokenizer.special_ids):
            return ""  # the token has no text, and must not separate two halves of a character
        self._window.append(token_id)
        if _is_byte(piece):
            return ""
        text = self._text(self._window)
        if text.endswith(REPLACEMENT):
            return ""
        fresh, self._returned = text[len(self._returned) :], text
        self._slide()
        return fresh

    def finish(self) -> str:
        """Return the text still held back, and empty the stream."""
        rest = self._text(self._window)[len(self._returned) :]
        self._window, self._num_context, self._returned = [], 0, ""
        return rest

    def _slide(self) -> None:
        """Drop the context and make the fresh tokens the new context: all text of the window was returned."""
        self._window = self._window[self._num_context :]
        self._num_context, self._returned = len(self._window), self._text(self._window)

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


def _is_byte(piece: str) -> bool:
    """Return whether a token stands for one byte, as <0xE2> does."""
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
