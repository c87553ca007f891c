"""Grammars: an output that ends by itself is a text of its grammar, whatever preempts, interrupts or takes back."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import assume, given, settings, strategies

from pagedkv.cache import PagedKVCache
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.drafts.draft_model import DraftModel
from pagedkv.engine.sampling.grammar import Grammar, Grammars
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import InvalidRequest
from tests.engine.conftest import VOCAB, Checkpoint, Checkpoints, prompt_of
from tests.engine.step.test_engine import _decoders, build

needs_library = pytest.mark.skipif(not importlib.util.find_spec("llguidance"), reason="llguidance is not installed")
END = VOCAB - 1


def byte_tokenizer(merges: list[tuple[str, str]] | None = None) -> Tokenizer:
    """Return byte-level BPE over ASCII, with as many tokens as the random checkpoints have; the last ends a text."""
    merges = merges or []
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    words = [*letters[: VOCAB - 1 - len(merges)], *("".join(pair) for pair in merges), "</s>"]
    raw = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, merges))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    raw.add_special_tokens(["</s>"])
    return Tokenizer(raw, eos_ids=[raw.token_to_id("</s>")])


def engine_of(checkpoint: Checkpoint, num_frames: int = 400, **options: Any) -> Engine:
    decoder = _decoders.setdefault((str(checkpoint.folder), "cpu"), checkpoint.decoder())
    return Engine(decoder, byte_tokenizer(), PagedKVCache(decoder.config.spec(), num_frames=num_frames), **options)


names = strategies.text("abc", min_size=1, max_size=3)
leaves = strategies.one_of(
    strategies.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "integer"}, {"type": "number"}]),
    strategies.builds(lambda n: {"type": "string", "maxLength": n}, strategies.integers(0, 4)),
    strategies.builds(
        lambda values: {"enum": values},
        strategies.lists(strategies.one_of(names, strategies.integers(-99, 99), strategies.none()), min_size=1),
    ),
    strategies.builds(lambda n: {"type": "integer", "minimum": n, "maximum": n + 120}, strategies.integers(-50, 50)),
)
schemas = strategies.recursive(
    leaves,
    lambda inner: strategies.one_of(
        strategies.builds(lambda i, n: {"type": "array", "items": i, "maxItems": n}, inner, strategies.integers(0, 3)),
        strategies.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        strategies.builds(
            lambda fields, needed: {
                "type": "object",
                "properties": fields,
                "required": [name for name in fields if name in needed],
                "additionalProperties": False,
            },
            strategies.dictionaries(names, inner, max_size=3),
            strategies.sets(names),
        ),
    ),
    max_leaves=6,
)


def follows(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a value is one of a schema of `schemas`."""
    if "anyOf" in schema:
        return any(follows(value, part) for part in schema["anyOf"])
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    kind = schema["type"]
    if kind == "object":
        fields = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(fields)
            and all(follows(part, fields[name]) for name, part in value.items())
        )
    if kind == "array":
        few = isinstance(value, list) and len(value) <= schema["maxItems"]
        return few and all(follows(part, schema["items"]) for part in value)
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind in ("integer", "number"):
        types = int if kind == "integer" else (int, float)
        if not isinstance(value, types) or isinstance(value, bool):
            return False
        return schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return isinstance(value, bool) if kind == "boolean" else value is None


def walk(grammar: Grammar, dice: random.Random, most: int) -> list[int] | None:
    """Draw tokens that the grammar allows until one ends the text; None after `most` tokens."""
    tokens: list[int] = []
    while len(tokens) < most:
        choices = grammar.follow(tokens).allowed(VOCAB).nonzero()[:, 0].tolist()
        assert choices
        tokens.append(END if END in choices and dice.random() < 0.5 else dice.choice(choices))
        if tokens[-1] == END:
            return tokens[:-1]
        if grammar.follow(tokens).is_complete:
            return tokens
    return None


@needs_library
@given(schemas, strategies.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_the_text_follows_any_schema(schema: dict[str, Any], dice: random.Random) -> None:
    tokenizer = byte_tokenizer([('"', ":"), ("{", '"')])
    grammar = Grammars(tokenizer).compiled(SamplingParams(json_schema=schema))
    assert grammar
    tokens = walk(grammar.start(0), dice, 400)
    assume(tokens is not None)
    value = json.loads(tokenizer.decode(tokens or []))
    assert follows(value, schema), value


@needs_library
@given(strategies.randoms(use_true_random=False))
@settings(deadline=None, max_examples=25)
def test_tokens_may_be_taken_back(dice: random.Random) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "ab", 1, None]}, "maxItems": 4}
    whole = Grammars(byte_tokenizer()).compiled(SamplingParams(json_schema=schema))
    assert whole
    grammar, tokens = whole.start(3), [1, 2, 3]
    for _ in range(40):
        fresh = whole.start(3).follow(tokens)
        assert torch.equal(grammar.follow(tokens).allowed(VOCAB), fresh.allowed(VOCAB))
        assert grammar.is_complete == fresh.is_complete
        if grammar.is_complete or dice.random() < 0.2:
            del tokens[dice.randint(3, len(tokens)) :]
        else:
            tokens.append(dice.choice([i for i in fresh.allowed(VOCAB).nonzero()[:, 0].tolist() if i != END]))


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Ghent", "Oslo"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
PARAMS = [
    SamplingParams(max_tokens=120, temperature=2.0, seed=1, json_schema=CITY, logprobs=1),
    SamplingParams(max_tokens=120, temperature=2.0, seed=2, regex="[a-z]{3,20}(-[0-9]+){2}!"),
    SamplingParams(max_tokens=120, choice=['say "no"', "a\\b", "tab\n"], min_tokens=100, repetition_penalty=1.3),
    SamplingParams(max_tokens=40, temperature=1.0, seed=4),
]


