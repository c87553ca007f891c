"""Attention of vLLM on GPUs by our kernels, as the backend CUSTOM. It has run in engines on a CPU, never on a GPU.

A decode step can be captured in a CUDA graph: all shapes of a launch follow from the sizes of tensors and from the
bounds max_query_len and max_seq_len, which vLLM sets to its largest while it captures.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.vllm.backend import PagedBackend, PagedImpl, say_attention
from pagedkv.integrations.vllm.pages import PagedMetadata


class PagedGpuBackend(PagedBackend, AttentionBackend):
    """CUSTOM on a GPU: layers of decoders, blocks of a multiple of 8 tokens."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the block sizes that are served."""
        return [MultipleOf(8)]

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True: windows are served."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return True: keys are cut at fixed positions then. On a CPU vLLM itself has no kernels for it."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Return True: decoders without a causal mask are served."""
        return True

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Return the class of layers."""
        return _PagedGpuImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Return the class that makes metadata."""
        return _PagedGpuMetadataBuilder


class _PagedGpuMetadataBuilder(AttentionMetadataBuilder):
    """Makes the metadata of a step."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        say_attention(layer_names, kv_cache_spec)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """Return the metadata of a step."""
        return PagedMetadata.of(common_attn_metadata)


class _PagedGpuImpl(PagedImpl, AttentionImpl):
    """One layer. Arguments as in AttentionImpl."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise InvalidRequest(f"attention of type {attn_type} is not served on GPUs; use a backend of vLLM for it")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window, self.logits_soft_cap = sliding_window, logits_soft_cap
        self.sinks, self.alibi_slopes = sinks, alibi_slopes

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store K and V of the new tokens."""
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
        if output_scale is not None or output_block_scale is not None:
            raise InvalidRequest("outputs that are quantised by attention are not served; use a backend of vLLM")
        if attn_metadata is None:  # vLLM measures its memory
            return output
        self._attend(layer, query, kv_cache, attn_metadata, output)
        return output
