"""Attention of vLLM on CPUs by our kernels: the backend, its metadata and its layers.

Layers of decoders store K and V in our frame layout and read it, see pages.py. Encoders and cross-attention stay with
the classes of vLLM: these files are subclasses of them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder, AttentionType, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.vllm.backend import PagedBackend, PagedImpl, say_attention
from pagedkv.integrations.vllm.pages import CACHE_DTYPES, PagedMetadata


class PagedAttentionBackend(PagedBackend, CPUAttentionBackend):
    """CUSTOM on a CPU: any block size, any head size."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return that every block size is served."""
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return no list: every head size is served."""
        return []

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Return the class of layers."""
        return PagedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Return the class that makes metadata."""
        return PagedMetadataBuilder


class PagedMetadataBuilder(CPUAttentionMetadataBuilder):
    """Makes the metadata of a step: our batch for decoders, that of vLLM for encoders and cross-attention."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self._is_ours = not isinstance(kv_cache_spec, CrossAttentionSpec | EncoderOnlyAttentionSpec)
        if self._is_ours:  # CPUAttentionMetadataBuilder refuses shapes that vLLM's kernel does not serve
            AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
            say_attention(layer_names, kv_cache_spec)
        else:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """Return the metadata of a step."""
        if not self._is_ours:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        return PagedMetadata.of(common_attn_metadata)


class PagedAttentionImpl(PagedImpl, CPUAttentionBackendImpl):
    """One layer. Arguments as in CPUAttentionBackendImpl."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.kv_cache_dtype not in CACHE_DTYPES:
            raise InvalidRequest(f"K and V of {self.kv_cache_dtype} are not served; give one of {CACHE_DTYPES}")

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store K and V of the new tokens."""
        if self.attn_type != AttentionType.DECODER:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        else:
            self._store(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the pages. Modifies: output, [tokens, heads * head size] or [tokens, heads, head size]."""
        is_quantised = output_scale is not None or output_block_scale is not None  # vLLM refuses it
        if self.attn_type != AttentionType.DECODER or attn_metadata is None or is_quantised:
            host: torch.Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
            return host
        self._attend(layer, query, kv_cache, attn_metadata, output)
        return output
