"""`pagedkv generate --json-schema, --regex, --choice, --logit-bias`: what they change, and what they refuse."""

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

LAMP = "Mira keeps a red lamp in the cellar. Where is the lamp of Mira?"
ANSWER = "Mira keeps a red lamp in the cellar.\n"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # else random weights may write blanks without end
}
needs_library = pytest.mark.skipif(not importlib.util.find_spec("llguidance"), reason="llguidance is not installed")


@pytest.fixture
def tokenizer():
    return Tokenizer.load(BUNDLED)


# --- grammars ---


@needs_library
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (("--regex", "[0-9]{4}-[0-9]{2}"), r"\d{4}-\d{2}"),
        (("--choice", "yes", "--choice", "no"), "yes|no"),
        (("--json-schema", json.dumps(SCHEMA)), r'\{\s*"n"\s*:\s*\d\s*\}'),
    ],
)
def test_the_text_follows_the_grammar_of_the_command_line(command, monkeypatch, options, pattern):
    monkeypatch.setattr(Tokenizer, "load", lambda _: byte_tokenizer())
    status, out, err = command("generate", "--prompt", "a", "--temperature", 1, "--seed", 3, *options)
    assert (status, bool(re.fullmatch(pattern, out.strip()))) == (0, True), out + err


@needs_library
def test_a_schema_is_read_from_a_file_or_from_the_command_line(tmp_path):
    path = tmp_path / "city.json"
    path.write_text("\ufeff" + json.dumps(SCHEMA), encoding="utf-8")  # a byte order mark, as Windows writes it
    assert shaping.grammar(str(path), None, ()) == shaping.grammar(json.dumps(SCHEMA), None, None)
    assert shaping.grammar(str(path), None, ())["json_schema"] == SCHEMA


@needs_library
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("missing.json", "cannot read the schema missing.json: No such file or directory; give a file"),
        (".", "cannot read the schema .: it is a folder, not a regular file"),
        ("list.json", "the schema list.json is not an object"),
        ("[]", "--json-schema is not an object"),
        ('{"type"', "--json-schema is not JSON: Expecting ':'"),
        ("latin.json", "cannot read the schema latin.json: 'utf-8' codec"),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused(command, tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "latin.json").write_bytes(b'{"title": "\xe9"}')
    status, out, err = command("generate", "--json-schema", given)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"pagedkv: error: {words}")


@needs_library
def test_a_text_follows_one_grammar_only(command):
    status, _, err = command("generate", "--regex", "a", "--choice", "b")
    assert (status, err) == (
        2,
        "pagedkv: error: --regex and --choice are given; the text can follow only one of them\n",
    )


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


# --- biases ---


def test_a_bias_on_the_command_line_forbids_a_token(command, tokenizer):
    number = tokenizer.raw.token_to_id("red")
    assert number == 343, "as in the manual"
    assert command("generate", "--prompt", LAMP).out == ANSWER
    assert "red" not in command("generate", "--prompt", LAMP, "--logit-bias", f"{number}=-100").out
    assert shaping.biases(["343=-2.5", "7=0"]) == {343: -2.5, 7: 0.0}


def test_a_line_with_biases_of_its_own_has_only_these(command, tmp_path, tokenizer):
    path = tmp_path / "many.jsonl"
    lines = ({"prompt": LAMP}, {"prompt": LAMP, "logit_bias": {str(tokenizer.raw.token_to_id("lives")): 1}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = command("generate", "--prompt-file", path, "--json", "--logit-bias", "343=-100").out
    first, second = (json.loads(line)["text"] for line in out.splitlines())
    assert "red" not in first
    assert second == ANSWER.strip()
