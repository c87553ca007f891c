"""The classes for GPUs, over the classes of vLLM and on tensors of a CPU: what they store and attend to, in an engine
and alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.vllm.gpu import PagedGpuBackend, _PagedGpuImpl, _PagedGpuMetadataBuilder
from tests.integrations.vllm.host.engines import MODELS, generate, model_in, prompts

LAYER: Any = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_layer_stores_and_attends_in_its_window(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(invariant)))
    layer = _PagedGpuImpl(4, 16, 0.25, num_kv_heads=2, alibi_slopes=[0.0] * 4, sliding_window=1)
    cache, slots = torch.full((4, 2, 8, 32), torch.nan), torch.tensor([8, 9])
    k = torch.ones(2, 2, 16)
    v = k * torch.tensor([3.0, 5.0])[:, None, None]
    layer.do_kv_cache_update(LAYER, k, v, cache, slots)
    common = SimpleNamespace(
        block_table_tensor=torch.tensor([[1]], dtype=torch.int32),
        seq_lens=torch.tensor([2], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
        slot_mapping=slots,
        num_actual_tokens=2,
        max_query_len=2,
        max_seq_len=2,
        causal=True,
    )
    builder = _PagedGpuMetadataBuilder(None, [], None, torch.device("cpu"))
    out = torch.zeros(3, 64)  # one row of padding
    args = (LAYER, torch.randn(3, 4, 16), k, v, cache, builder.build(0, common), out)
    layer.forward(*args)
    assert [row.unique().tolist() for row in out] == [[3.0], [5.0], [0.0]]
    (attend,) = (call for kind, call in layer._pages._calls.items() if kind is True)
    assert attend._rest.split_tokens == (512 if invariant else None)
    with pytest.raises(InvalidRequest, match="quantised"):
        layer.forward(*args, output_scale=torch.ones(()))
    assert layer.forward(LAYER, *args[1:5], None, out) is out


def test_the_backend_is_a_whole_one() -> None:
    assert PagedGpuBackend.get_name() == "CUSTOM"
    assert PagedGpuBackend.supports_sink()
    assert PagedGpuBackend.supports_batch_invariance()
    assert PagedGpuBackend.supports_block_size(16)
    assert not PagedGpuBackend.supports_block_size(12)
    assert PagedGpuBackend.get_impl_cls() is _PagedGpuImpl
    with pytest.raises(InvalidRequest, match="type encoder"):
        _PagedGpuImpl(4, 16, 0.25, attn_type="encoder")


@pytest.mark.parametrize("name", MODELS)
def test_engines_on_a_cpu_with_the_classes_for_gpus_give_the_tokens_of_vllm(name: str, tmp_path: Path) -> None:
    model, job = model_in(tmp_path, name), {"prompts": prompts(12, 1500)}
    plain = generate(model, job=job)
    found = generate(
        model,
        environ={"PAGEDKV_VLLM": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        job=job | {"backend": f"{PagedGpuBackend.__module__}.PagedGpuBackend"},
        attention_backend="CUSTOM",
        distributed_executor_backend="uni",
        block_size=16,
        num_gpu_blocks_override=3200,
    )
    assert "Attention by pagedkv" in found["log"]
    assert found["backend"] == f"{PagedGpuBackend.__module__}.PagedGpuBackend"
    assert found["tokens"] == plain["tokens"]
    assert sum(map(sum, found["hits"])) >= sum(map(sum, plain["hits"])) > 0
