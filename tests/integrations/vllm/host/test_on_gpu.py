"""Greedy tokens of vLLM on a GPU with our attention are those with its own attention in Triton, in float32.

They need a vLLM for CUDA and pagedkv in one environment: `python -m pytest -m gpu` with the path of this file.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from pagedkv.integrations.vllm import vllm_version
from tests.integrations.vllm.host.engines import MODELS, generate, model_in

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(vllm_version()[1], reason="this vLLM is for CPUs")]

MEMORY: Final[dict[str, Any]] = {
    "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30, "num_gpu_blocks_override": 3200,
}  # fmt: skip
"""A small pool of blocks of 16 tokens, so that vLLM need not measure how much memory is free."""

EXACT: Final = {"PAGEDKV_DEBUG": "0", "TRITON_F32_DEFAULT": "ieee"}
"""Checks of tables copy lengths to the CPU, which a capture forbids; vLLM's products would be of TF32."""

CAPTURED: Final[dict[str, Any]] = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    },
}  # fmt: skip
"""Whole steps of decode become CUDA graphs, and nothing is compiled."""

POOL: Final[dict[str, Any]] = {"scheduler_cls": "pagedkv.integrations.vllm.scheduler.PagedScheduler"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


RUNS: Final[Any] = {"llama": {}, "llama captured": CAPTURED, "llama pool": POOL, **{name: {} for name in MODELS}}


@cache
def of_vllm(model: Path) -> Any:
    return generate(model, environ=EXACT, attention_backend="TRITON_ATTN", **MEMORY)


@pytest.mark.parametrize("run", RUNS)
def test_our_attention_gives_the_tokens_of_vllm(run: str, folder: Path) -> None:
    name, options = run.split()[0], RUNS[run]
    if not (folder / name).exists():
        model_in(folder, name)
    plain = of_vllm(folder / name)
    found = generate(folder / name, environ=EXACT, attention_backend="CUSTOM", **MEMORY | options)
    assert "Attention by pagedkv" in found["log"]
    assert ("Blocks by pagedkv" in found["log"]) == (options is POOL)
    assert found["tokens"] == plain["tokens"]
    assert sum(map(sum, found["hits"])) >= sum(map(sum, plain["hits"])) > 0
