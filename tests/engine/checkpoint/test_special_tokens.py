"""Special tokens that a folder names in any of its files: text, ids and chats are those of transformers."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import transformers

from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.errors import CheckpointError
from tests.engine.checkpoint.test_tokenizer import byte_level

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = ["<s>", "</s>", "<|user|>", "<|end|>", "<|new|>", "<|im|>", "the", "<pad>"]
NAMES = ["bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "image_token"]
TEMPLATE = (
    f"{{% for name in [{', '.join(NAMES)}, video_token] %}}[{{{{ name }}}}]{{% endfor %}}{{{{ messages[0].content }}}}"
)
TEXT = "a <|new|> b<|im|> <s>the </s> <pad> <|end|>x"
MESSAGES = [{"role": "user", "content": "hi"}]


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
    assert ours.render_chat(MESSAGES) == theirs.apply_chat_template(MESSAGES, tokenize=False)
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
