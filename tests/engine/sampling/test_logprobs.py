"""Log-probabilities: those of float64 log_softmax over the model's own logits, whatever edits or draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.engine.sampling.logits import LogitsRules
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.sampling.sampler import SamplingRow, sample
from tests.engine.conftest import Paging, prompt_of
from tests.engine.step.test_engine import build

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine.conftest import Checkpoint

TOLERANCE = 1e-5
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 2.0, "frequency_penalty": 2.0, "logit_bias": {0: 50.0}},
    {"allowed_ids": [0, 3]},
]
AT_ONE: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5}, {"logit_bias": {0: 5.0}}]
"""Options beside temperature 1. With the first two, the draw has made the sum of the probabilities."""


def rows_of(options: dict[str, Any], num_rows: int, logprobs: int | None) -> list[SamplingRow]:
    params = SamplingParams(seed=1, logprobs=logprobs, **options)
    return [SamplingRow(params, params.generator(b), LogitsRules.of(params, [0, 0, 1], 1)) for b in range(num_rows)]


@pytest.mark.parametrize("options", [*OPTIONS, *({"temperature": 1.0} | one for one in AT_ONE)], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 4), (3, 1000), (2, 4096), (1, 151_936), (35, 1024)])
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


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list that gets the shape of the logits of each call of log_softmax."""
    found, real = list[tuple[int, ...]](), torch.Tensor.log_softmax

    def watched(z: torch.Tensor, *dims: int) -> torch.Tensor:
        found.append(tuple(z.shape))
        return real(z, *dims)

    monkeypatch.setattr(torch.Tensor, "log_softmax", watched)
    return found


@pytest.mark.parametrize("options", AT_ONE, ids=str)
def test_a_draw_at_temperature_1_reads_no_logit_again(options: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
    has_sum = options in AT_ONE[:2]
    sample(torch.randn(3, 4096), rows_of({"temperature": 1.0} | options, 3, 2))
    assert shapes == ([] if has_sum else [(3, 4096)])
    one_of_three = [*rows_of({}, 1, 2), *rows_of({"temperature": 1.0} | options, 1, 2), *rows_of({}, 1, None)]
    sample(torch.randn(3, 4096), one_of_three)
    assert shapes[-1] == ((1, 4096) if has_sum else (2, 4096))


def test_rows_that_ask_for_no_log_probs_compute_none(shapes: list[tuple[int, ...]]) -> None:
    rows = [*rows_of({}, 2, None), *rows_of({}, 1, 3), *rows_of({}, 1, None)]
    assert sorted(sample(torch.randn(4, 64), rows).logprobs) == [2]
    assert shapes == [(1, 64)]
    sample(torch.randn(2, 64), rows[:2])
    assert len(shapes) == 1


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("num_frames", [400, 8])
def test_each_token_has_the_log_probs_of_the_models_own_logits(
    options: dict[str, Any], num_frames: int, checkpoint: Callable[[str], Checkpoint]
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
