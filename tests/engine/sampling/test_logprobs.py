"""Log-probabilities: those of float64 log_softmax over the model's own logits, whatever edits or draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedkv.engine.sampling.logits import LogitsRules
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.sampling.sampler import SamplingRow, sample
from tests.engine.conftest import Checkpoints, Paging, prompt_of
from tests.engine.step.test_engine import build

TOLERANCE = 1e-5
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 2.0, "frequency_penalty": 2.0, "logit_bias": {0: 50.0}},
    {"allowed_ids": [0, 3]},
]
AT_ONE: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"min_p": 0.1}]
"""Options next to temperature 1. With the first two, the draw has made the sum of the probabilities."""


def rows_of(options: dict[str, Any], num_rows: int, logprobs: int | None) -> list[SamplingRow]:
    params = SamplingParams(seed=1, logprobs=logprobs, **options)
    return [SamplingRow(params, params.generator(b), LogitsRules.of(params, [0, 0, 1], 1)) for b in range(num_rows)]


@pytest.mark.parametrize("options", [*OPTIONS, *({"temperature": 1.0} | one for one in AT_ONE)], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 4), (3, 1000), (2, 40_000), (35, 1024)])
def test_log_probs_are_those_of_log_softmax_in_float64(num_rows: int, vocab: int, options: dict[str, Any]) -> None:
    for count, spread in ((0, 1.0), (3, 8.0), (20, 30.0)):
        logits = spread * torch.randn(num_rows, vocab)
        logits[:, 3] = logits[:, 0]  # equals
        want = logits.double().log_softmax(-1)
        tokens, errors, logprobs = sample(logits, rows_of(options, num_rows, count))
        assert not errors
        assert sorted(logprobs) == list(range(num_rows))
        for b, found in logprobs.items():
            assert found.logprob == pytest.approx(float(want[b, tokens[b]]), abs=TOLERANCE)
            likeliest = logits[b].sort(descending=True, stable=True).indices[:count].tolist()
            assert [token for token, _ in found.top] == likeliest
            assert [share for _, share in found.top] == pytest.approx(want[b, likeliest].tolist(), abs=TOLERANCE)


def test_a_token_of_probability_0_is_no_alternative() -> None:
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 1], logits[0, 4] = 0.0, 0.0
    found = sample(logits, rows_of({}, 1, 4)).logprobs[0]
    assert [token for token, _ in found.top] == [1, 4]
    assert found.logprob == pytest.approx(-0.6931471805599453)


@pytest.mark.parametrize(("options", "num_frames"), [(OPTIONS[0], 400), (OPTIONS[2], 8)], ids=str)
def test_each_token_has_the_log_probs_of_the_models_own_logits(
    options: dict[str, Any], num_frames: int, checkpoint: Checkpoints
) -> None:
    """Beside other requests, after forks, and (with 8 frames) after preemptions."""
    engine = build(checkpoint("llama"), num_frames=num_frames)
    params = SamplingParams(max_tokens=30, seed=2, logprobs=3, **options)
    requests = [engine.submit(prompt_of(length), params, num_samples=2) for length in (45, 30)]
    others = engine.submit(prompt_of(14), SamplingParams(max_tokens=30))
    engine.run()
    assert engine.scheduler.preemptions or num_frames == 400
    assert others.completions[0].logprobs == []
    for completion in (c for request in requests for c in request.completions):
        prompt = completion.request.prompt_ids
        paging = Paging(engine.decoder, block_size=16, num_frames=12, num_sequences=1)
        logits = paging.step({0: prompt + completion.token_ids[:-1]})[len(prompt) - 1 :].double().log_softmax(-1)
        assert len(completion.logprobs) == len(completion.token_ids) == 30
        for want, token, found in zip(logits, completion.token_ids, completion.logprobs, strict=True):
            assert found.logprob == pytest.approx(float(want[token]), abs=1e-3)
            assert [share for _, share in found.top] == pytest.approx(want.topk(3).values.tolist(), abs=1e-3)
