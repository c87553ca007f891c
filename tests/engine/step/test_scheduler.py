"""The scheduler's order: by priority, then by arrival; the sequences of a request run one behind the other.

Preemption and priorities: who makes room, how much is computed again, and the same tokens in any case.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest

from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from tests.engine.conftest import Checkpoints, prompt_of
from tests.engine.step.test_engine import NUM_TOKENS, build, idle, outputs

PARAMS = SamplingParams(max_tokens=12)


def running(engine: Engine) -> list[Any]:
    return [sequence.completion for sequence in engine.scheduler.running]


def test_samples_fork_to_the_place_behind_their_siblings(checkpoint: Checkpoints) -> None:
    """Two samples fail at their first token. The place of the third is beside the first, not three places behind it."""
    calls = itertools.count()

    def fail_twice(tokens: list[int], logits: Any) -> Any:
        if next(calls) in (1, 2):
            raise ValueError
        return logits

    engine = build(checkpoint("llama"))
    samples = engine.submit(prompt_of(9), SamplingParams(logits_processor=fail_twice), num_samples=4)
    others = [engine.submit(prompt_of(9), PARAMS, priority=priority) for priority in (0, 1)]
    engine.step()
    first, *failed, last = samples.completions
    assert [completion.finish_reason for completion in failed] == ["error", "error"]
    assert running(engine) == [first, last, *(other.completions[0] for other in others)]


BEAMS = SamplingParams(max_tokens=12, num_beams=3)


@pytest.mark.parametrize("priority", [-1, 0])
def test_a_small_request_is_admitted_before_a_larger_one_that_was_refused(
    priority: int, checkpoint: Checkpoints
) -> None:
    """The pool has room for the small one, so nothing is preempted."""
    engine = build(checkpoint("llama"), num_frames=10)
    first = engine.submit(prompt_of(90), PARAMS, priority=priority)
    engine.submit(prompt_of(100), PARAMS)
    engine.step()
    urgent = engine.submit(prompt_of(20), PARAMS, priority=-1)
    engine.step()
    assert set(running(engine)) == {first.completions[0], urgent.completions[0]}
    assert engine.scheduler.preemptions == 0
    engine.run()
    assert idle(engine)


def test_an_urgent_prompt_is_computed_before_others_decode(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"), limits=Limits(max_batch_tokens=4))
    others = [engine.submit(prompt_of(4), PARAMS, priority=1) for _ in range(4)]
    while not all(other.completions[0].token_ids for other in others):
        engine.step()
    urgent = engine.submit(prompt_of(12), PARAMS)
    for _ in range(3):
        engine.step()
    assert len(urgent.completions[0].token_ids) == 1
    engine.run()
    assert len({tuple(other.completions[0].token_ids) for other in others}) == 1
    assert idle(engine)


def test_an_end_that_no_listener_knows_is_work(checkpoint: Checkpoints) -> None:
    """Another request is cancelled between two steps: this takes out the one that is over its time, too."""
    heard: list[str] = []
    engine = build(checkpoint("llama"))
    late = engine.submit(prompt_of(9), timeout=60, on_text=lambda completion, _: heard.append(completion.finish_reason))
    other = engine.submit(prompt_of(9))
    engine.step()
    late.deadline = time.perf_counter() - 1
    engine.cancel(other)
    assert heard == [""]
    assert engine.has_work
    assert engine.step() == late.completions
    assert heard == ["", "error"]
    assert idle(engine)


TOGETHER: dict[str, dict[str, Any]] = {
    "a page less one token": {"common": 15, "own": 20},
    "many pages, nothing else": {"common": 65, "own": 0},
    "chunks of a prompt": {"common": 100, "own": 3, "limits": Limits(prefill_chunk=8)},
    "a step for one prompt": {"common": 90, "own": 30, "limits": Limits(max_batch_tokens=32)},
    "windows": {"name": "gemma3", "common": 60, "own": 8},
    "beams": {"common": 40, "own": 9, "params": BEAMS},
    "few tokens, many prompts": {"common": 16, "own": 4, "block_size": 4},
    "a pool of two prompts": {"common": 80, "own": 16, "num_frames": 16},
}


@pytest.mark.parametrize("case", TOGETHER)
def test_prompts_that_arrive_together_compute_their_prefix_once(case: str, checkpoint: Checkpoints) -> None:
    told = {"name": "llama", "block_size": 16, "num_frames": 400, "params": PARAMS, "limits": None, "options": {}}
    told |= TOGETHER[case]
    common, own, size = told["common"], told["own"], told["block_size"]
    prompts = [prompt_of(common) + prompt_of(own, seed) for seed in range(6)]
    made = {"block_size": size, "num_frames": told["num_frames"], "limits": told["limits"]}
    engine = build(checkpoint(told["name"]), **made)
    requests = engine.generate(prompts, told["params"], **told["options"])
    computed = sum(map(len, prompts)) - engine.cache.stats().tokens_matched
    assert computed <= common + len(prompts) * (own + size) or engine.scheduler.preemptions
    for prompt, request in zip(prompts, requests, strict=True):
        alone = build(checkpoint(told["name"]), **made).generate([prompt], told["params"], **told["options"])
        assert outputs([request]) == outputs(alone)
    assert idle(engine)


@pytest.mark.parametrize(("common", "waits"), [(16, False), (32, True)])
def test_a_prompt_waits_only_if_that_saves_more_than_a_step(common: int, waits: bool, checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"))
    prompts = [prompt_of(common) + prompt_of(90, seed) for seed in range(2)]
    requests = [engine.submit(prompt, PARAMS) for prompt in prompts]
    engine.step()
    assert len(running(engine)) == 2 - waits
    engine.run()
    assert requests[1].completions[0].cached_tokens == common * waits


def test_a_prompt_waits_for_no_less_urgent_one(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"), num_frames=400, limits=Limits(prefill_chunk=16))
    prompt = prompt_of(120)
    leader = engine.submit(prompt, PARAMS, priority=1)
    engine.step()
    later, urgent, other = (engine.submit(prompt, PARAMS, priority=priority) for priority in (1, 0, 2))
    unlike = engine.submit(prompt_of(30, 9), PARAMS, priority=3)
    engine.step()
    assert set(running(engine)) == {request.completions[0] for request in (leader, urgent, unlike)}
    engine.run()
    assert idle(engine)
    for request in (later, other):
        assert request.completions[0].cached_tokens == 112


@pytest.mark.parametrize("end", ["cancel", "fail", "preempt"])
def test_a_prompt_goes_on_when_the_one_it_waits_for_ends(end: str, checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"), num_frames=400, limits=Limits(prefill_chunk=16))
    prompts = [prompt_of(120) + prompt_of(3, seed) for seed in range(3)]
    leader, *others = [engine.submit(prompt, PARAMS) for prompt in prompts]
    engine.step()
    assert running(engine) == leader.completions
    if end == "cancel":
        engine.cancel(leader)
    elif end == "fail":
        leader.fail("on purpose")
    else:
        engine.scheduler.preempt(engine.scheduler.running[0])
    engine.run()
    assert all(len(request.completions[0].token_ids) == 12 for request in others)
    assert idle(engine)


LONG = SamplingParams(max_tokens=NUM_TOKENS)


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
        alone = outputs(build(checkpoint("llama")).generate([prompt_of(n) for n in (60, 50, 40)], LONG))
        slow = engine.submit(prompt_of(60), LONG)
        slower = engine.submit(prompt_of(50), LONG, priority=1)
        engine.step()
        engine.step()
        urgent = engine.submit(prompt_of(40), LONG, priority=-1)
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
    _, second, later = [engine.submit(prompt_of(64, n), LONG) for n in range(3)]
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
