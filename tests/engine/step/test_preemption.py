"""Preemption and priorities: who makes room, how much is computed again, and the same tokens in any case."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from tests.engine.conftest import Checkpoints, prompt_of
from tests.engine.step.test_engine import NUM_TOKENS, build, idle, outputs

PARAMS = SamplingParams(max_tokens=NUM_TOKENS)


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each step of `engine` appends the number of its tokens."""
    real, computed = engine.decoder.forward, list[int]()

    def forward(ids: Any, *args: Any, **options: Any) -> Any:
        computed.append(len(ids))
        return real(ids, *args, **options)

    monkeypatch.setattr(engine.decoder, "forward", forward)
    return computed


def test_an_urgent_request_overtakes_and_preempts(checkpoint: Checkpoints) -> None:
    order: list[int] = []
    for options in ({"num_frames": 12}, {"limits": Limits(max_sequences=1)}):
        engine = build(checkpoint("llama"), **options)
        alone = outputs(build(checkpoint("llama")).generate([prompt_of(n) for n in (60, 50, 40)], PARAMS))
        slow = engine.submit(prompt_of(60), PARAMS)
        slower = engine.submit(prompt_of(50), PARAMS, priority=1)
        engine.step()
        engine.step()
        urgent = engine.submit(prompt_of(40), PARAMS, priority=-1)
        order.clear()
        while engine.has_work:
            order += [completion.request.priority for completion in engine.step()]
        assert order == [-1, 0, 1]
        assert outputs([slow, slower, urgent]) == alone
        assert engine.scheduler.preemptions > 0
        assert idle(engine)


def test_a_sequence_is_preempted_only_if_that_makes_room(checkpoint: Checkpoints) -> None:
    """One urgent request waits for the quota of its tenant, another for places that a more urgent one holds."""
    for waiting in ({"tenant": b"small"}, {"num_samples": 2}):
        engine = build(checkpoint("llama"), limits=Limits(max_sequences=2))
        engine.cache.set_quota(b"small", hard=3)
        params, others = SamplingParams(max_tokens=12), ({"tenant": b"small", "priority": -1}, {"priority": 2})
        requests = [engine.submit(prompt_of(30, seed), params, **options) for seed, options in enumerate(others)]
        engine.step()
        requests.append(engine.submit(prompt_of(30, 2), params, **waiting))
        engine.step()
        assert [sequence.completion.request for sequence in engine.scheduler.running] == requests[:2]
        engine.run()
        assert engine.scheduler.preemptions == 0
        assert all(completion.finish_reason == "length" for r in requests for completion in r.completions)
        assert idle(engine)


def test_a_tenant_at_its_quota_makes_room_by_its_own_sequences(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"))
    engine.cache.set_quota(b"small", hard=3)
    params = SamplingParams(max_tokens=12)
    own = engine.submit(prompt_of(30), params, priority=1, tenant=b"small")
    other = engine.submit(prompt_of(30, 1), params, priority=2)
    engine.step()
    urgent = engine.submit(prompt_of(30, 2), params, tenant=b"small")
    engine.step()
    assert [sequence.completion.request for sequence in engine.scheduler.running] == [urgent, other]
    engine.run()
    assert all(completion.finish_reason == "length" for r in (own, other, urgent) for completion in r.completions)
    assert idle(engine)


def test_a_preempted_sequence_waits_before_those_that_came_later(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"), num_frames=11)
    _, second, later = [engine.submit(prompt_of(64, n), PARAMS) for n in range(3)]
    while not engine.scheduler.preemptions:
        engine.step()
    assert [sequence.completion.request for sequence in engine.scheduler.waiting] == [second, later]
    engine.run()
    assert idle(engine)


@pytest.mark.slow
def test_an_overloaded_pool_computes_little_twice(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 requests on a pool for three: in fewer steps than three at a time, with at most 15 % more tokens."""
    dice, found = random.Random(0), []
    prompts = [prompt_of(dice.randint(30, 60), seed=i) for i in range(200)]
    params = [SamplingParams(max_tokens=dice.randint(20, 40)) for _ in prompts]
    for limits in (Limits(max_sequences=3), Limits()):
        engine = build(checkpoint("llama"), num_frames=3 * 7, limits=limits)
        steps = counted(engine, monkeypatch)
        requests = engine.generate(prompts, params)
        monkeypatch.undo()
        found.append((outputs(requests), sum(steps), len(steps), engine.scheduler.preemptions))
        assert idle(engine)
    (want, least, calm, none), (got, computed, busy, preemptions) = found
    assert got == want
    assert none == 0 < preemptions
    assert computed <= 1.15 * least
    assert busy < calm
