"""retain_s: the pages of a request outlive others until the next one comes, and never stand in the way of a request."""

from __future__ import annotations

import time

import pytest

from pagedkv.engine.requests.request import Request
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import InvalidRequest
from tests.engine.conftest import Checkpoints, prompt_of
from tests.engine.step.test_engine import build

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
AGENT = prompt_of(100)


def served(engine: Engine, prompt: list[int], retain_s: float = 0.0) -> Request:
    request = engine.submit(prompt, PARAMS, retain_s=retain_s)
    while not request.finished:
        engine.step()
    return request


def crowd(engine: Engine) -> None:
    """Serve other prompts, which take the pool twice."""
    for first in range(6):
        served(engine, [first, *[first + 1] * 150])


def cached(engine: Engine) -> int:
    return served(engine, [*AGENT, 1, 2, 3]).completions[0].cached_tokens


@pytest.mark.parametrize(("retain_s", "found"), [(0.0, 0), (3600.0, 96)])
def test_a_retained_request_is_found_after_others(checkpoint: Checkpoints, retain_s: float, found: int) -> None:
    engine = build(checkpoint("llama"), num_frames=30, hints=0.3)
    served(engine, AGENT, retain_s)
    crowd(engine)
    assert cached(engine) == found
    assert engine.stats().retained == ({"accepted": 1} if found else {})
    engine.cache.check()


def test_the_time_ends_with_the_first_step_behind_it(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"), num_frames=30, hints=0.3)
    served(engine, AGENT, 0.01)
    assert engine.cache.stats().pinned == 6
    time.sleep(0.02)
    crowd(engine)
    assert engine.cache.stats().pinned == 0
    assert cached(engine) == 0


def test_a_request_that_needs_the_whole_pool_takes_what_is_retained(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"), num_frames=16, hints=1.0)
    for first in range(3):
        served(engine, [first, *[first + 1] * 70], 3600.0)
    assert engine.cache.stats().pinned > 10
    assert engine.cache.available == 16
    assert served(engine, prompt_of(240)).completions[0].finish_reason == "length"
    assert engine.stats().preemptions == 0
    engine.cache.check()


def test_a_request_that_was_cancelled_retains_nothing(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"), num_frames=30)
    request = engine.submit(AGENT, PARAMS, retain_s=60.0)
    engine.step()
    engine.cancel(request)
    assert engine.cache.stats().pinned == 0
    with pytest.raises(InvalidRequest, match="retain_s"):
        engine.submit(AGENT, PARAMS, retain_s="long")  # type: ignore[arg-type]
