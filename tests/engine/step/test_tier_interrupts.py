"""An interrupt of a step that fetches a prompt from a tier loses no token, no frame and no window of a layer group."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest

from pagedkv.cache import PagedKVCache
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.tiers import HostTier
from tests.engine.conftest import Checkpoints, prompt_of
from tests.engine.step.test_engine import build, idle, outputs
from tests.interrupts import count_instructions, interrupted

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.mark.parametrize("samples", [2, pytest.param(10**9, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("moment", ["begin", "settle"])
def test_an_interrupted_fetch_from_a_tier_loses_no_window(
    moment: str, samples: int, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that begins to fetch a prompt, or the one that commits it. All: every fourth instruction of them."""
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")
    plain, params = build(checkpoint("mistral")), SamplingParams(max_tokens=2)
    config, prompt = plain.decoder.config, prompt_of(100)
    want = outputs(plain.generate([prompt], params))

    def begun() -> tuple[Engine, Any]:
        groups = {"layer_groups": config.layer_groups(), "num_frames": 16}
        cache = PagedKVCache(config.specs(block_size=16), **groups, tiers=[HostTier("1MiB")])
        engine = Engine(plain.decoder, plain.tokenizer, cache)
        engine.generate([prompt], params)
        assert cache.tiers.flush(120)
        cache.evict(16)
        request = engine.submit(prompt, params)
        if moment == "settle":
            engine.step()
            time.sleep(0.002)  # the tier loads
        return engine, request

    engine, _ = begun()
    groups, total = engine.cache.groups, count_instructions(engine.step)
    assert groups[0].window
    engine.run()
    engine.cache.tiers.close()
    for at in range(1, total + 1, max(4, total // samples)):
        engine, request = begun()
        interrupted(at, engine.step)
        engine.run()
        assert outputs([request]) == want, f"instruction {at}"
        assert engine.cache.groups == groups
        assert engine.cache.state.groups[0, 0] == groups[0].window
        engine.cache.tiers.quiesce()
        gc.collect()
        engine.step()
        assert idle(engine), f"instruction {at}"
        engine.cache.tiers.close()
