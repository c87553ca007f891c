"""Latency: phases add up to the time that passed, and percentiles stay within the error that they state."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from pagedkv.engine.requests.latency import Histogram, Latency
from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.requests.request import Completion
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine

PAGE = "Mira keeps a red lamp in the cellar. Otto lives in Ghent and works as a baker. Ghent has ten bridges."
QUESTIONS = ("Where is the lamp of Mira?", "Where does Otto live?", "How many bridges does Ghent have?")
ERROR = 2 ** (1 / 32) - 1


@pytest.fixture
def engine() -> Engine:
    return Engine.load(num_frames=64)


def reply(engine: Engine, prompt: str) -> Completion:
    return engine.generate([prompt])[0].completions[0]


def test_the_phases_add_up_to_the_time_of_the_request(engine: Engine) -> None:
    began = time.perf_counter()
    one = reply(engine, PAGE + QUESTIONS[0])
    spent, passed = one.latency, time.perf_counter() - began
    assert spent.total_s == pytest.approx(one.finished_at - one.request.submitted_at)
    assert 0 < spent.total_s < passed
    assert min(spent.queue_s, spent.prefill_s, spent.decode_s) > 0
    assert spent.queue_s + spent.prefill_s == pytest.approx(one.ttft_s)


def test_outputs_of_a_beam_search_count_as_all_others(engine: Engine) -> None:
    (request,) = engine.generate([PAGE + QUESTIONS[0]], SamplingParams(num_beams=3), num_samples=2)
    assert engine.stats().output_tokens == sum(len(one.token_ids) for one in request.completions)
    first = engine.stats().latency["first_token"]
    assert first.count == engine.stats().latency["total"].count == 2
    assert first.p50 == pytest.approx(request.completions[0].ttft_s, rel=ERROR)


def test_a_request_that_waits_for_another_waits_in_the_queue() -> None:
    engine = Engine.load(num_frames=64, limits=Limits(max_sequences=1))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    first, second = (r.completions[0] for r in engine.generate([PAGE, PAGE], params))
    assert second.latency.queue_s >= first.latency.prefill_s + first.latency.decode_s
    assert second.admitted_at >= first.finished_at


def test_the_end_of_a_request_ends_the_phase_that_it_was_in(engine: Engine) -> None:
    waiting = engine.submit(PAGE)
    assert waiting.completions[0].latency == Latency()
    engine.cancel(waiting)
    (ended,) = waiting.completions
    assert ended.latency == Latency(queue_s=ended.finished_at - waiting.submitted_at)
    running = engine.submit(PAGE, SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    (one,) = running.completions
    assert one.latency.decode_s == 0
    engine.step()
    so_far = one.latency
    assert so_far.decode_s > 0
    engine.cancel(running)
    assert one.latency.decode_s > so_far.decode_s


def test_stats_tell_each_latency_once_and_each_token_once(engine: Engine) -> None:
    requests = engine.generate([PAGE + question for question in QUESTIONS])
    completions = [one for request in requests for one in request.completions]
    cancelled = engine.submit(PAGE)
    engine.cancel(cancelled)
    now = engine.stats()
    assert (now.running, now.waiting, now.preemptions, now.requests) == (0, 0, 0, 4)
    assert now.finished == {"stop": 3, "cancelled": 1}
    assert now.output_tokens == sum(len(one.token_ids) for one in completions)
    assert now.prompt_tokens == sum(len(request.prompt_ids) for request in (*requests, cancelled))
    prompts = now.prompt_tokens - len(cancelled.prompt_ids)
    assert now.computed_tokens == prompts + now.output_tokens - 3 - sum(one.cached_tokens for one in completions)
    counts = {name: told.count for name, told in now.latency.items()}
    each = dict.fromkeys(("first_token", "queue", "prefill", "decode", "total"), 3)
    assert counts == {**each, "step": now.steps, "between_tokens": now.output_tokens - 3}
    slowest = max(one.ttft_s for one in completions)
    assert now.latency["first_token"].p99 == pytest.approx(slowest, rel=ERROR)


def test_drafts_that_come_true_arrive_with_the_token_before_them() -> None:
    engine = Engine.load(num_frames=64, speculate="prompt-lookup")
    (one,) = engine.generate([f"{PAGE} {PAGE} {QUESTIONS[0]}"])[0].completions
    assert engine.speculation.num_accepted > 0
    gaps = engine.stats().latency["between_tokens"]
    assert gaps.count == len(one.token_ids) - 1 - engine.speculation.num_accepted
    assert gaps.p50 > 0


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_a_percentile_is_within_the_stated_error(spread: float) -> None:
    dice, histogram = random.Random(3), Histogram()
    values = [min(1e5, max(1e-6, dice.lognormvariate(-4, spread))) for _ in range(5000)]
    for value in values:
        histogram.add(value)
    told = histogram.percentiles()
    exact = [np.percentile(values, percent, method="inverted_cdf") for percent in (50, 90, 99)]
    assert [told.p50, told.p90, told.p99] == pytest.approx(exact, rel=ERROR + 1e-9)
    assert told.count == len(values)
    assert histogram.sum == pytest.approx(sum(values))


def test_bounds_that_are_powers_of_two_are_counted_exactly() -> None:
    values = [2.0**exponent * factor for exponent in range(-10, 5) for factor in (0.999, 1.0, 1.001)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    bounds = range(-10, 5, 3)
    exact = [sum(value <= 2.0**exponent for value in values) for exponent in bounds]
    assert histogram.up_to(bounds) == [*exact, len(values)]
