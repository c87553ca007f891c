"""vLLM over a disk tier: prompts come back in another process with the same tokens, and damage is a miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
