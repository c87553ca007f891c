"""vLLM over a disk tier: prompts come back in another process with the same tokens, and damage is a miss."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.integrations.vllm.chunks import ChunkCopies
from pagedkv.integrations.vllm.offload import CpuWorker
from tests.integrations.vllm.host.engines import generate, model_in, prompts

JOB: dict[str, Any] = {"prompts": prompts(6, 2000), "rounds": 1}


def over(folder: Path, name: str, tokens_of_a_chunk: int) -> Any:
    """Run an engine whose blocks go to a folder and come back from there."""
    extra = {
        "spec_name": "PagedOffloadingSpec", "spec_module_path": "pagedkv.integrations.vllm.offload",
        "cpu_bytes_to_use": 64 << 20, "tiers": [f"disk:256MiB:{folder / 'tier'}"], "weights": "seed 0",
        "block_size": tokens_of_a_chunk,
    }  # fmt: skip
    connector = {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
    }  # fmt: skip
    return generate(folder / name, job=JOB, kv_transfer_config=connector)


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


@pytest.mark.parametrize("options", [{}, {"expedited": True}], ids=["0.32", "0.33"])
def test_a_load_is_asked_for_in_the_forms_of_both_versions(options: dict[str, Any]) -> None:
    blocks, chunks = torch.zeros(3, 8, dtype=torch.int8), torch.arange(16, dtype=torch.int8).view(2, 1, 8)
    worker = CpuWorker.__new__(CpuWorker)  # without host memory that processes share
    worker._copies, worker._ended = ChunkCopies([blocks], [chunks], [[(0, 8)]]), []
    to = SimpleNamespace(block_ids=np.array([2]), group_sizes=[1], block_indices=[0])
    assert worker.submit_load(7, SimpleNamespace(block_ids=np.array([1])), to, **options)
    assert blocks[2].tolist() == list(range(8, 16))
    assert [(each.job_id, each.success) for each in worker.get_finished()] == [(7, True)]
