"""SamplingParams: each field is checked when the parameters are built, and all bits of a seed count."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from pagedkv.engine import Engine
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", "hot"),
        ("top_k", True),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("frequency_penalty", 2.1),
        ("presence_penalty", True),
        ("seed", 2**63),
        ("stop", ["a", ""]),
        ("stop", None),
        ("stop_ids", [10**30]),
        ("stop_ids", None),
        ("stop_ids", "5"),
        ("length_penalty", 1e308),
        ("length_penalty", -11),
        ("early_stopping", "always"),
        ("min_tokens", 129),
        ("logit_bias", {1: 101}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", [(1, 2)]),
        ("logit_bias", None),
        ("allowed_ids", []),
        ("allowed_ids", [True]),
        ("logits_processor", "f"),
        ("logprobs", 21),
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", {"enum": {1, 2}}),
        ("json_schema", "[" * 100_000),
        ("regex", 5),
        ("choice", []),
        ("choice", ["a", ""]),
        ("choice", "ab"),
    ],
)
def test_a_parameter_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field} is .*; it must be "):
        SamplingParams(**{field: value})


NUMBERS: list[Any] = [0, -0.0, 1, -1, 1e-45, 1e300, 0.001, 1000, 0.5, 2**31, 2**63, 10**400, float("nan"), float("inf")]


def test_a_number_is_refused_by_name_or_a_token_is_drawn_with_it() -> None:
    """A penalty of 1e300 once made all logits infinite, and ended the request with an error."""
    engine = Engine.load(num_frames=16)
    numeric = [field.name for field in fields(SamplingParams) if "int" in field.type or "float" in field.type]
    assert {"top_p", "repetition_penalty", "seed"} <= set(numeric)
    for name in numeric:
        for number in NUMBERS:
            value: Any = {"logit_bias": {5: number}, "stop_ids": [number], "allowed_ids": [number]}.get(name, number)
            try:
                given: dict[str, Any] = {"temperature": 0.8, "max_tokens": 2, name: value}
                params = SamplingParams(**given)
                (request,) = engine.generate(["Otto lives in Ghent."], params)
            except InvalidRequest as error:
                assert name in str(error), (name, number)  # noqa: PT017 (not each number is refused)
            else:
                assert not request.completions[0].error, (name, number)


@pytest.mark.parametrize("temperature", [0.5, 100.0])
def test_with_top_p_0_the_likeliest_token_is_drawn_at_any_temperature(temperature: float) -> None:
    engine = Engine.load(num_frames=64)
    prompts = ["Otto lives in Ghent. Where does Otto live?", "Mira keeps a red lamp."]
    rules: dict[str, Any] = {"repetition_penalty": 1.3, "logprobs": 2}
    for alone, extra in (({}, {}), ({}, {"top_k": 5, "min_p": 0.1}), (rules, rules)):
        greedy = engine.generate(prompts, SamplingParams(max_tokens=8, **alone))
        found = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=temperature, top_p=0, **extra))
        assert [r.completions[0].token_ids for r in found] == [r.completions[0].token_ids for r in greedy]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"regex": "a", "choice": ["b"]}, "regex and choice are given; the text can follow only one"),
        ({"num_beams": 2, "presence_penalty": 1.0}, "presence_penalty is 1.0; it must be 0 with num_beams 2"),
        ({"num_beams": 2, "regex": "a"}, "regex is 'a'; it must be None with num_beams 2"),
        ({"json_schema": {}, "ignore_eos": True}, "json_schema and ignore_eos are given; an end token is how the text"),
    ],
    ids=str,
)
def test_parameters_that_exclude_one_another_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(**options)


def test_all_bits_of_a_seed_count() -> None:
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**33, 2**62, 2**63 - 1, 2**63 - 1 - 2**32]
    drawn = [
        int(torch.randint(1 << 60, (1,), generator=SamplingParams(seed=seed).generator(n)))
        for seed in seeds
        for n in range(3)
    ]
    assert len(set(drawn)) == len(drawn)
