"""The CPU platform of vLLM with our attention: chosen by PAGEDKV_VLLM=1."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from pagedkv.integrations.vllm import OURS
from pagedkv.integrations.vllm.pages import layer_of


class PagedCpuPlatform(CpuPlatform):
    """CpuPlatform whose layers of attention are ours, unless they are MLA, or another backend was asked for by name."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Return the path of a backend's class."""
        is_other = selected_backend not in (None, AttentionBackendEnum.CUSTOM)
        if is_other or attn_selector_config.use_mla or attn_selector_config.use_sparse:
            path: str = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
            return path
        return str(AttentionBackendEnum.CUSTOM.get_path()) if selected_backend is not None else OURS

    @classmethod
    def pack_kv_cache(cls, kv_cache: torch.Tensor, indices: torch.Tensor) -> None:
        """Put blocks that came from another machine, [heads, block size, K and V], into our layout of a block."""
        if kv_cache.dim() != 4:  # MLA
            super().pack_kv_cache(kv_cache, indices)
            return
        head_size = kv_cache.shape[-1] // 2
        blocks = kv_cache.index_select(0, indices).transpose(1, 2)
        layer = layer_of(kv_cache, head_size, "auto")
        layer.k[indices], layer.v[indices] = blocks[..., :head_size], blocks[..., head_size:]
