"""Text to token ids and back: tokenizer, chat templates, end tokens, and text that grows token by token. No tensors.

Files read, all of one Hugging Face folder: tokenizer.json (required); those of special_tokens, chat_template.jinja,
generation_config.json and config.json (optional).
"""

from __future__ import annotations

import codecs
import re
import uuid
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import tokenizers

from pagedkv.engine.checkpoint.chat_template import ChatTemplate
from pagedkv.engine.checkpoint.fields import shown
from pagedkv.engine.checkpoint.files import is_present, read_bytes, read_json_if_present, read_text
from pagedkv.engine.checkpoint.special_tokens import read_config
from pagedkv.engine.checkpoint.token_reach import Reach, reach
from pagedkv.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

REPLACEMENT: Final = "\ufffd"
"""The character that a decoder shows for bytes that are not, or not yet, a whole character."""

MOST_TOKENIZER_BYTES: Final = 2**27
"""Bytes of tokenizer.json. That of Gemma 3, with 262,144 tokens, has 33 million."""

CONTEXT: Final = 8
"""Tokens at the end of a prompt that a stream of text reads: a character of four bytes, and those before it."""

SAMPLE: Final = 2**16
"""`min_tokens` encodes as many characters at the begin of a text if no longest token is known."""


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
        config = read_config(folder, raw)
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

        A model of whole words has no longest token, so the words of the first SAMPLE characters are counted. Raises:
        as `encode`
        """
        most = self._reach.of_ascii if text.isascii() else self._reach.of_any
        if most:
            return -(-len(text) // most)
        if len(text) <= SAMPLE or not self._reach.is_by_words:
            return 0
        with _failures("tokenizer.json cannot encode the text"):
            words = self.raw.encode_batch([text[:SAMPLE]], add_special_tokens=False)[0].word_ids
        return sum(word != words[-1] for word in words)  # the last word may go on

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

    def stream(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> TextStream:
        """Return a new stream, which turns the tokens behind `prompt` into text one at a time."""
        return TextStream(self, prompt, skip_special_tokens=skip_special_tokens)

    @cached_property
    def bytes_of(self) -> dict[int, int]:
        """The byte of each token that stands for one, as <0xE2> does; none if the decoder has no such tokens."""
        if self.raw.decoder is None or b'"ByteFallback"' not in self.raw.decoder.__getstate__():
            return {}
        found = {self.raw.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        return {token: byte for token, byte in found.items() if token is not None}

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continues: bool = False,
        **variables: Any,
    ) -> str:
        """Render `messages`, each {"role": ..., "content": ...}, with the checkpoint's chat template.

        Encode the result with special_tokens=False. variables: further names for the template; JSON values.
        continues: end behind the content of the last message, which is to be continued; without a generation prompt.
        The template comes from the checkpoint: it runs in a sandbox, which does not limit its time.
        Raises: InvalidRequest if there is no template, or the template refuses the messages; CheckpointError if the
            template is not valid, or its text is too long
        """
        self._template = self._template or ChatTemplate(self._chat_template())
        texts = {name: self._text_of(name) for name in self.config if name.endswith("_token")}
        special_tokens = {name: text for name, text in texts.items() if text is not None}
        names = {"messages": list(messages), "tools": None, "documents": None, **special_tokens, **variables}
        if not continues:
            return self._template.render({**names, "add_generation_prompt": add_generation_prompt})
        mark = uuid.uuid4().hex  # a template may strip the content, and the content may also be in earlier messages
        names["messages"][-1] = {**messages[-1], "content": f"{messages[-1]['content']}{mark}"}
        text, *behind = self._template.render({**names, "add_generation_prompt": False}).split(mark)
        if len(behind) != 1:
            raise InvalidRequest(
                f"the chat template shows the last message {len(behind)} times, so it cannot be continued; "
                "let a message of the user be the last one"
            )
        return text

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
    config, own = (read_json_if_present(folder, name) for name in ("config.json", "generation_config.json"))
    nested = config.get("text_config")
    configs = (own, config, nested if isinstance(nested, dict) else {})
    found: Any = next((values["eos_token_id"] for values in configs if values.get("eos_token_id") is not None), [])
    ids = found if isinstance(found, list) else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) and -(2**31) <= i < 2**31 for i in ids):  # -1: none
        raise CheckpointError(f"{folder}: eos_token_id is {shown(found)}; it must be a token id or a list of them")
    return ids


class TextStream:
    """A stream of text that grows as tokens arrive. The pieces, joined, continue the text of a prompt.

    A character is shown with the token that makes it whole; before, its bytes are held back. Only the last tokens are
    decoded again, so n tokens cost O(n):

        ids .. | window ......... |     the first token of a text may lose its space; that of an answer must keep it,
                 shown     | held       so the window begins with tokens of the prompt, or with some that were shown

    Byte tokens (<0xE2>) are decoded here. The decoder replaces a whole run of them if one byte is invalid, and with it
    characters of the run that were shown. `tokenizers.decoders.DecodeStream` fails there. It also holds invalid bytes
    back for ever, in quadratic time, and does not tell at the end what it holds.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window: list[int] = []
        self._num_shown = 0  # characters of the window's text
        self._bytes = codecs.getincrementaldecoder("utf-8")("surrogateescape")  # a surrogate for each invalid byte
        self._of_prompt = ""
        for token in reversed([*islice(filter(self._has_text, reversed(prompt)), CONTEXT)]):
            self.push(token)
        self._of_prompt = self._held()  # a part of a character, which the prompt's text shows already

    def push(self, token_id: int) -> str:
        """Add a token; return the new text that no later token can change: "" within a character of several tokens."""
        if not self._has_text(token_id):
            return ""  # it must not separate two halves of a character
        byte = self._tokenizer.bytes_of.get(token_id)
        return self._added(self._push(token_id) if byte is None else self._push_byte(token_id, byte))

    def finish(self) -> str:
        """Return the text still held back, at the end of the stream."""
        return self._added(self._held())

    def _push(self, token_id: int) -> str:
        text = self._characters(b"", final=True) if self._tokenizer.bytes_of else ""
        self._window.append(token_id)
        found = self._text(self._window)
        is_held = found.endswith(REPLACEMENT) and not self._ends_in_replacement()
        text += found[self._num_shown : len(found) - is_held]
        kept = 4 if is_held else 1  # a character has at most four bytes
        if len(self._window) >= 2 * kept:
            self._window = self._window[-kept:]
            found = self._text(self._window)
        self._num_shown = len(found) - is_held
        return text

    def _push_byte(self, token_id: int, byte: int) -> str:
        text, alone = self._characters(bytes([byte])), self._text([token_id])
        if text == " " and not self._window:
            text = alone  # the decoder may strip the first space of a text
        self._window, self._num_shown = [token_id], len(alone)
        return text

    def _has_text(self, token_id: int) -> bool:
        """Return whether the decoder reads the token: not if it is unknown, or special and skipped."""
        is_skipped = self._skip and token_id in self._tokenizer.special_ids
        return not is_skipped and self._tokenizer.raw.id_to_token(token_id) is not None

    def _characters(self, data: bytes, *, final: bool = False) -> str:
        """Return the characters that are known with more bytes of byte tokens; for each invalid byte, a U+FFFD."""
        text = self._bytes.decode(data, final)
        return text if text.isascii() else re.sub("[\udc80-\udcff]", REPLACEMENT, text)

    def _ends_in_replacement(self) -> bool:
        """Return whether the last character is a U+FFFD that was written: as it is, or as three bytes of ByteLevel."""
        written = "".join(self._tokenizer.raw.id_to_token(token) or "" for token in self._window[-3:])
        return written.endswith((REPLACEMENT, "\xef\xbf\xbd"))

    def _held(self) -> str:
        return REPLACEMENT * len(self._bytes.getstate()[0]) + self._text(self._window)[self._num_shown :]

    def _added(self, text: str) -> str:
        """Return new text without the part that the prompt's text shows."""
        if text and self._of_prompt:
            text, self._of_prompt = text.removeprefix(self._of_prompt), ""
        return text

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)
