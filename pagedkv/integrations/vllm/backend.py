"""Backend: the parts of an attention backend of vLLM that are the same on CPUs and GPUs."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch
from vllm import envs
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheLayout

from pagedkv.integrations.vllm.pages import CACHE_DTYPES, Pages

_LOGGER: Final = init_logger("vllm.pagedkv")

_SPLIT_TOKENS: Final = 512
"""Keys are cut at multiples of it with VLLM_BATCH_INVARIANT. A decode of 32 x 4k on an H200 then takes 1.02 of the
usual time."""


def say_attention(layer_names: list[str], kv_cache_spec: Any) -> None:
    """Log that these layers attend by our kernels. Each builder of metadata calls it once."""
    _LOGGER.info("Attention by pagedkv: %d layers, %s", len(layer_names), kv_cache_spec)


class PagedBackend:
    """The answers of the backend CUSTOM, in front of those of a class of vLLM."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """Return the member of AttentionBackendEnum under which we are registered."""
        return "CUSTOM"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layouts in which a block of a layer is a run of memory."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Return whether K and V of this dtype are served. For fp8, vLLM 0.33's CPU class wants AVX-512 or AMX."""
        return kv_cache_dtype is None or kv_cache_dtype in CACHE_DTYPES

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True: attention sinks are served."""
        return True


class PagedImpl:
    """The part of an AttentionImpl of vLLM that is ours, for one layer. The class beside it sets the fields."""

    num_heads: int
    head_size: int
    scale: float
    kv_cache_dtype: str
    sliding_window: int | None
    logits_soft_cap: float | None
    sinks: torch.Tensor | None
    alibi_slopes: Any  # floats, or a tensor of them
    _pages: Pages | None = None

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
                split_tokens=_SPLIT_TOKENS if envs.VLLM_BATCH_INVARIANT else None,
                alibi_slopes=None if slopes is None else torch.as_tensor(slopes, dtype=torch.float32, device=device),
            )
        return self._pages

    def _store(self, layer: Any, key: Any, value: Any, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        scales = (layer._k_scale_float, layer._v_scale_float)
        self._pages_of(kv_cache.device).write(key, value, kv_cache, slots, scales)

    def _attend(self, layer: Any, query: Any, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor) -> None:
        num_tokens = metadata.num_actual_tokens
        out = output[:num_tokens].view(num_tokens, self.num_heads, self.head_size)
        scales = (layer._k_scale_float, layer._v_scale_float)
        pages = self._pages_of(kv_cache.device)
        pages.attend(query[:num_tokens], kv_cache, metadata.batch, metadata.causal, out, scales)
