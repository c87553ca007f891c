"""Text and tokens: chat templates and end tokens as in transformers, and files that are damaged.

Special tokens that a folder names in any of its files: text, ids and chats are those of transformers.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from pagedkv.engine.checkpoint.chat_template import ChatTemplate
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = ["<s>", "</s>", "<|user|>", "<|end|>"]
CORPUS = [
    "the lamp of Mira is in the old tower by the sea, and naïve café owners know it",
    "where is the lamp? it is here; 你好 世界 🙂",
] * 3


def byte_level() -> tokenizers.Tokenizer:
    """Make a tokenizer like those of Llama 3 and Qwen: each token is bytes."""
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    return raw


def byte_fallback() -> tokenizers.Tokenizer:
    """Make a tokenizer like those of Llama 2, Mistral and Gemma: bytes for unknown characters, no first space."""
    pieces = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghilmnorstuvw?,.🙂"]
    vocab = {piece: i for i, piece in enumerate([*pieces, "▁t", "he", "▁the"])}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return raw


def metaspace() -> tokenizers.Tokenizer:
    """Make a tokenizer like T5's: pieces that begin with a space."""
    raw = tokenizers.Tokenizer(models.Unigram())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    return raw


def word_piece() -> tokenizers.Tokenizer:
    """Make a tokenizer like BERT's: words, and parts of words behind ##."""
    words = sorted({word for text in CORPUS for word in text.split()})
    names = [*SPECIAL, "[UNK]", *words, *(f"##{letter}" for letter in "abcdefgh")]
    raw = tokenizers.Tokenizer(models.WordPiece(vocab={name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    raw.normalizer, raw.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()  # "lamp ." becomes "lamp."
    return raw


KINDS = {"byte level": byte_level, "byte fallback": byte_fallback, "metaspace": metaspace}
TEXTS = ["the lamp of Mira", " two  spaces ", "naïve 🙂🙂 你好, café", "\ufffd? \ufffd", "", "👩‍👩‍👧 𝒳 ẞ"]


CHAT = """{{ bos_token }}{% for message in messages %}
{%- if loop.index > 9 %}{% break %}{% endif %}
<|user|>{{ message['role'] }}: {{ message.content | trim }}{% if message.extra %}{{ message.extra | tojson }}{% endif %}
{% if message.role == 'assistant' %}{% generation %}!{% endgeneration %}{% endif %}
{{ eos_token }}
{% endfor %}{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}assistant:{% endif %}
{% if messages | length > 3 %}{{ raise_exception('at most three messages') }}{% endif %}"""
MESSAGES = [
    {"role": "user", "content": " where is it? "},
    {"role": "assistant", "content": "là <b>", "extra": {"é": "<&>", "n": [1, None]}},
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a folder saved by transformers, and the tokenizer of transformers."""
    folder = tmp_path_factory.mktemp("tokenizer")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>", chat_template=CHAT
    )
    theirs.save_pretrained(folder)
    return folder, theirs


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [MESSAGES[:1], MESSAGES])
def test_chats_are_rendered_as_transformers_does(
    saved: tuple[Path, Any], messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    folder, theirs = saved
    want = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert Tokenizer.load(folder).render_chat(messages, add_generation_prompt=add_generation_prompt) == want


@pytest.mark.parametrize("place", ["config", "config, named", "file"])
def test_a_chat_template_is_found_where_it_lies(saved: tuple[Path, Any], tmp_path: Path, place: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((saved[0] / "tokenizer.json").read_bytes())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    config = {
        "config": {"chat_template": "yes"},
        "config, named": {"chat_template": named},
        "file": {"chat_template": "no"},
    }[place]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text("yes")
    assert Tokenizer.load(tmp_path).render_chat([]) == "yes"


@pytest.mark.parametrize("value", [{1, 2}, b"a", 10**5000, object()], ids=["set", "bytes", "integer", "object"])
def test_variables_that_are_no_json_are_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="are not JSON values"):
        ChatTemplate("{{ n }}").render({"n": value})


def test_a_template_cannot_change_the_messages() -> None:
    """`tests/cli/hostile.py` has the table of hostile templates."""
    messages = [{"role": "user", "content": "a"}]
    for source in ("{{ messages.append(1) }}", "{{ messages[0].update(role='b') }}", "{{ messages.clear() }}"):
        with pytest.raises(InvalidRequest, match="refuses these messages: "):
            ChatTemplate(source).render({"messages": messages})
    assert messages == [{"role": "user", "content": "a"}]


def test_a_refused_or_absent_or_broken_template_is_one_clear_line(saved: tuple[Path, Any]) -> None:
    with pytest.raises(InvalidRequest, match="refuses these messages: at most three messages"):
        Tokenizer.load(saved[0]).render_chat(MESSAGES * 2)
    with pytest.raises(InvalidRequest, match="has no chat template"):
        Tokenizer(byte_level()).render_chat(MESSAGES)
    with pytest.raises(CheckpointError, match="chat template is not valid"):
        Tokenizer(byte_level(), config={"chat_template": "{% if %}"}).render_chat(MESSAGES)


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({}, {1}),
        ({"config.json": {"eos_token_id": 7}}, {1, 7}),
        ({"config.json": {"text_config": {"eos_token_id": [7, 8]}}}, {1, 7, 8}),
        ({"config.json": {"eos_token_id": 7}, "generation_config.json": {"eos_token_id": [3, 2]}}, {1, 2, 3}),
        ({"config.json": {"eos_token_id": 0}, "generation_config.json": {"eos_token_id": None}}, {0, 1}),
    ],
)
def test_end_tokens_are_gathered_from_all_files(
    saved: tuple[Path, Any], tmp_path: Path, files: dict[str, Any], eos_ids: set[int]
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((saved[0] / name).read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == eos_ids
    assert tokenizer.bos_id == 0


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", '{"version": "1.0", "tru', "cannot be read as a tokenizer"),
        ("tokenizer_config.json", "[]", "holds a list"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "eos_token_id is '</s>'"),
        ("generation_config.json", f'{{"eos_token_id": {10**30}}}', "eos_token_id is 1000"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(
    saved: tuple[Path, Any], tmp_path: Path, name: str, content: str | None, sentence: str
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((saved[0] / "tokenizer.json").read_bytes())
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=sentence) as refused:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


TOKENS = ["<s>", "</s>", "<|user|>", "<|end|>", "<|new|>", "<|im|>", "the", "<pad>"]
NAMES = ["bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "image_token"]
TEMPLATE = (
    f"{{% for name in [{', '.join(NAMES)}, video_token] %}}[{{{{ name }}}}]{{% endfor %}}{{{{ messages[0].content }}}}"
)
TEXT = "a <|new|> b<|im|> <s>the </s> <pad> <|end|>x"
HI = [{"role": "user", "content": "hi"}]


class Dice(random.Random):
    """Draws the files of a folder."""

    def token(self) -> dict[str, Any]:
        flags = {
            "lstrip": False,
            "rstrip": self.random() < 0.2,
            "single_word": False,
            "normalized": self.random() < 0.3,
        }
        return {"content": self.choice(TOKENS), **flags}

    def named(self, mark: dict[str, Any]) -> dict[str, Any]:
        names = [name for name in NAMES if self.random() < 0.35]
        return {name: self.choice([{**self.token(), **mark}, *TOKENS[:4], *TOKENS]) for name in names}

    def files(self, ids: dict[str, int]) -> dict[str, Any]:
        texts = lambda: self.sample(TOKENS, 2)  # noqa: E731
        added = {token: ids.get(token, len(ids) + i) for i, token in enumerate(self.sample(TOKENS, 3))}
        by_id = {str(i): {**self.token(), "content": t, "special": self.random() < 0.6} for t, i in added.items()}
        config = {**self.named({"__type": "AddedToken", "special": True}), "chat_template": TEMPLATE}
        some = {
            "additional_special_tokens": texts(),
            "extra_special_tokens": self.choice([texts(), {"video_token": self.choice(TOKENS)}]),
            "added_tokens_decoder": by_id,
        }
        config |= {name: value for name, value in some.items() if self.random() < 0.25}
        further = {"additional_special_tokens": texts(), "extra_special_tokens": texts()}
        further = {name: value for name, value in further.items() if self.random() < 0.25}
        new = {token: i for token, i in added.items() if token not in ids}
        others = {"special_tokens_map.json": {**self.named({}), **further}, "added_tokens.json": new}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        return {
            "tokenizer_config.json": config,
            **{name: value for name, value in others.items() if self.random() < 0.6},
        }


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 60))])
def test_a_folder_names_special_tokens_as_in_transformers(seed: int, tmp_path: Path) -> None:
    raw = byte_level()
    raw.save(str(tmp_path / "tokenizer.json"))
    for name, values in Dice(seed).files(raw.get_vocab()).items():
        (tmp_path / name).write_text(json.dumps(values))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    assert ours.render_chat(HI) == theirs.apply_chat_template(HI, tokenize=False)
    ids = theirs(TEXT)["input_ids"]
    assert ours.encode(TEXT) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.bos_id == theirs.bos_token_id
    assert ours.eos_ids == ({theirs.eos_token_id} - {None})


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("special_tokens_map.json", {"bos_token": {"lstrip": True}}, "has the token {'lstrip': True}"),
        ("special_tokens_map.json", {"extra_special_tokens": [3]}, "has the token 3"),
        ("added_tokens.json", {"<new>": "last"}, "has tokens with the ids .'last'."),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "<new>"}}}, "with the ids .'x'."),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "they must be a dict"),
        ("tokenizer_config.json", {"extra_special_tokens": 4}, "they must be a list"),
    ],
)
def test_a_token_that_is_no_text_is_refused(name: str, content: Any, sentence: str, tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=sentence) as refused:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(refused.value)
