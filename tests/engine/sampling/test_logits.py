"""Rules for logits: equal to a slow definition, token by token, and to transformers; masks hold against a processor."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings, strategies
from transformers.generation import logits_process

from pagedkv.engine.drafts.prompt_lookup import PromptLookup
from pagedkv.engine.sampling.logits import LogitsRules
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.sampling.sampler import SamplingRow, sample
from pagedkv.errors import InvalidRequest
from tests.engine.conftest import VOCAB, Checkpoints, prompt_of
from tests.engine.step.test_engine import build, idle, outputs

V = 12
TOLERANCE = 1e-5
ENDS = (3, 7, V + 5)  # a stop id may be beyond the vocabulary


def by_definition(logits: list[float], params: SamplingParams, tokens: list[int], num_prompt: int) -> list[float]:
    """Return what the head of `logits.py` says, one token of the vocabulary after another."""
    times, found = Counter(tokens[num_prompt:]), []
    for i, z in enumerate(logits):
        z += params.logit_bias.get(i, 0.0)
        if i in tokens:
            z = z / params.repetition_penalty if z > 0 else z * params.repetition_penalty
        z -= params.frequency_penalty * times[i] + params.presence_penalty * (times[i] > 0)
        if params.logits_processor:
            z = 3 * z - i
        forbidden = params.allowed_ids is not None and i not in params.allowed_ids
        forbidden |= i in ENDS and len(tokens) - num_prompt < params.min_tokens
        found.append(-math.inf if forbidden else z)
    return found


ids = strategies.integers(0, V - 1)
halves = strategies.integers(-4, 4).map(lambda n: n / 2)
all_params = strategies.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": strategies.sampled_from([0.5, 1.25, 2.0]),
        "frequency_penalty": halves,
        "presence_penalty": halves,
        "logit_bias": strategies.dictionaries(ids, strategies.integers(-100, 100)),
        "allowed_ids": strategies.lists(ids, min_size=1),
        "min_tokens": strategies.integers(0, 6),
        "logits_processor": strategies.just(lambda _, z: z.mul_(3) - torch.arange(V)),
    },
)


@given(all_params, strategies.lists(ids, max_size=5), strategies.lists(ids, max_size=9), strategies.data())
@settings(deadline=None, max_examples=100)
def test_rules_are_those_of_the_definition(
    options: dict[str, Any], prompt: list[int], output: list[int], data: Any
) -> None:
    """After each token of an output, and after some of them were taken back."""
    params, tokens = SamplingParams(**options), list(prompt)
    rules = LogitsRules.of(params, tokens, len(prompt), ends=ENDS)
    lengths = [*range(len(output) + 1), data.draw(strategies.integers(0, len(output)))]
    for length in lengths:
        tokens[len(prompt) :] = output[:length]
        logits = torch.randn(V)
        before = logits.clone()
        want = by_definition(logits.tolist(), params, tokens, len(prompt))
        got = rules.apply(logits) if rules else logits
        assert torch.equal(logits, before)
        torch.testing.assert_close(got, torch.tensor(want), rtol=TOLERANCE, atol=TOLERANCE)


def test_bias_and_repetition_are_those_of_transformers() -> None:
    tokens, bias = [1, 4, 4, 9], {4: 1.5, 9: -3.0, 0: 0.25}
    logits = torch.randn(1, V)
    z = logits.clone()
    for processor in (
        logits_process.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]),
        logits_process.RepetitionPenaltyLogitsProcessor(1.7),
    ):
        z = processor(torch.tensor([tokens]), z)
    params = SamplingParams(logit_bias=bias, repetition_penalty=1.7)
    torch.testing.assert_close(LogitsRules(params, tokens, 2).apply(logits[0]), z[0])


def test_no_processor_lifts_a_mask() -> None:
    params = SamplingParams(allowed_ids=[2, 3], min_tokens=1, logits_processor=lambda _, z: torch.full_like(z, 9.0))
    z = LogitsRules(params, [5], 1, ends=ENDS).apply(torch.zeros(V))
    assert [i for i in range(V) if z[i] > -torch.inf] == [2]


def test_a_processor_keeps_what_is_its_own() -> None:
    own, seen = torch.ones(V), []

    def processor(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((list(token_ids), logits[1].item()))
        token_ids.clear()
        return own

    tokens = [5, 1]
    rules = LogitsRules(SamplingParams(allowed_ids=[2], presence_penalty=2.0, logits_processor=processor), tokens, 1)
    rules.apply(torch.zeros(V))
    assert torch.equal(own, torch.ones(V))
    assert tokens == [5, 1]
    assert seen == [([5, 1], -2.0)]


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (lambda *_: 1 // 0, "the logits processor raised ZeroDivisionError: integer division or modulo by zero"),
        (Mock(side_effect=Wordless), "the logits processor raised Wordless"),
        (lambda *_: None, "the logits processor returned NoneType; it must return a tensor"),
        (lambda _, z: z.unsqueeze_(0), "returned float32 [1, 12] on cpu; it must return float32 [12] on cpu"),
        (lambda _, z: z.resize_(0), "returned float32 [0] on cpu; it must return float32 [12] on cpu"),
        (lambda _, z: z.to_sparse(), "returned sparse_coo float32 [12] on cpu; it must return"),
        (lambda _, z: z[:3], "returned float32 [3] on cpu; it must return float32 [12] on cpu"),
        (lambda _, z: z[None], "returned float32 [1, 12] on cpu"),
        (lambda _, z: z.long(), "returned int64 [12] on cpu"),
        (lambda _, z: z.to("meta"), "returned float32 [12] on meta"),
        (lambda _, z: z * torch.nan, "penalties or the logits processor made a logit NaN or +inf"),
        (lambda _, z: z - torch.inf, "no token is left to draw"),
    ],
)
def test_a_processor_that_fails_is_an_error_of_its_own_row(processor: Any, words: str) -> None:
    params = SamplingParams(logits_processor=processor, logprobs=0)
    rows = [SamplingRow(p, p.generator(), LogitsRules.of(p, [1], 1)) for p in (SamplingParams(), params)]
    tokens, errors, logprobs = sample(torch.eye(2, V), rows)
    assert tokens.tolist() == [0, -1]
    assert words in errors[1]
    assert not logprobs


class Panic(BaseException):
    """A panic of a library in Rust."""


@pytest.mark.parametrize("error", [Panic("index out of bounds"), RuntimeError("of torch"), IndexError()])
def test_rules_that_fail_in_any_way_are_an_error_of_their_own_row(error: BaseException) -> None:
    plain = SamplingParams()
    rows = [SamplingRow(plain, plain.generator(), rules) for rules in (None, Mock(apply=Mock(side_effect=error)))]
    tokens, errors, _ = sample(torch.eye(2, V), rows)
    assert tokens.tolist() == [0, -1]
    assert errors == {1: f"its rules failed: {type(error).__name__}: {error}"}


def test_an_interrupt_of_rules_is_no_error_of_a_row() -> None:
    params = SamplingParams(logits_processor=Mock(side_effect=KeyboardInterrupt))
    row = SamplingRow(params, params.generator(), LogitsRules.of(params, [1], 1))
    with pytest.raises(KeyboardInterrupt):
        sample(torch.eye(1, V), [row])


def test_a_processor_may_compute_in_another_dtype() -> None:
    params = SamplingParams(logits_processor=lambda _, z: z.double() + 1)
    z = LogitsRules(params, [1], 1).apply(torch.zeros(V))
    assert (z.dtype, z.tolist()) == (torch.float32, [1.0] * V)


@pytest.mark.parametrize("drafter", [None, PromptLookup()], ids=["plain", "drafts"])
def test_an_exit_of_a_processor_ends_its_request_only(drafter: PromptLookup | None, checkpoint: Checkpoints) -> None:
    """The bias makes a text that prompt lookup guesses: the function is asked for the draft, then for the token."""

    def leave(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(token_ids) >= 30 + 5:
            raise GeneratorExit("bad arguments")
        return logits

    engine, steady = build(checkpoint("llama"), drafter=drafter), {7: 100.0}
    doomed = engine.submit(prompt_of(30), SamplingParams(max_tokens=9, logit_bias=steady, logits_processor=leave))
    other = engine.submit(prompt_of(30), SamplingParams(max_tokens=12))
    finished = []
    while engine.has_work:
        finished += engine.step()
    (ended,) = doomed.completions
    assert (ended.finish_reason, len(ended.token_ids)) == ("error", 5)
    assert ended.error == "the logits processor raised GeneratorExit: bad arguments"
    assert finished == [ended, *other.completions]
    want = build(checkpoint("llama")).generate([prompt_of(30)], SamplingParams(max_tokens=12))
    assert outputs([other]) == outputs(want)
    assert idle(engine)


def test_one_sample_of_a_family_may_fail_alone(checkpoint: Checkpoints) -> None:
    """The first sample fails at the end of the prompt, where the others fork from it."""
    calls = []

    def processor(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append(token_ids)
        return logits if len(calls) > 1 else logits[:1]

    engine = build(checkpoint("llama"))
    request = engine.submit(prompt_of(30), SamplingParams(max_tokens=5, logits_processor=processor), num_samples=3)
    engine.run()
    assert [c.finish_reason for c in request.completions] == ["error", "length", "length"]
    want = build(checkpoint("llama")).generate([prompt_of(30)], SamplingParams(max_tokens=5))[0].completions[0]
    assert [c.token_ids for c in request.completions] == [[], want.token_ids, want.token_ids]
    assert idle(engine)


def test_an_end_token_that_is_none_masks_no_token() -> None:
    """A checkpoint may say -1, or an id beyond the vocabulary."""
    rules = LogitsRules(SamplingParams(min_tokens=2), [1], 1, ends=(-(2**31), -1, 3, 2**31 - 1))
    assert rules.apply(torch.zeros(5)).isneginf().tolist() == [False, False, False, True, False]


def test_nothing_ends_a_text_before_min_tokens(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"))
    free = engine.generate([prompt_of(20)], SamplingParams(max_tokens=12))[0].completions[0]
    end, word = free.token_ids[0], f"w{free.token_ids[1]}"
    for options in ({"stop_ids": [end]}, {"stop": f"w{end}"}, {"stop": word}):
        short = engine.generate([prompt_of(20)], SamplingParams(max_tokens=12, **options))[0].completions[0]
        assert len(short.token_ids) <= 2
        params = SamplingParams(max_tokens=12, min_tokens=9, **options)
        long = engine.generate([prompt_of(20)], params)[0].completions[0]
        assert len(long.token_ids) >= 9
        assert end not in long.token_ids[:9] or "stop_ids" not in options
    engine.tokenizer.eos_ids = frozenset([end])
    for options in ({}, {"ignore_eos": True}):
        params = SamplingParams(max_tokens=12, min_tokens=9, **options)
        completion = engine.generate([prompt_of(20)], params)[0].completions[0]
        assert len(completion.token_ids) >= 9
        assert (end in completion.token_ids[:9]) is bool(options)


@pytest.mark.parametrize("options", [{"logit_bias": {VOCAB: 1}}, {"allowed_ids": [0, VOCAB]}], ids=str)
def test_an_id_outside_the_vocabulary_is_refused(options: dict[str, Any], checkpoint: Checkpoints) -> None:
    name = next(iter(options))
    with pytest.raises(InvalidRequest, match=rf"{name} has token id {VOCAB}, outside the vocabulary of {VOCAB} tokens"):
        build(checkpoint("llama")).submit([1], SamplingParams(**options))
