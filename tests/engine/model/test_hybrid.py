"""Hybrid models through layer groups: the tokens of transformers, from fewer frames."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pagedkv.cache import PagedKVCache
from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import InvalidRequest
from tests.engine.conftest import Checkpoint, Checkpoints, prompt_of
from tests.engine.drafts.test_speculation import Oracle
from tests.engine.step.test_engine import LENGTHS, NUM_TOKENS, build, expected, idle, outputs

pytestmark = pytest.mark.many_steps
HYBRIDS = ("gemma3", pytest.param("mistral", marks=pytest.mark.slow))
PARAMS = SamplingParams(max_tokens=NUM_TOKENS)


def grouped(checkpoint: Checkpoint, num_frames: int, limits: Limits | None = None) -> Engine:
    """Build an engine over a cache whose windowed layers give frames back."""
    engine = build(checkpoint, block_size=4, num_frames=8)
    config = engine.decoder.config
    cache = PagedKVCache(config.specs(block_size=4), layer_groups=config.layer_groups(), num_frames=num_frames)
    return Engine(engine.decoder, engine.tokenizer, cache, limits=limits)


def bytes_at_peak(engine: Engine) -> int:
    return engine.cache.stats().peak_mapped * engine.cache.frame_bytes


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_model_gives_the_same_tokens_from_fewer_bytes(name: str, checkpoint: Checkpoints) -> None:
    limits = Limits(prefill_chunk=16)
    engines = build(checkpoint(name), block_size=4, limits=limits), grouped(checkpoint(name), 1200, limits)
    for engine in engines:
        assert outputs(engine.generate([prompt_of(length) for length in LENGTHS], PARAMS)) == expected(
            name, checkpoint(name)
        )
        assert idle(engine)
    plain, hybrid = map(bytes_at_peak, engines)
    assert hybrid < (0.5 if name == "mistral" else 0.75) * plain


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_in_a_pool_too_small_for_all_costs_time_and_no_token(name: str, checkpoint: Checkpoints) -> None:
    spacious = grouped(checkpoint(name), 1200, Limits(max_batch_tokens=16))
    most = spacious.cache.frames_for(max(LENGTHS) + NUM_TOKENS - 1, at_once=16)
    engine = grouped(checkpoint(name), most + 4, Limits(max_batch_tokens=16))
    assert outputs(engine.generate([prompt_of(length) for length in LENGTHS], PARAMS)) == expected(
        name, checkpoint(name)
    )
    assert engine.scheduler.preemptions > 0
    assert idle(engine)


def test_an_engine_has_the_groups_of_its_model_by_default(checkpoint: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("gemma2").folder, tmp_path, dirs_exist_ok=True)
    shutil.copy(BUNDLED / "tokenizer.json", tmp_path)
    config = checkpoint("gemma2").decoder().config
    cache = Engine.load(tmp_path, num_frames=64, speculate="prompt-lookup").cache
    assert cache.specs == config.specs(dtype="float32")
    assert cache.layer_groups == config.layer_groups()
    assert Engine.load(tmp_path, num_frames=64, grouped=False).cache.specs == (config.spec(dtype="float32"),)


@pytest.mark.parametrize("name", HYBRIDS)
def test_drafts_and_beams_cross_windows(name: str, checkpoint: Checkpoints) -> None:
    params = SamplingParams(max_tokens=50, num_beams=3)
    beams = build(checkpoint(name)).generate([prompt_of(33)], params, num_samples=3)
    assert outputs(grouped(checkpoint(name), 900).generate([prompt_of(33)], params, num_samples=3)) == outputs(beams)
    plain = build(checkpoint(name)).generate([prompt_of(33)], PARAMS)
    oracle, engine = Oracle(num_tokens=5, wrong=0.2).learn(plain), grouped(checkpoint(name), 900)
    drafting = Engine(engine.decoder, engine.tokenizer, engine.cache, drafter=oracle)
    assert outputs(drafting.generate([prompt_of(33)], PARAMS)) == outputs(plain)
    assert drafting.speculation.num_accepted > 10
    assert idle(drafting)


def test_a_cache_that_gives_back_frames_a_layer_still_sees_is_refused(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("gemma2"), block_size=4)
    config = engine.decoder.config
    # Without layer_groups, the first layers have no window, unlike the model's.
    in_order = PagedKVCache(config.specs(block_size=4), num_frames=8)
    assert in_order.layer_groups != config.layer_groups()
    with pytest.raises(InvalidRequest, match="window of layer"):
        Engine(engine.decoder, engine.tokenizer, in_order)
