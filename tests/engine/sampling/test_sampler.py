"""Sampling: filters as in transformers, tokens that depend on the seed only, frequencies as the distribution says.

SamplingParams checks each field when the parameters are built.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from transformers.generation import logits_process

from pagedkv.engine import Engine
from pagedkv.engine.sampling import sampler
from pagedkv.engine.sampling.logits import LogitsRules
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.sampling.sampler import SamplingRow, sample
from pagedkv.errors import InvalidRequest

V = 50
TOLERANCE = {"probability": 1e-6, "sigmas": 4.5}


def logits_of(rows: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def probabilities(logits: torch.Tensor, source: SamplingRow) -> torch.Tensor:
    """Return the distribution from which the token of a row is drawn, by the sorted definition: float64 [V]."""
    z = logits[0] if source.rules is None else source.rules.apply(logits[0])
    kept = sampler._filtered(z[None], [source.params])[0]
    return kept / kept.sum()


def row(history: list[int] | tuple[()] = (), **options: Any) -> SamplingRow:
    params = SamplingParams(**options)
    return SamplingRow(params, params.generator(), LogitsRules.of(params, list(history), num_prompt=2))


FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 3.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.7},
    {"temperature": 0.5, "repetition_penalty": 0.6},
]
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_k": 3000, "top_p": 0.99},
    {"temperature": 1.0, "top_k": 30, "min_p": 0.3},
    {"temperature": 1.0, "top_p": 0.95, "min_p": 0.3},
]
HISTORY = [3, 3, 7, 11, 49, 0, 7]


def as_transformers(logits: torch.Tensor, o: dict[str, Any]) -> torch.Tensor:
    """Return the distribution that transformers draws from: its processors in its order."""
    chain: list[Any] = []
    if "repetition_penalty" in o:
        chain.append(logits_process.RepetitionPenaltyLogitsProcessor(float(o["repetition_penalty"])))
    chain.append(logits_process.TemperatureLogitsWarper(o["temperature"]))
    chain += [logits_process.TopKLogitsWarper(o["top_k"])] if "top_k" in o else []
    chain += [logits_process.TopPLogitsWarper(o["top_p"])] if "top_p" in o else []
    chain += [logits_process.MinPLogitsWarper(o["min_p"])] if "min_p" in o else []
    for processor in chain:
        logits = processor(torch.tensor([HISTORY]), logits)
    return logits.softmax(dim=-1)


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters_keep_what_those_of_transformers_keep(options: dict[str, Any]) -> None:
    for seed in range(20):
        logits = logits_of(1, seed)
        want, got = as_transformers(logits.clone(), options)[0], probabilities(logits, row(HISTORY, **options))
        assert torch.equal(got > 0, want > 0)
        torch.testing.assert_close(got.float(), want, rtol=0, atol=TOLERANCE["probability"])


def test_tied_logits_at_the_kth_place_all_stay() -> None:
    assert (probabilities(torch.zeros(1, V), row(temperature=1.0, top_k=3)) > 0).all()


@pytest.mark.parametrize("options", FILTERS[::3], ids=str)
def test_tokens_are_drawn_as_often_as_their_probability_says(options: dict[str, Any]) -> None:
    draws, logits = 4000, logits_of(1, seed=5)
    source = row(HISTORY, seed=11, **options)
    p = probabilities(logits, source)
    counts = sample(logits.expand(draws, -1), [source] * draws).tokens.bincount(minlength=V)
    assert counts[p == 0].sum() == 0
    # Bernstein's bound. Its second term is for tokens so rare that one draw is many standard deviations.
    sigmas = TOLERANCE["sigmas"]
    assert ((counts - draws * p).abs() <= sigmas * (draws * p * (1 - p)).sqrt() + sigmas**2 / 6).all()


@pytest.mark.parametrize("vocab", [5, 1025, 40_000])
@pytest.mark.parametrize("options", [*FILTERS, *MIXED], ids=str)
def test_a_draw_is_that_of_the_sorted_definition(
    options: dict[str, Any], vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of flat and of steep rows, of halves (so with many ties), and with masked tokens."""
    history = [token for token in HISTORY if token < vocab]
    for seed in range(12):
        torch.manual_seed(seed)
        logits = torch.randn(1, vocab) * (0.1, 3.0, 12.0)[seed % 3]
        logits = (2 * logits).round() / 2 if seed in (7, 11) else logits
        if seed % 5 == 4:
            logits[:, 1::2] = -torch.inf
        source = row(history, **options)
        uniform = torch.rand(1, dtype=torch.float64)
        running = probabilities(logits, source).cumsum(0)
        wanted = int(torch.searchsorted(running, uniform * running[-1], right=True))
        monkeypatch.setattr(sampler, "_uniform", lambda _, u=uniform: u)
        assert int(sample(logits, [source]).tokens) == wanted, (seed, uniform)


