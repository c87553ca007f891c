"""Attention of vLLM on GPUs by our kernels, as the backend CUSTOM. It has never run: no GPU was there to try it on.

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
from vllm.v1.kv_cache_interface import KVCacheLayout

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.vllm.pages import CACHE_DTYPES, PagedMetadata, Pages


class PagedGpuBackend(AttentionBackend):
    """CUSTOM on a GPU: layers of decoders, blocks of a multiple of 8 tokens."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(CACHE_DTYPES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Return the member of AttentionBackendEnum under which we are registered."""
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the block sizes that are served."""
        return [MultipleOf(8)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layouts in which a block of a layer is a run of memory."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True: attention sinks are served."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True: windows are served."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Return True: decoders without a causal mask are served."""
        return True

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Return the class of layers."""
        return PagedGpuImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Return the class that makes metadata."""
        return PagedGpuMetadataBuilder


class PagedGpuMetadataBuilder(AttentionMetadataBuilder):
    """Makes the metadata of a step."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """Return the metadata of a step."""
        return PagedMetadata.of(common_attn_metadata)


class PagedGpuImpl(AttentionImpl):
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
        self._pages: Pages | None = None

    def _pages_of(self, device: torch.device) -> Pages:
        if self._pages is None:  # now weights are loaded, such as sinks
            slopes = self.alibi_slopes
            self._pages = Pages(
                head_size=self.head_size,
                scale=self.scale,
                kv_cache_dtype=self.kv_cache_dtype,
                window=self.sliding_window if (self.sliding_window or 0) > 0 else None,
                softcap=float(self.logits_soft_cap or 0.0),
                sinks=self.sinks,
                alibi_slopes=None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=device),
            )
        return self._pages

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store K and V of the new tokens."""
        scales = (layer._k_scale_float, layer._v_scale_float)
        self._pages_of(key.device).write(key, value, kv_cache, slot_mapping, scales)

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
        num_tokens = attn_metadata.num_actual_tokens
        out = output[:num_tokens].view(num_tokens, self.num_heads, self.head_size)
        scales = (layer._k_scale_float, layer._v_scale_float)
        pages = self._pages_of(query.device)
        pages.attend(query[:num_tokens], kv_cache, attn_metadata.batch, attn_metadata.causal, out, scales)
        return output
