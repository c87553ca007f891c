"""`patch(model)` on a GPU: `generate` gives the tokens of the model without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedkv.integrations.transformers import patch, unpatch
from tests.integrations.transformers.families import model_of, prompts

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_patched_model_generates_its_own_tokens(device: str, family: str, options: str) -> None:
    model = model_of(family).to(device)
    pads = (0,) if options == "prompt lookup" else (0, 9, 1)
    inputs = {name: tensor.to(device) for name, tensor in prompts(pads=pads).items()}
    how = {"max_new_tokens": 24, "do_sample": False} | OPTIONS[options]
    want = model.generate(**inputs, **how)
    patch(model, memory="64MiB")
    try:
        for _ in range(2):
            assert torch.equal(model.generate(**inputs, **how), want)
    finally:
        unpatch(model)
