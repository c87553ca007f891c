"""Best of n: the samples of the plain way, of which the likeliest are returned."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pagedkv.errors import InvalidRequest
from pagedkv.model.engine import Engine, Limits
from pagedkv.sampling.params import SamplingParams
from tests.interrupts import count_instructions
from tests.model.conftest import prompt_of
from tests.model.test_engine import build, idle, outputs
from tests.model.test_trust import interrupt_and_compare

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.model.conftest import Checkpoint

PARAMS = SamplingParams(max_tokens=12, temperature=1.2, seed=3, best_of=6, stop_ids=list(range(0, 97, 9)))
"""Stop ids give outputs of different lengths: a sum would prefer the short ones, a mean does not."""


def mean(completion: Any) -> float:
    return sum(found.logprob for found in completion.logprobs) / len(completion.token_ids)


@pytest.fixture
def ranked(checkpoint: Callable[[str], Checkpoint]) -> list[Any]:
    """Return six plain samples, by their mean log-probability."""
    params = replace(PARAMS, best_of=None, logprobs=0)
    plain = build(checkpoint("llama")).generate([prompt_of(40)], params, num_samples=6)[0].completions
    assert len({len(completion.token_ids) for completion in plain}) > 2
    return sorted(plain, key=mean, reverse=True)


@pytest.mark.parametrize(
    "options", [{}, {"num_frames": 5, "prefix_cache": False}, {"limits": Limits(7, 6, 3)}], ids=str
)
@pytest.mark.parametrize("num_samples", [1, 3])
def test_the_best_are_the_samples_with_the_largest_mean(
    num_samples: int, options: dict[str, Any], ranked: list[Any], checkpoint: Callable[[str], Checkpoint]
) -> None:
    engine = build(checkpoint("llama"), **options)
    got = engine.generate([prompt_of(40)], PARAMS, num_samples=num_samples)[0].completions
    assert [c.token_ids for c in got] == [c.token_ids for c in ranked[:num_samples]]
    assert [c.score for c in got] == pytest.approx([mean(c) for c in ranked[:num_samples]], abs=1e-3)
    assert [c.index for c in got] == list(range(num_samples))
    assert (engine.scheduler.preemptions > 0) == ("num_frames" in options)
    assert idle(engine)


def test_candidates_share_the_frames_of_their_prompt(checkpoint: Callable[[str], Checkpoint]) -> None:
    engine = build(checkpoint("llama"))
    engine.submit(prompt_of(160), replace(PARAMS, best_of=8, stop_ids=()))
    engine.step()
    assert engine.cache.stats().mapped == 10
    engine.run()
    assert engine.cache.stats().peak_mapped == 10 + 8
    assert engine.meter.saved > 0.7


def test_a_listener_hears_of_the_best_when_all_have_ended(
    ranked: list[Any], checkpoint: Callable[[str], Checkpoint]
) -> None:
    engine, said = build(checkpoint("llama")), list[tuple[int, str]]()
    request = engine.submit(prompt_of(40), PARAMS, num_samples=2, on_text=lambda c, text: said.append((c.index, text)))
    finished = []
    while engine.has_work:
        assert not said
        finished += engine.step()
    assert said == [(index, completion.text) for index, completion in enumerate(ranked[:2])]
    assert finished == request.completions


@pytest.mark.parametrize("step", [0, 11])
def test_an_interrupt_at_some_instructions_of_a_step_changes_no_choice(
    step: int, checkpoint: Callable[[str], Checkpoint]
) -> None:
    def begun() -> tuple[Engine, list[Any]]:
        engine = build(checkpoint("llama"))
        requests = [engine.submit(prompt_of(n), replace(PARAMS, stop_ids=()), num_samples=2) for n in (40, 9)]
        for _ in range(step):
            engine.step()
        return engine, requests

    engine, want = begun()
    engine.run()
    total = count_instructions(begun()[0].step)
    for at in range(1, total + 1, total // 3):
        interrupt_and_compare(*begun(), want, at)


@pytest.mark.parametrize("steps", [0, 1, 4, 8])
def test_a_cancelled_choice_gives_everything_back(
    steps: int, ranked: list[Any], checkpoint: Callable[[str], Checkpoint]
) -> None:
    engine, said = build(checkpoint("llama")), list[str]()
    request = engine.submit(prompt_of(40), PARAMS, num_samples=3, on_text=lambda _, text: said.append(text))
    for _ in range(steps):
        engine.step()
    engine.cancel(request)
    engine.run()
    ended = [c.token_ids for c in ranked if len(c.token_ids) <= steps][:3]
    reasons = [c.finish_reason for c in request.completions]
    assert [c.token_ids for c in request.completions][: len(ended)] == ended
    assert reasons == ["stop"] * len(ended) + ["cancelled"] * (3 - len(ended))
    assert not said
    assert idle(engine)


def test_as_many_candidates_as_outputs_are_plain_samples(checkpoint: Callable[[str], Checkpoint]) -> None:
    got, want = (
        build(checkpoint("llama")).generate([prompt_of(9)], replace(PARAMS, best_of=best_of), num_samples=3)
        for best_of in (3, None)
    )
    assert outputs(got) == outputs(want)
    assert not got[0].completions[0].logprobs


BAD = {
    "best_of is 0": {"best_of": 0},
    "temperature is 0.0; it must be above 0 with best_of 6": {"temperature": 0.0},
    "num_samples is 3, best_of 2": {"best_of": 2},
    "best_of 9, and 8 sequences may run at once": {"best_of": 9},
}


@pytest.mark.parametrize("message", BAD)
def test_a_choice_that_cannot_be_is_refused_where_it_is_asked_for(
    message: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    engine = build(checkpoint("llama"), limits=Limits(max_sequences=8))
    with pytest.raises(InvalidRequest, match=message):
        engine.submit(prompt_of(40), replace(PARAMS, **BAD[message]), num_samples=3)
    assert idle(engine)
