"""The engine of docs/how-to/cache.md is short, and its tokens are those of a model without a cache."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from pagedkv import PagedKVCache

PAGE: Final = (Path(__file__).parents[2] / "docs/how-to/cache.md").read_text()
SECTION: Final = PAGE.partition("\n## A whole engine\n")[2].partition("\n## ")[0]
MODEL, ENGINE, USE = re.findall(r"^```python\n(.*?)^```", SECTION, re.M | re.S)
WINDOW: Final = 8


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Run the model, the engine and the reference as a reader copies them, without the run below them."""
    names: dict[str, Any] = {}
    exec(compile(MODEL + ENGINE + USE.partition("torch.manual_seed")[0], "cache.md", "exec"), names)
    return names


def test_the_engine_is_at_most_seventy_lines() -> None:
    assert len([line for line in ENGINE.splitlines() if line.strip()]) <= 70


@pytest.mark.parametrize("num_frames", [12, 20, 200])
def test_random_requests_get_the_tokens_of_a_model_without_a_cache(page: dict[str, Any], num_frames: int) -> None:
    """Prompts longer than a step, some of them equal, arrive together and later. Twelve frames hold one request."""
    torch.manual_seed(1)
    draw, model = random.Random(1), page["Model"]().eval()
    engine = page["Engine"](model, num_frames)
    system, requests = [draw.randrange(50) for _ in range(24)], []
    for arrival in range(18):
        prompt = system[: draw.choice((0, 13, 24))] + [draw.randrange(50) for _ in range(draw.randint(1, 12))]
        requests.append((page["Request"](prompt, draw.randint(1, 12)), len(prompt)))
        engine.submit(requests[-1][0])
        if arrival >= 9:
            engine.step()
    while engine.waiting or engine.running:
        engine.step()
    for request, length in requests:
        assert request.tokens == page["without_cache"](model, request.tokens[:length], request.end)
    assert (engine.preempted > 0) is (num_frames < 200)
    assert engine.cache.stats().mapped == 0
    engine.cache.check()


def test_a_common_prompt_that_arrives_together_is_computed_once(page: dict[str, Any]) -> None:
    engine = page["Engine"](page["Model"]().eval(), 64)
    for n in range(8):
        engine.submit(page["Request"]([*range(20), 30 + n], 1))
    while engine.waiting or engine.running:
        engine.step()
    assert engine.cache.stats().tokens_matched == 7 * 20


def test_a_step_that_fails_in_the_model_can_be_repeated(page: dict[str, Any]) -> None:
    model = page["Model"]().eval()
    engine, request = page["Engine"](model, 64), page["Request"]([1, 2, 3], 4)
    engine.submit(request)
    engine.model = None
    with pytest.raises(TypeError):
        engine.step()
    engine.model = model
    while engine.running:
        engine.step()
    assert request.tokens == page["without_cache"](model, [1, 2, 3], 7)


def test_a_request_larger_than_the_pool_is_refused(page: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="alone"):
        page["Engine"](page["Model"](), 8).submit(page["Request"](range(30), 10))


@pytest.mark.parametrize("num_frames", [24, 200])
def test_random_requests_are_served_in_layers_with_different_windows(page: dict[str, Any], num_frames: int) -> None:
    """`open` maps only the pages of the window there, and `admit` counts no more than those as known."""
    torch.manual_seed(1)
    draw, model = random.Random(1), page["Model"]().eval()
    engine = page["Engine"](model, num_frames)
    specs = [replace(engine.cache.spec, num_layers=1, window=window) for window in (None, WINDOW)]
    engine.cache = PagedKVCache(specs, num_frames=num_frames, watermark=0.05)
    engine.write = [engine.cache.write(layer) for layer in range(2)]
    engine.attend = [engine.cache.attention(layer) for layer in range(2)]
    requests = [page["Request"]([*range(44), *(draw.randrange(50) for _ in range(n))], 8) for n in range(1, 9)]
    lengths = [len(request.tokens) for request in requests]
    for request in requests:
        engine.submit(request)
    while engine.waiting or engine.running:
        engine.step()
    for request, length in zip(requests, lengths, strict=True):
        assert request.tokens == _windowed(model, request.tokens[:length], request.end)
    assert (engine.preempted > 0) is (num_frames == 24)
    engine.cache.check()


@torch.inference_mode()
def _windowed(model: Any, tokens: list[int], end: int) -> list[int]:
    """Return the tokens of a model without a cache: layer 1 sees WINDOW positions."""

    def attention(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
        seen = torch.ones(len(tokens), len(tokens)).tril().bool()
        mask = seen.triu(1 - WINDOW) if layer else seen
        q, k, v = (x.transpose(0, 1) for x in qkv)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(0, 1)

    while len(tokens) < end:
        x = model(torch.tensor(tokens), torch.arange(len(tokens)), attention)
        tokens = [*tokens, int(model.head(x[-1]).argmax())]
    return tokens
