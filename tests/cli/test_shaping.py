"""`pagedkv generate --json-schema, --regex, --choice`: what they change, and what they refuse."""

from __future__ import annotations

import importlib.util
import json
import re
from types import SimpleNamespace

import pytest

from pagedkv.cli import generate, shaping
from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.sampling.params import SamplingParams

from ..engine.sampling.test_grammar import byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # else random weights may write blanks without end
}
needs_library = pytest.mark.skipif(not importlib.util.find_spec("llguidance"), reason="llguidance is not installed")


@needs_library
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (("--regex", "[0-9]{4}-[0-9]{2}"), r"\d{4}-\d{2}"),
        (("--choice", "yes", "--choice", "no"), "yes|no"),
        (("--json-schema", json.dumps(SCHEMA)), r'\{\s*"n"\s*:\s*\d\s*\}'),
        (("--json-schema", "n.json"), r'\{\s*"n"\s*:\s*\d\s*\}'),
    ],
)
def test_the_text_follows_the_grammar_of_the_command_line(command, monkeypatch, tmp_path, options, pattern):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "n.json").write_text("\ufeff" + json.dumps(SCHEMA), encoding="utf-8")  # with a mark, as Windows has it
    monkeypatch.setattr(Tokenizer, "load", lambda _: byte_tokenizer())
    status, out, err = command("generate", "--prompt", "a", "--temperature", 1, "--seed", 3, *options)
    assert (status, bool(re.fullmatch(pattern, out.strip()))) == (0, True), out + err


def test_a_missing_library_is_named_before_a_model_is_loaded(command, monkeypatch):
    monkeypatch.setattr(shaping, "find_spec", lambda _: None)
    status, _, err = command("generate", "--model", BUNDLED, "--choice", "yes")
    words = "--choice needs the library llguidance; pip install 'pagedkv[grammar]'"
    assert (status, err) == (2, f"pagedkv: error: {words}\n")


@needs_library
def test_a_checkpoint_whose_tokens_have_no_bytes_is_refused_with_its_reason(command):
    status, _, err = command("generate", "--regex", "a")
    assert status == 2
    assert err.startswith("pagedkv: error: llguidance cannot use this tokenizer")
    assert "Unicode" not in err


def test_a_grammar_of_a_line_takes_the_place_of_that_of_the_command():
    of_command = SamplingParams(regex="[0-9]+", top_k=3)
    params = generate._params_of(SimpleNamespace(options={"choice": ("a", "b")}), of_command)
    assert (params.choice, params.regex, params.top_k) == (("a", "b"), None, 3)
    assert generate._params_of(SimpleNamespace(options={"top_k": 4}), of_command) == SamplingParams(
        regex="[0-9]+", top_k=4
    )
