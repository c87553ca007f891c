"""Receipts and hints in an engine of vLLM: reasons in its log and in its metric, and blocks that a hint has kept."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import vllm
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from tests.integrations.vllm.host.engines import generate, model_in

OURS: dict[str, Any] = {
    "scheduler_cls": "pagedkv.integrations.vllm.scheduler.PagedScheduler", "block_size": 16, "max_num_seqs": 1,
    "max_model_len": 1024, "num_gpu_blocks_override": 100,
}  # fmt: skip
DICE = random.Random(1)
PROMPT, *FLOOD = [[DICE.randrange(3, 500) for _ in range(600)] for _ in range(5)]
EDITED = [*PROMPT[:342], 501, *PROMPT[343:]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_in(tmp_path_factory.mktemp("models"), "llama")


def test_reasons_are_in_the_log_and_in_the_metric(model: Path, tmp_path: Path) -> None:
    job = {"prompts": [PROMPT, PROMPT, EDITED, *FLOOD[:3], PROMPT], "max_tokens": 4, "rounds": 1}
    environ = {"PAGEDKV_VLLM": "1", "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    found = generate(model, environ=environ, job=job, **OURS, additional_config={"pagedkv_logged_miss": 100})
    assert f"336 of 600 tokens found; differs at 342: token was {PROMPT[342]} and is 501" in found["log"]
    assert "0 of 600 tokens found; evicted at 0" in found["log"]
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    counts = {
        reason: registry.get_sample_value("pagedkv_prompts_total", {"reason": reason})
        for reason in ("new", "hit", "differs", "evicted")
    }
    assert counts == {"new": 4, "hit": 1, "differs": 1, "evicted": 1}


@pytest.mark.skipif(vllm.__version__.startswith("0.32"), reason="vLLM 0.32 carries no kv_hints")
@pytest.mark.parametrize("action", ["retain", "pin", "demote"])
def test_a_hint_keeps_the_blocks_that_other_prompts_would_take(action: str, model: Path) -> None:
    hint = {"action_type": action, "payload": {} if action == "demote" else {"seconds": 600}}
    prompts = [PROMPT, PROMPT] if action == "demote" else [PROMPT, *FLOOD, PROMPT]
    job = {"prompts": prompts, "max_tokens": 4, "rounds": 1}
    run: dict[str, Any] = {"environ": {"PAGEDKV_VLLM": "1"}, **OURS}
    config = {"pagedkv_hints": 0.36}
    plain = generate(model, job=job, **run)
    found = generate(model, job=job | {"hint": hint}, **run, additional_config=config)
    assert found["tokens"] == plain["tokens"]
    assert plain["hits"][0][-1] == (592 if action == "demote" else 0)
    kept = {"retain": 36 * 16, "pin": 35 * 16, "demote": 0}  # pins leave room for a request of 64 blocks
    assert found["hits"][0][-1] == kept[action]
