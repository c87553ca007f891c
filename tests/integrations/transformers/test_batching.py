"""paged_batching(): generate_batch() of transformers gives the tokens of generate()."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers import paged_batching, patch
from pagedkv.integrations.transformers.batching import NEEDED
from pagedkv.integrations.transformers.geometry import HOST
from tests.integrations.transformers.families import model_of

NEW = 8
needs_batches = pytest.mark.skipif(HOST < NEEDED, reason="an old host has other batches")


def requests() -> list[list[int]]:
    """Return prompts of different lengths; some begin alike, and one is longer than a chunk of the host."""
    dice = random.Random(0)
    common = [dice.randrange(1, 99) for _ in range(40)]
    return [
        common[: dice.randrange(5, 40)] + [dice.randrange(1, 99) for _ in range(length)]
        for length in (3, 40, 9, 110, 1)
    ]


@needs_batches
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mistral", "gemma3_text", "gpt_oss"))]
)
def test_a_batch_gives_the_tokens_of_generate(name: str) -> None:
    model: Any = model_of(name)
    inputs = requests()
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist()
        for ids in inputs
    ]
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)
    own = model.config._attn_implementation
    with paged_batching(model):
        found = model.generate_batch(
            inputs, generation_config=config, continuous_batching_config=batching, progress_bar=False
        )
    ordered = sorted(found.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
    assert [output.generated_tokens for output in ordered] == expected
    assert model.config._attn_implementation == own


@needs_batches
def test_other_calls_inside_of_the_context_are_refused() -> None:
    model = model_of("llama")
    with paged_batching(model), pytest.raises(InvalidRequest, match="generate_batch"):
        model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2)
    with paged_batching(model), pytest.raises(InvalidRequest, match="patch before its context"):
        patch(model)
    with pytest.raises(InvalidRequest, match="Linear"), paged_batching(torch.nn.Linear(2, 2)):
        pass
    with pytest.raises(InvalidRequest, match="does not use the AttentionInterface"), paged_batching(model_of("falcon")):
        pass
