"""longrope in an engine: the tokens' scores are those of transformers on both sides of its boundary."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import InvalidRequest
from tests.engine.conftest import Checkpoint, build, prompt_of

ORIGINAL = 64
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [1.5 + i for i in range(8)],
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder, options = tmp_path_factory.mktemp("longrope"), {"rope_parameters": LONGROPE}
    model = build("llama-tied", **options)  # type: ignore[arg-type]
    model.save_pretrained(folder)
    shutil.copy(BUNDLED / "tokenizer.json", folder)
    return Checkpoint(folder, model)


def load(checkpoint: Checkpoint, **options: Any) -> Engine:
    return Engine.load(checkpoint.folder, dtype="float32", num_frames=64, **options)


def difference(checkpoint: Checkpoint, engine: Engine, prompt: list[int]) -> float:
    """Return the largest difference of a log-probability of the prompt from that of transformers."""
    expected = checkpoint.logits(prompt)[:-1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    return float((torch.tensor(engine.score([prompt])[0][1:]) - expected).abs().max())


def test_scores_are_those_of_transformers_on_both_sides(checkpoint: Checkpoint) -> None:
    """transformers chooses by the length of the text. An engine chooses once, and shares pages between all lengths."""
    below, beyond = prompt_of(ORIGINAL), prompt_of(2 * ORIGINAL)
    short, long = load(checkpoint, context=ORIGINAL), load(checkpoint)
    assert difference(checkpoint, short, below) < 1e-3
    assert difference(checkpoint, long, beyond) < 1e-3
    assert difference(checkpoint, long, below) > 0.1, "the two lists differ"
    with pytest.raises(InvalidRequest, match=f"the prompt has {2 * ORIGINAL} tokens, the model ends at {ORIGINAL}"):
        short.submit(beyond)
    (request,) = short.generate([below[:50]], SamplingParams(max_tokens=100, ignore_eos=True))
    assert request.completions[0].finish_reason == "length"
    assert len(request.completions[0].token_ids) == ORIGINAL - 50
    assert request.completions[0].token_ids == checkpoint.generate(below[:50], ORIGINAL - 50)


def test_pages_of_one_set_are_not_found_by_an_engine_with_the_other(checkpoint: Checkpoint, tmp_path: Path) -> None:
    found = []
    for context in (ORIGINAL, ORIGINAL - 1, ORIGINAL + 1, None):
        with load(checkpoint, context=context, tiers=[f"disk:10MiB:{tmp_path}"]) as engine:
            (request,) = engine.generate([prompt_of(50)], SamplingParams(max_tokens=1))
            found.append(request.completions[0].cached_tokens)
    assert found == [0, 48, 0, 48]