@pytest.mark.parametrize(("uniform", "place"), [(0.0, 0), (1 - 2**-53, -1)])
def test_the_extreme_draws_land_on_tokens_that_were_kept(
    monkeypatch: pytest.MonkeyPatch, uniform: float, place: int
) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor([uniform], dtype=torch.float64))
    for seed in range(50):
        logits = logits_of(1, seed)
        allowed = probabilities(logits, row(temperature=1.0, top_k=3)).nonzero().flatten().tolist()
        assert int(sample(logits, [row(temperature=1.0, top_k=3)]).tokens) == allowed[place]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"logprobs": 2, "allowed_ids": [1, 5]}], ids=str)
@pytest.mark.parametrize("damage", [torch.nan, -torch.inf], ids=str)
def test_logits_without_a_finite_maximum_are_an_error_and_not_a_token(damage: float, options: dict[str, Any]) -> None:
    """Also where a mask hides them."""
    logits = logits_of(3)
    logits[1, slice(None) if damage < 0 else 4] = damage
    rows = [row(HISTORY, **options) for _ in range(3)]
    states = [source.generator.get_state() for source in rows]
    tokens, errors, logprobs = sample(logits, rows)
    assert list(errors) == [1]
    assert errors[1].startswith("the logits hold NaN, +inf or only -inf")
    assert [token >= 0 for token in tokens.tolist()] == [True, False, True]
    assert sorted(logprobs) == ([0, 2] if "logprobs" in options else [])
    assert torch.equal(rows[1].generator.get_state(), states[1])
    assert torch.equal(rows[0].generator.get_state(), states[0]) is ("temperature" not in options)


def test_a_penalty_that_overflows_is_an_error_and_not_a_token() -> None:
    logits = torch.full((1, V), 3e37)
    tokens, errors, _ = sample(logits, [row(HISTORY, temperature=1.0, repetition_penalty=0.001)])
    assert tokens.tolist() == [-1]
    assert errors[0].startswith("penalties or the logits processor made a logit NaN or +inf")


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 1e-310, 5e-324])
def test_the_colder_the_greedier(temperature: float) -> None:
    for seed in range(20):
        logits = logits_of(1, seed)
        assert sample(logits, [row(temperature=temperature)]).tokens.tolist() == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("least_in_blocks", [0, 1 << 21])
@pytest.mark.parametrize("num_words", [64, 4096 + 128, 97, 16])
def test_a_greedy_row_gets_the_first_of_its_largest_logits(
    num_words: int, least_in_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "_LEAST_IN_BLOCKS", least_in_blocks)
    for seed in range(10):
        lots = torch.Generator().manual_seed(seed)
        logits = torch.randint(0, 40, (5, num_words), generator=lots).float()  # many are equal
        for given in (logits, logits.T.contiguous().T):
            assert torch.equal(sample(given, [row()] * 5).tokens, logits.argmax(-1))


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.5}])
@pytest.mark.parametrize("temperature", [1e39, 1e300])
def test_a_huge_temperature_draws_none_of_the_masked_tokens(options: dict[str, Any], temperature: float) -> None:
    """Float32 would divide -inf by inf."""
    logits = logits_of(1)
    logits[:, ::2] = -math.inf
    for seed in range(20):
        token = int(sample(logits.clone(), [row(temperature=temperature, seed=seed, **options)]).tokens[0])
        assert token % 2 == 1


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
