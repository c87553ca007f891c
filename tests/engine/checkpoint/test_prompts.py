"""Text to the ids of a prompt: no setting of a file changes them."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from tokenizers import models

from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from tests.engine.checkpoint.test_tokenizer import KINDS, TEXTS, byte_level

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
    "filled up at the left to eights": lambda raw: raw.enable_padding(direction="left", length=8),
    "words cut at random": lambda raw: raw.__setattr__("model", with_dropout(raw.model)),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_never_changed_by_settings_of_training(
    kind: str, setting: str, text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain = KINDS[kind]()
    plain.post_processor = tokenizers.processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 1)])
    raw = tokenizers.Tokenizer.from_str(plain.to_str())
    SETTINGS[setting](raw)
    folder = tmp_path_factory.mktemp("saved")
    raw.save(str(folder / "tokenizer.json"))
    loaded = Tokenizer.load(folder)
    assert loaded.encode(text) == plain.encode(text).ids
    assert loaded.encode(text, special_tokens=False) == plain.encode(text, add_special_tokens=False).ids


def test_other_threads_run_while_a_text_is_encoded() -> None:
    tokenizer, is_done, turns = Tokenizer(byte_level()), threading.Event(), list[float]()

    def count() -> None:
        while not is_done.is_set():
            turns.append(time.perf_counter())
            time.sleep(0.001)

    other = threading.Thread(target=count)
    other.start()
    begun = time.perf_counter()
    tokenizer.encode("the lamp of Mira " * 40_000)
    ended = time.perf_counter()
    is_done.set()
    other.join()
    waits = [later - earlier for earlier, later in pairwise(turns)]
    assert max(waits) < 0.5 * (ended - begun)
