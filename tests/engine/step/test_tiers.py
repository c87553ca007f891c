"""An engine over tiers: the tokens are those of a pool without tiers, and a prompt on its way delays no other."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import InvalidRequest
from pagedkv.tiers import DiskTier, HostTier
from tests.engine.conftest import Checkpoint, Checkpoints, prompt_of
from tests.engine.step.test_engine import build, idle, outputs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pagedkv.tiers.slots import Move

PARAMS = SamplingParams(max_tokens=8, temperature=1.0, seed=3)


class Slow(HostTier):
    """A host tier whose loads wait for `may_load`."""

    def __init__(self, size: str) -> None:
        super().__init__(size)
        self.may_load = threading.Event()

    def _load(self, moves: Sequence[Move]) -> None:
        assert self.may_load.wait(600)
        super()._load(moves)


def settled(engine: Engine) -> bool:
    """Close an engine, and return whether its tiers ended and it was idle."""
    return engine.cache.tiers.quiesce() and idle(engine) and engine.close()


def test_evicted_prompts_come_back_with_equal_tokens(checkpoint: Checkpoints, tmp_path: Path) -> None:
    prompts = [prompt_of(100, seed=seed) for seed in range(6)]
    want = outputs(build(checkpoint("llama")).generate(prompts, PARAMS))
    frame = build(checkpoint("llama")).cache.frame_bytes
    tiers = [HostTier(20 * frame), DiskTier(tmp_path, "32MiB")]  # the host holds half of the pages
    engine = build(checkpoint("llama"), num_frames=16, tiers=tiers, model="m", limits=Limits(max_sequences=2))
    for turn in range(3):
        requests = engine.generate(prompts, PARAMS)
        assert outputs(requests) == want
        assert engine.cache.tiers.flush(120)
        if turn:
            assert sum(request.completions[0].cached_tokens for request in requests) > 96
    engine.cache.tiers.quiesce()
    assert idle(engine)
    loaded = {name: stats.loaded for name, stats in engine.cache.tiers.stats().items()}
    assert loaded["host"] > 0
    assert loaded["disk"] > 0
    engine.cache.tiers.close()


def engine_that_evicted(model: Checkpoint, *lengths: int, tier: HostTier | None = None, **options: Any) -> Engine:
    """Return an engine whose pool of 20 frames is empty, and whose tier has prompts of these lengths."""
    engine = build(model, num_frames=20, tiers=[tier or HostTier("4MiB")], **options)
    for length in lengths:
        engine.generate([prompt_of(length)], SamplingParams(max_tokens=1))
        assert engine.cache.tiers.flush(120)
    engine.cache.evict(20)
    return engine


def stepped_until_held(engine: Engine) -> None:
    """Step until the pages of a waiting prompt have arrived: in as few steps as can be, as others have few tokens."""
    while not engine.cache.tiers.num_holds:
        engine.step()
        for sequence in engine.scheduler.waiting:
            assert sequence.fetch is None or sequence.fetch.wait(120)


def test_pages_that_have_arrived_are_there_when_their_prompt_is_admitted(checkpoint: Checkpoints) -> None:
    want = outputs(build(checkpoint("llama")).generate([prompt_of(100)], PARAMS))
    engine = engine_that_evicted(checkpoint("llama"), 100, limits=Limits(max_sequences=1))
    urgent = engine.submit(prompt_of(100, seed=9), SamplingParams(max_tokens=60, ignore_eos=True), priority=-1)
    engine.step()
    waiting = engine.submit(prompt_of(100), PARAMS)
    stepped_until_held(engine)
    for seed in range(10, 14):  # their cached pages are used later than the ones that were fetched
        while not urgent.finished:
            engine.step()
        urgent = engine.submit(prompt_of(150, seed=seed), PARAMS, priority=-1)
    engine.run()
    assert waiting.completions[0].cached_tokens == 96
    assert outputs([waiting]) == want
    assert settled(engine)


def test_a_sequence_that_lacks_frames_gets_those_of_a_prompt_that_waits(checkpoint: Checkpoints) -> None:
    engine = engine_that_evicted(checkpoint("llama"), 100, limits=Limits(max_sequences=1))
    long = engine.submit(prompt_of(190, seed=5), SamplingParams(max_tokens=110, ignore_eos=True))
    engine.step()
    waiting = engine.submit(prompt_of(100), PARAMS)
    stepped_until_held(engine)
    while not long.finished:
        engine.step()
    assert (len(long.completions[0].token_ids), engine.scheduler.preemptions) == (110, 0)
    engine.run()
    assert waiting.finished
    assert settled(engine)


@pytest.mark.parametrize("end", ["cancel", "deadline", "interrupt", "close"])
def test_a_request_that_ends_while_it_waits_holds_nothing(end: str, checkpoint: Checkpoints) -> None:
    engine = engine_that_evicted(checkpoint("llama"), 100, limits=Limits(max_sequences=1))
    texts = list[object]()

    def interrupt(*_: object) -> None:
        texts.append(None)
        if end == "interrupt" and len(texts) == 30:
            raise KeyboardInterrupt

    running = engine.submit(
        prompt_of(20, seed=5), SamplingParams(max_tokens=60, ignore_eos=True), on_text=interrupt, priority=-1
    )
    engine.step()
    waiting = engine.submit(prompt_of(100), PARAMS, timeout=1000.0)
    stepped_until_held(engine)
    if end == "cancel":
        engine.cancel(waiting)
    elif end == "deadline":
        waiting.deadline = 0.0
        engine.step()
    elif end == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            engine.run()
        engine.scheduler.restart([])  # the first thing that the next step does, without the fetches after it
    else:
        assert engine.close()
    assert engine.cache.tiers.num_holds == engine.cache.tiers.num_held() == 0
    engine.run()
    assert running.finished
    assert waiting.finished
    assert settled(engine)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_any_crowd_of_tenants_gets_the_tokens_of_a_large_pool(seed: int, checkpoint: Checkpoints) -> None:
    """Prompts with shared beginnings, priorities, quotas and cancellations, over a pool that holds two of them."""
    draw, large = random.Random(seed), build(checkpoint("llama"))
    engine = build(
        checkpoint("llama"), num_frames=20, tiers=[HostTier("2MiB", limit=draw.choice([None, "4MiB"]))], watermark=0.1,
        limits=Limits(max_sequences=draw.choice([1, 2, 4]), prefill_chunk=draw.choice([None, 40])),
    )  # fmt: skip
    engine.cache.set_quota(b"small", hard=14)
    trunks = [prompt_of(120, seed=50 + at) for at in range(4)]
    requests, wanted = [], []
    for _ in range(40 if seed else 14):
        prompt = draw.choice(trunks)[: draw.randrange(20, 120)] + prompt_of(draw.randrange(1, 30), seed=seed)
        params = SamplingParams(max_tokens=draw.randrange(1, 20), ignore_eos=True)
        tenant, priority = draw.choice([b"", b"small", b"other"]), draw.randrange(3)
        requests.append(engine.submit(prompt, params, tenant=tenant, priority=priority))
        wanted.append(outputs(large.generate([prompt], params)))
        for _ in range(draw.randrange(6)):
            engine.step()
        if draw.random() < 0.1:
            engine.cancel(draw.choice(requests))
    engine.run()
    for request, want in zip(requests, wanted, strict=True):
        if request.completions[0].finish_reason == "length":
            assert outputs([request]) == want
        else:
            assert request.completions[0].finish_reason == "cancelled"
    engine.cache.tiers.quiesce()
    assert idle(engine)
    assert engine.cache.tiers.stats()["host"].loaded > 0
    engine.close()


def test_a_prompt_at_the_head_gets_the_frames_that_later_ones_hold(checkpoint: Checkpoints) -> None:
    engine = engine_that_evicted(checkpoint("llama"), 200, 100, limits=Limits(max_sequences=1))
    running = engine.submit(prompt_of(90, seed=5), SamplingParams(max_tokens=30, ignore_eos=True), priority=-2)
    engine.step()
    later = engine.submit(prompt_of(100), PARAMS)
    stepped_until_held(engine)
    head = engine.submit(prompt_of(200), PARAMS, priority=-1)  # 12 pages, and the pool has 8 frames beside the 6 held
    while not running.finished:
        engine.step()
    engine.run()
    assert head.completions[0].cached_tokens == 192
    assert later.finished
    assert settled(engine)


def test_a_prompt_on_its_way_delays_no_other_and_can_be_cancelled(checkpoint: Checkpoints) -> None:
    tier = Slow("4MiB")
    engine = build(checkpoint("llama"), num_frames=40, tiers=[tier])
    [first] = engine.generate([prompt_of(100)], PARAMS)
    assert engine.cache.tiers.flush(120)
    engine.cache.evict(40)
    waiting, gone, other = (engine.submit(prompt_of(length, seed=length - 100), PARAMS) for length in (100, 100, 120))
    engine.cancel(gone)
    while not other.finished:
        engine.step()
    assert not waiting.finished
    tier.may_load.set()
    engine.run()
    assert outputs([waiting]) == outputs([first])
    assert waiting.completions[0].cached_tokens == 96
    assert settled(engine)


def test_a_later_prompt_takes_no_frames_of_one_on_its_way(checkpoint: Checkpoints) -> None:
    tier = Slow("4MiB")
    engine = engine_that_evicted(checkpoint("llama"), 100, tier=tier)
    first = engine.submit(prompt_of(100), PARAMS)
    later = engine.submit(prompt_of(240, seed=5), PARAMS)  # 16 pages, and the pool has 14 frames beside the loads
    for _ in range(3):
        engine.step()
    tier.may_load.set()
    engine.run()
    assert first.completions[0].cached_tokens == 96
    assert later.finished
    assert settled(engine)


class Patient(Slow):
    """A tier whose loads wait for `may_load`, or until they are cancelled."""

    num_threads = 8

    def _load(self, moves: Sequence[Move]) -> None:
        while not self.may_load.wait(0.001):
            if moves[0].job.is_cancelled:
                raise OSError(125, "ECANCELED")
        super()._load(moves)


def test_a_sequence_that_lacks_a_frame_takes_those_of_the_last_fetch(checkpoint: Checkpoints) -> None:
    tier = Patient("4MiB")
    engine = engine_that_evicted(checkpoint("llama"), 100, 101, tier=tier)
    long = engine.submit(prompt_of(60, seed=5), SamplingParams(max_tokens=80, ignore_eos=True))
    engine.step()
    first, last = (engine.submit(prompt_of(length), PARAMS) for length in (100, 101))
    engine.step()
    assert engine.cache.tiers.num_fetches == 2  # 12 frames; the pool has 8 for the 9 pages of `long`
    while not long.finished:
        engine.step()
    assert engine.cache.tiers.num_fetches == 1
    tier.may_load.set()
    engine.run()
    assert first.completions[0].cached_tokens == 96
    assert last.finished
    assert settled(engine)


class Broken(HostTier):
    """A host tier whose loads fail."""

    asked = 0

    def _load(self, moves: Sequence[Move]) -> None:
        self.asked += len(moves)
        raise OSError(5, "EIO")


def test_a_load_that_hangs_delays_no_step_and_only_its_own_frames_are_lacking(checkpoint: Checkpoints) -> None:
    tier = Slow("4MiB")
    engine = engine_that_evicted(checkpoint("llama"), 100, tier=tier)
    long = engine.submit(prompt_of(120, seed=5), SamplingParams(max_tokens=100))
    engine.step()
    engine.submit(prompt_of(100), PARAMS)
    for _ in range(150):  # the pool has 20 frames, and the load that hangs keeps 6 of them
        if not long.finished:
            engine.step()
    assert not tier.may_load.is_set()
    assert len(long.completions[0].token_ids) > 10
    tier.may_load.set()
    engine.run()
    assert len(long.completions[0].token_ids) == 100
    assert settled(engine)


def test_a_tier_that_fails_is_asked_once_for_a_prompt(checkpoint: Checkpoints) -> None:
    tier = Broken("4MiB")
    engine = engine_that_evicted(checkpoint("llama"), 200, tier=tier, limits=Limits(max_sequences=1))
    engine.submit(prompt_of(100, seed=5), SamplingParams(max_tokens=60, ignore_eos=True))
    engine.step()
    again = engine.submit(prompt_of(200), PARAMS)  # more pages than the pool can give now
    engine.run()
    assert again.finished
    assert 0 < tier.asked <= 12
    engine.close()


def test_an_engine_that_is_closed_has_stored_its_pages_and_says_what_it_computed_with(tmp_path: Path) -> None:
    prompt, disk = prompt_of(64), f"disk:4MiB:{tmp_path}"
    own, other = {"dtype": "bfloat16"}, {"dtype": "float32"}  # that of the checkpoint by its name, and another one
    for options, known in (({}, 0), ({}, 48), (own, 48), ({"window": 1000}, 0), (other, 0), ({}, 0)):
        with Engine.load(num_frames=80, tiers=[disk], **options) as engine:
            [request] = engine.generate([prompt], PARAMS)
            assert request.completions[0].cached_tokens == known, options
    assert engine.generate([prompt], PARAMS)[0].finished  # without tiers


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    tiers = [f"disk:4MiB:{tmp_path}"]
    used = pytest.raises(InvalidRequest, match="a tier of disk:.* cannot be used.*another process uses")
    with Engine.load(num_frames=80, tiers=tiers), used:
        Engine.load(num_frames=80, tiers=tiers)
