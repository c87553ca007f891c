"""vLLM over a disk tier: prompts come back in another process with the same tokens, and damage is a miss."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from pagedkv.integrations.vllm import offload
from pagedkv.integrations.vllm.chunks import ChunkCopies
from pagedkv.integrations.vllm.offload import _CpuWorker
from tests.integrations.vllm.host.engines import generate, model_in, prompts

JOB: dict[str, Any] = {"prompts": prompts(6, 2000), "rounds": 1}


def over(folder: Path, name: str, tokens_of_a_chunk: int, job: dict[str, Any] = JOB) -> Any:
    """Run an engine whose blocks go to a folder and come back from there."""
    extra = {
        "spec_name": "PagedOffloadingSpec", "spec_module_path": "pagedkv.integrations.vllm.offload",
        "cpu_bytes_to_use": 64 << 20, "tiers": [f"disk:256MiB:{folder / 'tier'}"], "weights": "seed 0",
        "block_size": tokens_of_a_chunk,
    }  # fmt: skip
    connector = {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
    }  # fmt: skip
    return generate(folder / name, job=job, kv_transfer_config=connector)


@pytest.mark.parametrize(
    ("name", "tokens_of_a_chunk"),
    [("llama", 128), ("gemma2", 256)],  # one block a chunk; two layer groups, and two blocks a chunk
)
def test_prompts_come_back_from_a_disk_and_a_damaged_one_is_computed(
    name: str, tokens_of_a_chunk: int, tmp_path: Path
) -> None:
    expected = generate(model_in(tmp_path, name), job=JOB)
    first, second = (over(tmp_path, name, tokens_of_a_chunk) for _ in range(2))
    assert first["tokens"] == second["tokens"] == expected["tokens"]
    assert sum(second["hits"][0]) > sum(first["hits"][0]) + 1000
    path = tmp_path / "tier" / "pagedkv-tier.bytes"
    content = bytearray(path.read_bytes())
    content[:: 4096 * 7] = bytes(byte ^ 1 for byte in content[:: 4096 * 7])
    path.write_bytes(content)
    third = over(tmp_path, name, tokens_of_a_chunk)
    assert third["tokens"] == expected["tokens"]
    assert sum(third["hits"][0]) < sum(second["hits"][0])


def test_long_prompts_that_return_cost_three_tenths_of_computing_them_at_most(tmp_path: Path) -> None:
    """The prompts are computed in chunks of 1,024 tokens by one process, and loaded from a disk by the next."""
    model_in(tmp_path, "llama")
    dice = random.Random(1)
    warm, *long = ([dice.randrange(3, 500) for _ in range(length)] for length in (600, 4000, 4000, 4000))
    job = {"prompts": long, "max_tokens": 1, "rounds": 1, "warm": warm}
    computed, loaded = (over(tmp_path, "llama", 128, job) for _ in range(2))
    assert loaded["tokens"] == computed["tokens"]
    assert (computed["hits"], loaded["hits"]) == ([[0] * 3], [[4000 - 4000 % 128] * 3])
    assert loaded["seconds"][0] < 0.3 * computed["seconds"][0]


@dataclass(frozen=True)
class ModelConfig33(OffloadingModelConfig):
    """OffloadingModelConfig of vLLM 0.33."""

    max_model_len: int = 0


def test_the_name_of_a_chunk_covers_what_decides_its_bytes_in_both_versions() -> None:
    parallel = OffloadingParallelConfig(
        rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
        data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=True,
    )  # fmt: skip
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("a", "b"), 0),), worker_kv_bytes_per_block=4096,
        enable_kv_cache_events=False, extra_config={}, engine_id="0", model=OffloadingModelConfig("phi", "float32"),
        cache=OffloadingCacheConfig(16, 1), parallel=parallel,
    )  # fmt: skip
    plain = offload._facts_of(config, "seed 0")
    elsewhere = replace(config, engine_id="1", extra_config={"tiers": []}, parallel=replace(parallel, rank=1))
    assert offload._facts_of(elsewhere, "seed 0") == plain
    others = [
        replace(config, worker_kv_bytes_per_block=8192),
        replace(config, parallel=replace(parallel, tp_size=2)),
        replace(config, model=ModelConfig33("phi", "float32", 4096)),
        replace(config, model=ModelConfig33("phi", "float32", 8192)),  # LongRoPE has other keys
    ]
    names = [
        json.dumps(each, sort_keys=True) for each in (plain, *(offload._facts_of(other, "seed 0") for other in others))
    ]
    assert len({*names, json.dumps(offload._facts_of(config, "seed 1"), sort_keys=True)}) == 6


@pytest.mark.parametrize("options", [{}, {"expedited": True}], ids=["0.32", "0.33"])
def test_a_load_is_asked_for_in_the_forms_of_both_versions(options: dict[str, Any]) -> None:
    blocks, chunks = torch.zeros(3, 8, dtype=torch.int8), torch.arange(16, dtype=torch.int8).view(2, 1, 8)
    worker = _CpuWorker.__new__(_CpuWorker)  # without host memory that processes share
    worker._copies, worker._ended = ChunkCopies([blocks], [chunks], [[(0, 8)]]), []
    to = SimpleNamespace(block_ids=np.array([2]), group_sizes=[1], block_indices=[0])
    assert worker.submit_load(7, SimpleNamespace(block_ids=np.array([1])), to, **options)
    assert blocks[2].tolist() == list(range(8, 16))
    assert [(each.job_id, each.success) for each in worker.get_finished()] == [(7, True)]
