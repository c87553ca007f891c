"""Text and tokens: chat templates and end tokens as in transformers, and files that are damaged."""

from __future__ import annotations

import json
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
