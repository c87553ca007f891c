"""Beam search: the outputs of transformers, token for token, with the frames of the prompt shared by all beams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import InvalidRequest
from tests.engine.conftest import Checkpoint, Checkpoints, prompt_of
from tests.engine.drafts.test_speculation import Oracle
from tests.engine.step.test_engine import build, idle, outputs
from tests.engine.step.test_trust import assert_equal, submitted

MANY = {"max_tokens": 24, "stop_ids": list(range(0, 97, 7))}
"""Outputs end at each length: one token of seven ends them."""
MOST = {"max_tokens": 24, "stop_ids": [token for token in range(97) if token % 7]}
"""Nearly all tokens end an output, so that the best beams may have many ends."""


def by_transformers(checkpoint: Checkpoint, prompt: list[int], params: SamplingParams, returned: int) -> list[Any]:
    """Return (tokens, score) of each output."""
    ids = torch.tensor([prompt])
    found = checkpoint.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=params.max_tokens,
        num_beams=params.num_beams,
        num_return_sequences=returned,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(params.stop_ids) or None,
        pad_token_id=96 + 1 if params.stop_ids else None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = [row[len(prompt) :].tolist() for row in found.sequences]
    cut = [row[: row.index(97)] if 97 in row else row for row in rows]
    return list(zip(cut, found.sequences_scores.tolist(), strict=True))


def search(engine: Engine, prompt: list[int], params: SamplingParams, returned: int = 1) -> list[Any]:
    request = engine.generate([prompt], params, num_samples=returned)[0]
    return [(c.token_ids, c.score) for c in request.completions]


def same(got: list[Any], want: list[Any]) -> bool:
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
    assert [score for _, score in got] == pytest.approx([score for _, score in want], rel=1e-5)
    return True


MODELS = [("llama", 4), ("gemma2", 3), ("mistral", 2)]
"""Checkpoints, and numbers of beams."""
QUICK = [("llama", 4, 1.0, False), ("llama", 4, 0.0, True), ("llama", 4, 2.0, "never"), ("llama", 4, -0.7, False)]
"""The searches of each run. Other tests cover pages behind windows."""


@pytest.mark.parametrize(
    ("name", "num_beams", "length_penalty", "early_stopping"),
    [
        pytest.param(*model, penalty, stopping, marks=[] if (*model, penalty, stopping) in QUICK else pytest.mark.slow)
        for model in MODELS
        for penalty in (1.0, 0.0, 2.0, -0.7)
        for stopping in (False, True, "never")
    ],
)
def test_beams_are_those_of_transformers(
    name: str, num_beams: int, length_penalty: float, early_stopping: Any, checkpoint: Checkpoints
) -> None:
    rules = {"num_beams": num_beams, "length_penalty": length_penalty, "early_stopping": early_stopping}
    engine = build(checkpoint(name))
    for prompt, options in ((prompt_of(40), MANY), (prompt_of(5), {"max_tokens": 24}), (prompt_of(16), MOST)):
        params = SamplingParams(**options, **rules)
        want = by_transformers(checkpoint(name), prompt, params, num_beams)
        assert same(search(engine, prompt, params, num_beams), want)
    assert idle(engine)


PARAMS = SamplingParams(max_tokens=12, num_beams=4)


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoints) -> list[Any]:
    """Return the requests of `crowd`, each computed alone."""
    requests = []
    for length in (40, 9, 70):
        requests += build(checkpoint("llama")).generate([prompt_of(length)], PARAMS, num_samples=2)
    return requests


def crowd(engine: Engine) -> list[Any]:
    return [engine.submit(prompt_of(length), PARAMS, num_samples=2) for length in (40, 9, 70)]


@pytest.mark.parametrize(
    "options",
    [
        {"limits": Limits(max_batch_tokens=7, prefill_chunk=3)},
        {"num_frames": 14},
        {"num_frames": 22, "prefix_cache": False},
        {"drafter": Oracle()},
    ],
    ids=lambda options: (
        " ".join(f"{name} {value}" for name, value in options.items() if name != "drafter") or "drafter"
    ),
)
def test_a_search_has_the_same_beams_beside_others_and_with_few_frames(
    options: dict[str, Any], alone: list[Any], checkpoint: Checkpoints
) -> None:
    plain = build(checkpoint("llama"))
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3)
    want = plain.generate([prompt_of(20), prompt_of(33)], params)
    if "drafter" in options:
        options["drafter"].learn(want)
    engine = build(checkpoint("llama"), **options)
    others = [engine.submit(prompt_of(20), params)]
    got = crowd(engine)
    others.append(engine.submit(prompt_of(33), params))
    engine.run()
    assert outputs(others) == outputs(want)
    assert outputs(got) == outputs(alone)
    if "num_frames" in options:
        assert engine.scheduler.preemptions > 0
    assert idle(engine)


def test_beams_share_the_frames_of_what_they_have_in_common(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"))
    engine.submit(prompt_of(160), SamplingParams(max_tokens=12, num_beams=8))
    engine.step()
    assert engine.cache.stats().mapped == 10
    for _ in range(8):
        engine.step()
        assert engine.cache.stats().mapped <= 10 + 8
    assert engine.meter.saved > 0.7
    engine.run()
    assert idle(engine)


def test_a_search_speaks_at_its_end(checkpoint: Checkpoints) -> None:
    engine, said = build(checkpoint("llama")), list[Any]()
    request = engine.submit(prompt_of(9), PARAMS, num_samples=3, on_text=lambda c, text: said.append((c.index, text)))
    steps = 0
    while engine.has_work:
        assert not said
        engine.step()
        steps += 1
    assert said == [(c.index, c.text) for c in request.completions]
    assert steps == 12
    assert all(
        len(c.text.split()) == len(c.token_ids) == 12 and c.finish_reason == "length" for c in request.completions
    )
    assert request.completions[0].score > request.completions[1].score > request.completions[2].score


def test_a_search_without_usable_logits_ends_alone(
    alone: list[Any], checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(checkpoint("llama"))
    doomed = engine.submit([7] * 30, PARAMS, num_samples=2)
    got, real = crowd(engine), engine.decoder.forward
    for _ in range(3):
        engine.step()

    def forward(*args: Any, **options: Any) -> Any:
        logits = real(*args, **options).clone()
        logits[2] = torch.nan  # of its third beam
        return logits

    monkeypatch.setattr(engine.decoder, "forward", forward)
    assert engine.step() == doomed.completions
    monkeypatch.undo()
    assert [c.finish_reason for c in doomed.completions] == ["error"] * 2
    assert "of a beam hold NaN" in doomed.completions[0].error
    engine.run()
    assert_equal(got, alone, engine)


@pytest.mark.parametrize("steps", [0, 2, 5])
def test_a_cancelled_search_gives_everything_back(steps: int, checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"), limits=Limits(prefill_chunk=20))
    doomed = engine.submit(prompt_of(50), PARAMS, num_samples=2)
    late = engine.submit(prompt_of(30), PARAMS, timeout=1e-9)
    others = submitted(engine)
    for _ in range(steps):
        engine.step()
    engine.cancel(doomed)
    engine.run()
    assert [c.finish_reason for c in doomed.completions] == ["cancelled"] * 2
    assert late.completions[0].finish_reason == "error"
    assert all(request.finished for request in others)
    assert idle(engine)


BAD = {
    "num_beams is 0": {"num_beams": 0},
    "length_penalty is 'x'": {"length_penalty": "x"},
    "early_stopping is 'soon'": {"early_stopping": "soon"},
    "temperature is 1.0; it must be 0 with num_beams 2": {"num_beams": 2, "temperature": 1.0},
    "stop is": {"num_beams": 2, "stop": "x"},
    "repetition_penalty is": {"num_beams": 2, "repetition_penalty": 1.2},
    "num_samples is 3, num_beams 2": {"num_beams": 2},
    "num_beams is 9, a step takes 8 sequences": {"num_beams": 9},
    "num_beams is 3, but only 2 of the 97 tokens in": {"num_beams": 3, "stop_ids": list(range(95))},
    "8 beams of 40 tokens and up to 40 new ones take 26 frames": {"num_beams": 8, "max_tokens": 40},
}


@pytest.mark.parametrize("message", BAD)
def test_a_search_that_cannot_be_is_refused_where_it_is_asked_for(message: str, checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"), num_frames=20, limits=Limits(max_sequences=8))
    with pytest.raises(InvalidRequest, match=message):
        engine.submit(prompt_of(40), SamplingParams(**BAD[message]), num_samples=3 if "samples" in message else 1)
    assert idle(engine)
