"""The bundled checkpoint: its script makes it byte for byte again, and its tokenizer knows the whole language.

Its bytes are fixed, so its answers are: tests/test_main_job.py asks them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from tokenizers import Tokenizer

from pagedkv.engine.checkpoint import BUNDLED
from tests.records import KINDS, MARKERS, OPENERS, PLAIN

ROOT: Final = Path(__file__).resolve().parents[2]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/make_bundled.py"), *arguments], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


def test_the_script_makes_every_byte_again() -> None:
    check = make("--check")
    assert check.returncode == 0, check.stdout + check.stderr


def test_every_word_of_the_language_is_one_token_and_of_one_kind(tokenizer: Tokenizer) -> None:
    words = [word for kind in KINDS.values() for word in kind]
    markers = [word for marker in MARKERS.values() for word in marker.split()]
    plain = {*PLAIN, *OPENERS}
    assert len({*words, *markers}) == len(words) + len(markers)
    assert not plain & set(words)
    assert {*words, *markers, *plain} | {"<unk>", "<s>", "</s>"} == set(tokenizer.get_vocab())
