"""Checkpoints whose sizes two and four ranks divide, and groups of real processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.model.conftest import build

from .processes import Group

VOCAB = 96
SIZES = {"vocab_size": VOCAB, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a name in tests/model/conftest.py to the folder of such a checkpoint with SIZES."""
    built: dict[str, Path] = {}

    def get(name: str, **sizes: int) -> Path:
        key = f"{name}{json.dumps(sizes)}"
        if key not in built:
            built[key] = made = tmp_path_factory.mktemp("ranks")
            build(name, **{**SIZES, **sizes}).save_pretrained(made)
            words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")
            tokenizers.Tokenizer(words).save(str(made / "tokenizer.json"))
        return built[key]

    return get


@pytest.fixture(scope="session")
def group() -> Iterator[Callable[[int], Group]]:
    """Return a function from a number of ranks to such a group of processes, which lives until the session ends."""
    groups: dict[int, Group] = {}

    def get(size: int) -> Group:
        if size not in groups or not groups[size].lives:
            groups[size] = Group(size)
        return groups[size]

    yield get
    for each in groups.values():
        each.end()


@pytest.fixture
def prompts() -> list[list[int]]:
    return [[(7 * i + seed) % VOCAB for i in range(length)] for seed, length in enumerate((5, 90, 41))]


def same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Assert that two results have equal tokens, and no error."""
    assert not got["errors"]
    assert got["tokens"] == wanted["tokens"]
