"""The classes for GPUs, over the classes of vLLM and on tensors of a CPU: what they store and attend to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.vllm.gpu import PagedGpuBackend, PagedGpuImpl, PagedGpuMetadataBuilder

LAYER: Any = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0)


def test_a_layer_stores_and_attends_in_its_window() -> None:
    layer = PagedGpuImpl(4, 16, 0.25, num_kv_heads=2, alibi_slopes=[0.0] * 4, sliding_window=1)
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
    builder = PagedGpuMetadataBuilder(None, [], None, torch.device("cpu"))
    out = torch.zeros(3, 64)  # one row of padding
    args = (LAYER, torch.randn(3, 4, 16), k, v, cache, builder.build(0, common), out)
    layer.forward(*args)
    assert [row.unique().tolist() for row in out] == [[3.0], [5.0], [0.0]]
    with pytest.raises(InvalidRequest, match="quantised"):
        layer.forward(*args, output_scale=torch.ones(()))
    assert layer.forward(LAYER, *args[1:5], None, out) is out


def test_the_backend_is_a_whole_one() -> None:
    assert PagedGpuBackend.get_name() == "CUSTOM"
    assert PagedGpuBackend.supports_sink()
    assert PagedGpuBackend.supports_block_size(16)
    assert not PagedGpuBackend.supports_block_size(12)
    assert PagedGpuBackend.get_impl_cls() is PagedGpuImpl
    with pytest.raises(InvalidRequest, match="type encoder"):
        PagedGpuImpl(4, 16, 0.25, attn_type="encoder")
