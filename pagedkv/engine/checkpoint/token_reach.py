"""Reach: the most characters of a text that one token can stand for, read from the parts of a tokenizer. No texts.

    text ─▶ normalizer ─▶ pre-tokenizer ─▶ model ─▶ tokens
            may compose   may drop text    a token stands for at most the characters it is written with

A part that may drop or merge any number of characters leaves no limit. A part that this module does not know counts as
such a part.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tokenizers import models, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Iterator

    import tokenizers

COMPOSED: Final = 4
"""The most characters that NFC and NFKC make into one: a letter and three marks."""

GROWS: Final = {"Prepend", "ByteLevel", "NFD", "NFKD", "Lowercase"}
COMPOSES: Final = {"NFC", "NFKC"}
"""Normalizers: those that never shorten a text, and those that shorten texts outside of ASCII by COMPOSED at most."""

SPLITS: Final = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Split", "Punctuation"}
"""Pre-tokenizers that drop no character, unless their behavior is "Removed"."""


class Reach(NamedTuple):
    """The most characters that one token stands for, in a text of ASCII and in any other; 0 if there is no limit.

    is_by_words: each word is encoded alone, so a text has at least the tokens of its first words
    """

    of_ascii: int = 0
    of_any: int = 0
    is_by_words: bool = False


def reach(raw: tokenizers.Tokenizer) -> Reach:
    """Return the reach of a tokenizer's longest token. Only a BPE that has a token for each byte has a limit."""
    normalizers, splits = list(_parts(raw.normalizer)), list(_parts(raw.pre_tokenizer))
    added, vocab = raw.get_added_tokens_decoder().values(), raw.get_vocab()
    kinds = {part["type"] for part in normalizers}
    if (
        not _is_complete(raw.model, vocab, is_byte_level="ByteLevel" in kinds | {part["type"] for part in splits})
        or any(token.lstrip or token.rstrip for token in added)  # they take all spaces next to them
        or any(part["type"] not in SPLITS or part.get("behavior") == "Removed" for part in splits)
        or not all(part["type"] in GROWS | COMPOSES or _lengthens(part) for part in normalizers)
    ):
        has_words = bool(splits) and isinstance(raw.model, (models.WordLevel, models.WordPiece))
        return Reach(is_by_words=has_words and not any("Regex" in part.get("pattern", {}) for part in normalizers))
    written = [*vocab, *(raw.normalizer.normalize_str(t.content) for t in added if t.normalized and raw.normalizer)]
    longest = max(map(len, written))
    composed = COMPOSED ** sum(part["type"] in COMPOSES for part in normalizers)
    return Reach(composed * longest if "Replace" in kinds else longest, composed * longest)


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the fields of a normalizer or pre-tokenizer as in tokenizer.json; of a sequence, those of its parts."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        fields = waiting.pop()
        inner = fields.get("normalizers", fields.get("pretokenizers"))
        if inner is None:
            yield fields
        else:
            waiting += inner


def _lengthens(fields: dict[str, Any]) -> bool:
    """Return whether a normalizer replaces a text by one that is not shorter. An expression may match any length."""
    text = fields.get("pattern", {}).get("String")
    return fields["type"] == "Replace" and bool(text) and len(fields["content"]) >= len(text)


def _is_complete(model: Any, vocab: dict[str, int], *, is_byte_level: bool) -> bool:
    """Return whether a BPE has a token for each byte, so that it neither drops nor merges unknown characters."""
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if is_byte_level:
        return vocab.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