def submitted(engine: Engine) -> list[Any]:
    return [engine.submit(prompt_of(20 + n), params, num_samples=2) for n, params in enumerate(PARAMS)]


def texts(requests: list[Any]) -> list[tuple[str, str]]:
    return [(c.text, c.finish_reason) for request in requests for c in request.completions]


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Checkpoints) -> list[Any]:
    engine = engine_of(checkpoint("llama"))
    requests = submitted(engine)
    engine.run()
    return requests


@needs_library
def test_outputs_follow_their_grammars_beside_other_requests(undisturbed: list[Any], checkpoint: Checkpoints) -> None:
    of_schema, of_regex, of_choice, plain = undisturbed
    assert {c.finish_reason for r in undisturbed[:3] for c in r.completions} == {"stop"}
    assert all(follows(json.loads(c.text), CITY) for c in of_schema.completions)
    assert all(re.fullmatch(PARAMS[1].regex, c.text) for c in of_regex.completions)
    assert {c.text for c in of_choice.completions} <= set(PARAMS[2].choice)
    alone = engine_of(checkpoint("llama")).generate([plain.prompt_ids], PARAMS[3], num_samples=2)
    assert texts(alone) == texts([plain])


@needs_library
def test_an_end_token_that_is_taken_back_leaves_a_text_complete() -> None:
    compiled = Grammars(byte_tokenizer()).compiled(SamplingParams(regex="ab"))
    assert compiled
    tokens = [7, 7, *byte_tokenizer().encode("ab")]
    grammar = compiled.start(2).follow([*tokens, END])
    assert grammar.follow(tokens).is_complete
    assert not grammar.follow(tokens[:3]).is_complete
    assert grammar.follow(tokens).is_complete


@needs_library
def test_drafts_follow_the_grammar_and_change_nothing(undisturbed: list[Any], checkpoint: Checkpoints) -> None:
    """The draft model is the model itself: if its sequences obey the same rules, each draft comes true."""
    decoder = checkpoint("llama").decoder()
    drafter = DraftModel(decoder, PagedKVCache(decoder.config.spec(), num_frames=400), num_tokens=3)
    engine = engine_of(checkpoint("llama"), drafter=drafter)
    got = submitted(engine)
    engine.run()
    assert texts(got) == texts(undisturbed)
    assert engine.speculation.num_drafts > 100
    assert engine.speculation.acceptance > 0.95


@needs_library
def test_drafts_of_any_kind_change_nothing(undisturbed: list[Any], checkpoint: Checkpoints) -> None:
    """Drafts that copy the text that comes out, some of them wrong, and drafts behind its end."""
    dice = random.Random(0)
    known = {id(c.request.params) + c.index: c.token_ids for r in undisturbed for c in r.completions}

    class Copies:
        num_tokens, vocab_size = 5, None

        def propose(self, sequences: list[Any], most: list[int]) -> list[list[int]]:
            drafts = []
            for sequence, count in zip(sequences, most, strict=True):
                completion, first = sequence.completion, sequence.num_output
                right = (known[id(completion.request.params) + completion.index] + [END] * 9)[first : first + count]
                drafts.append([dice.randrange(VOCAB) if dice.random() < 0.2 else token for token in right])
            return drafts

        def forget(self, sequence: Any) -> None: ...

        def recover(self) -> None: ...

    engine = engine_of(checkpoint("llama"), drafter=Copies())
    got = submitted(engine)
    engine.run()
    assert texts(got) == texts(undisturbed)
    assert 0.3 < engine.speculation.acceptance < 1


@needs_library
def test_without_an_end_token_the_text_ends_where_the_grammar_does(checkpoint: Checkpoints) -> None:
    engine = engine_of(checkpoint("llama"))
    engine.tokenizer.eos_ids = frozenset()
    params = SamplingParams(max_tokens=50, regex="[ab]{7}")
    completion = engine.generate([prompt_of(20)], params)[0].completions[0]
    assert (completion.finish_reason, len(completion.token_ids)) == ("stop", 7)
    assert re.fullmatch("[ab]{7}", completion.text)


@needs_library
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"regex": "a("}, "regex cannot be used: .*unclosed group"),
        ({"regex": "\ud800"}, "regex cannot be used .*surrogates not allowed.*; give valid Unicode"),
        ({"choice": ["\ud800"]}, "choice cannot be used .*; give valid Unicode"),
        ({"json_schema": {"type": "text"}}, "json_schema cannot be used: .*text"),
        ({"json_schema": {"not": {}, "type": "object"}}, 'json_schema cannot be used: .*"not"'),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema cannot be used: .*nowhere"),
        ({"json_schema": '{"items":' * 500 + "{}" + "}" * 500}, "json_schema cannot be used.*recursion"),
    ],
    ids=str,
)
def test_a_grammar_that_cannot_be_used_is_refused_when_it_is_submitted(
    options: dict[str, Any], words: str, checkpoint: Checkpoints
) -> None:
    engine = engine_of(checkpoint("llama"))
    with pytest.raises(InvalidRequest, match=f"(?s){words}"):
        engine.submit([1], SamplingParams(**options))
    assert not engine.has_work


@needs_library
def test_a_tokenizer_without_bytes_is_refused(checkpoint: Checkpoints) -> None:
    with pytest.raises(InvalidRequest, match="llguidance cannot use this tokenizer .* needs byte-level BPE"):
        build(checkpoint("llama")).submit([1], SamplingParams(choice=["w1"]))
