"""Tiers under a patched model: pages outlive pool and process, and are found under the name of their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers import PagedCache, Patched, patch
from tests.integrations.transformers.families import model_of, prompts

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
PROMPT = prompts(80, (0,))["input_ids"]


def tokens(model: Any) -> list[list[int]]:
    found: list[list[int]] = model.generate(PROMPT, **OPTIONS).tolist()
    return found


def known(handle: Patched) -> int:
    with PagedCache(handle.model.config, pool=handle.pool) as cache:
        return cache.find(PROMPT)


def on_disk(model: Any, folder: Path, weights: str = "a") -> Patched:
    return patch(model, memory="16MiB", tiers=[f"disk:16MiB:{folder}"], weights=weights)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_patched_model_finds_its_pages_after_a_restart(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    want = tokens(model)
    handle = on_disk(model, tmp_path)
    assert tokens(model) == want
    handle.unpatch()
    again = on_disk(model_of(family), tmp_path)
    assert known(again) == 64
    loaded = sum(each.loaded for each in again.pool.kv.tiers.stats().values())
    assert loaded == 4 * len(again.pool.kv.specs)
    assert tokens(again.model) == want
    again.unpatch()


def test_pages_come_back_from_host_memory_after_eviction() -> None:
    handle = patch(model_of("llama"), memory="16MiB", tiers=["host:16MiB"])
    want = tokens(handle.model)
    assert handle.pool.kv.tiers.flush(20)
    handle.pool.kv.evict(handle.pool.kv.num_frames)
    assert known(handle) == 64
    assert tokens(handle.model) == want
    assert handle.pool.kv.tiers.num_holds == 0
    handle.unpatch()


def test_pages_of_other_weights_are_not_found_on_disk(tmp_path: Path) -> None:
    model = model_of("llama")
    handle = on_disk(model, tmp_path)
    tokens(model)
    handle.unpatch()
    other = on_disk(model, tmp_path / "other", weights="b")
    assert known(other) == 0
    other.unpatch()
    changed = on_disk(model, tmp_path)
    with torch.no_grad():
        next(iter(model.parameters())).add_(1.0)  # after patch, before the first call
    assert known(changed) == 0
    changed.unpatch()


def test_tiers_that_no_prompt_can_use_are_refused(tmp_path: Path) -> None:
    model = model_of("llama")
    with pytest.raises(InvalidRequest, match="give weights="):
        on_disk(model, tmp_path, weights="")
    with pytest.raises(InvalidRequest, match="share none"):
        patch(model, tiers=["host:1MiB"], prefix_cache=False)
    with pytest.raises(InvalidRequest, match="a pool and options of a pool"):
        patch(model, pool=patch(model_of("llama")).pool, tiers=["host:1MiB"])
