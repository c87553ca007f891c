"""The reference engine on a GPU: in float32 its greedy tokens are those of transformers on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.tiers import HostTier
from tests.engine.conftest import prompt_of
from tests.engine.step.test_engine import build, outputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine.conftest import Checkpoint

LENGTHS = (5, 61, 100, 33)
NUM_TOKENS = 24


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2"])
def test_greedy_tokens_are_those_of_transformers(
    device: str, name: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    """Twice: the second time the prompts are found, and a GPU replays its graphs."""
    made = checkpoint(name)
    want = [made.generate(prompt_of(length), NUM_TOKENS) for length in LENGTHS]
    engine = build(made, device=device, limits=Limits(prefill_chunk=40))
    for _ in range(2):
        requests = engine.generate([prompt_of(length) for length in LENGTHS], SamplingParams(max_tokens=NUM_TOKENS))
        assert outputs(requests) == want
    assert requests[2].completions[0].cached_tokens >= 96 - 16
    engine.cache.check(3)


def test_a_pool_too_small_for_all_costs_time_and_no_token(device: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    made, params = checkpoint("llama"), SamplingParams(max_tokens=NUM_TOKENS)
    want = [made.generate(prompt_of(length), NUM_TOKENS) for length in LENGTHS]
    engine = build(made, device=device, num_frames=14)
    assert outputs(engine.generate([prompt_of(length) for length in LENGTHS], params)) == want
    assert engine.scheduler.preemptions > 0


def test_samples_of_one_prompt_share_it_and_differ(device: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    engine = build(checkpoint("llama"), device=device)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
    first, second = (outputs(engine.generate([prompt_of(61)], params, num_samples=4)) for _ in range(2))
    assert first == second
    assert len({tuple(each) for each in first}) > 1


def test_prompts_come_back_from_host_memory(device: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    made, params = checkpoint("llama"), SamplingParams(max_tokens=8)
    prompts = [prompt_of(100, seed=seed) for seed in range(6)]
    want = outputs(build(made, device=device).generate(prompts, params))
    engine = build(
        made, device=device, num_frames=16, tiers=[HostTier("32MiB")], model="m", limits=Limits(max_sequences=2)
    )
    for _ in range(2):
        assert outputs(engine.generate(prompts, params)) == want
        assert engine.cache.tiers.flush(600)
    assert engine.cache.tiers.stats()["host"].loaded > 0
    engine.cache.tiers.close()
