"""Text to the ids of a prompt: no setting of a file changes them, and the fewest tokens of a text are known at once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from pagedkv.engine.checkpoint.tokenizer import SAMPLE, Tokenizer
from pagedkv.errors import InvalidRequest
from tests.engine.checkpoint.test_tokenizer import KINDS, TEXTS, byte_fallback, byte_level, metaspace, word_piece

if TYPE_CHECKING:
    from collections.abc import Callable


def with_dropout(model: Any) -> Any:
    """Set the share of merges that a BPE leaves out at random; other models have no such setting."""
    if isinstance(model, models.BPE):
        model.dropout = 0.9
    return model


SETTINGS: dict[str, Callable[[tokenizers.Tokenizer], object]] = {
    "cut to 3 tokens": lambda raw: raw.enable_truncation(3),
    "cut at the left": lambda raw: raw.enable_truncation(4, stride=1, direction="left"),
    "filled up to 64 tokens": lambda raw: raw.enable_padding(length=64, pad_id=2),
    "filled up at the left": lambda raw: raw.enable_padding(direction="left", pad_to_multiple_of=16),
    "words cut at random": lambda raw: raw.__setattr__("model", with_dropout(raw.model)),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_never_changed_by_settings_of_training(kind: str, setting: str, tmp_path: Path) -> None:
    plain = KINDS[kind]()
    plain.post_processor = tokenizers.processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 1)])
    raw = tokenizers.Tokenizer.from_str(plain.to_str())
    SETTINGS[setting](raw)
    raw.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    for text in TEXTS:
        assert loaded.encode(text) == plain.encode(text).ids
        assert loaded.encode(text, special_tokens=False) == plain.encode(text, add_special_tokens=False).ids


def changed(make: Callable[[], tokenizers.Tokenizer], **parts: Any) -> Callable[[], tokenizers.Tokenizer]:
    """Return a maker whose tokenizer has other parts."""

    def made() -> tokenizers.Tokenizer:
        raw = make()
        for name, part in parts.items():
            setattr(raw, name, part)
        return raw

    return made


def runs_of(text: str) -> tokenizers.Tokenizer:
    """Make a byte-level tokenizer, the longest token of which is 16 times `text`."""
    written = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    merges = [(written[:i], written[i]) for i in range(1, len(written))]
    merges += [(written * 2**i, written * 2**i) for i in range(4)]
    names = [*pre_tokenizers.ByteLevel.alphabet(), *(a + b for a, b in merges)]
    raw = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return raw


def one_word(split: Any) -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "lamp": 2}, unk_token="[UNK]"))
    raw.pre_tokenizer = split
    return raw


def without_bytes(**options: Any) -> tokenizers.Tokenizer:
    """Make a BPE that knows a few letters, and drops or merges all others."""
    raw = tokenizers.Tokenizer(models.BPE({"<unk>": 0, "t": 1, "h": 2, "e": 3}, [], **options))
    raw.decoder = decoders.Fuse()
    return raw


SPACES = tokenizers.Regex(r"\s+")
MAKERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    **KINDS,
    "NFC": changed(byte_level, normalizer=normalizers.NFC()),
    "NFKC, then lower case": changed(
        byte_fallback, normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "marks out of letters": changed(
        byte_fallback, normalizer=normalizers.Sequence([normalizers.Replace("t", "\u0301"), normalizers.NFC()])
    ),
    "two characters for one": changed(byte_fallback, normalizer=normalizers.Replace("e", "th")),
    "runs": lambda: runs_of("th"),
    "runs of NFKC, twice": changed(
        lambda: runs_of("\u1f82"), normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.NFC()])
    ),
    "runs of one character for two": changed(lambda: runs_of("e"), normalizer=normalizers.Replace("th", "e")),
    "runs of marks": changed(
        lambda: runs_of("\u1f82"),
        normalizer=normalizers.Sequence(
            [*map(normalizers.Replace, "athe", "\u03b1\u0313\u0300\u0345"), normalizers.NFC()]
        ),
    ),
    "ends stripped": changed(byte_level, normalizer=normalizers.Strip()),
    "spaces merged": changed(byte_fallback, normalizer=normalizers.Replace(SPACES, " ")),
    "spaces dropped": changed(byte_fallback, pre_tokenizer=pre_tokenizers.Split(SPACES, "removed")),
    "spaces alone": changed(byte_fallback, pre_tokenizer=pre_tokenizers.Split(SPACES, "isolated")),
    "unknown characters merged": lambda: without_bytes(unk_token="<unk>", fuse_unk=True),
    "normalised metaspace": changed(
        metaspace, normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(SPACES, " ")])
    ),
    "WordPiece": word_piece,
    "WordLevel": lambda: one_word(pre_tokenizers.Whitespace()),
    "WordLevel, marks out": lambda: one_word(pre_tokenizers.Split(tokenizers.Regex(r"\w+"), "removed", invert=True)),
}
PARTS = [
    *("the lamp of", " ", "\n", " " * 60, "th" * 9, "zq" * 80, "t" * 300, "athe", "<|user|>", "\x00", "\u200d"),
    *("é", "e\u0301", "\u03b1\u0313\u0300\u0345", "\u212a", "İ", "ﷺ", "가", "\u1100\u1161\u11a8", "你好", "🙂"),
]


@pytest.mark.parametrize("kind", MAKERS)
def test_no_text_has_fewer_tokens_than_min_tokens(kind: str) -> None:
    tokenizer, dice = Tokenizer(MAKERS[kind]()), random.Random(kind)
    texts = ["", *PARTS, *(part * 500 for part in PARTS)]
    texts += ["".join(dice.choices(PARTS, k=dice.randrange(60))) for _ in range(100)]
    texts += [dice.choice(["the lamp of ", "\n the", "thé "]) * SAMPLE]
    for text in texts:
        fewest = tokenizer.min_tokens(text)
        assert 0 <= fewest <= len(tokenizer.encode(text, special_tokens=False)), text[:80]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "NFC", "two characters for one", "spaces alone"])
def test_a_long_text_is_known_to_be_long_without_being_encoded(kind: str) -> None:
    tokenizer = Tokenizer(MAKERS[kind]())
    longest = max(len(token) for token in tokenizer.raw.get_vocab())
    tokenizer.min_tokens("")  # looks at the vocabulary
    tokenizer.raw = None  # type: ignore[assignment]
    for text in ("the lamp " * 400_000, "thé 你好 " * 400_000):
        assert tokenizer.min_tokens(text) >= len(text) // longest // 4
    assert Tokenizer(word_piece()).min_tokens("the lamp " * 400_000) > SAMPLE // 10


CONTINUED = {
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}": "<user>again</><assistant>again",
    "{{ messages[-1].content }}": "again",
}


@pytest.mark.parametrize("template", CONTINUED)
def test_a_chat_ends_behind_the_content_that_is_continued(template: str) -> None:
    tokenizer = Tokenizer(one_word(pre_tokenizers.Whitespace()), config={"chat_template": template})
    said = [{"role": "user", "content": "again"}, {"role": "assistant", "content": "again"}]
    assert tokenizer.render_chat(said, continues=True) == CONTINUED[template]
    assert said[1]["content"] == "again"


@pytest.mark.parametrize(("template", "times"), [("{{ messages[0].content }}", 0), ("{{ messages }}{{ messages }}", 2)])
def test_a_template_that_does_not_show_the_last_message_once_is_refused(template: str, times: int) -> None:
    tokenizer = Tokenizer(one_word(pre_tokenizers.Whitespace()), config={"chat_template": template})
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(InvalidRequest, match=f"shows the last message {times} times, so it cannot be continued"):
        tokenizer.render_chat(said, continues=True)
