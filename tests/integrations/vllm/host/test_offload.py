"""vLLM over a disk tier: prompts come back in another process with the same tokens, and damage is a miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.host.engines import generate, model_in, prompts

JOB: dict[str, Any] = {"prompts": prompts(6, 2000), "rounds": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offload")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    return generate(model_in(folder, "llama"), job=JOB)


def over(folder: Path) -> Any:
    """Run an engine whose blocks go to a folder and come back from there."""
    extra = {
        "spec_name": "PagedOffloadingSpec", "spec_module_path": "pagedkv.integrations.vllm.offload",
        "cpu_bytes_to_use": 64 << 20, "tiers": [f"disk:256MiB:{folder / 'tier'}"], "weights": "seed 0",
    }  # fmt: skip
    connector = {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
    }  # fmt: skip
    return generate(folder / "llama", job=JOB, kv_transfer_config=connector)


def test_prompts_come_back_from_a_disk_and_a_damaged_one_is_computed(folder: Path, expected: Any) -> None:
    first, second = over(folder), over(folder)
    assert first["tokens"] == second["tokens"] == expected["tokens"]
    assert sum(second["hits"][0]) > sum(first["hits"][0]) + 1000
    path = folder / "tier" / "pagedkv-tier.bytes"
    content = bytearray(path.read_bytes())
    content[:: 4096 * 7] = bytes(byte ^ 1 for byte in content[:: 4096 * 7])
    path.write_bytes(content)
    third = over(folder)
    assert third["tokens"] == expected["tokens"]
    assert sum(third["hits"][0]) < sum(second["hits"][0])
