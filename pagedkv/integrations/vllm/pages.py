"""Pages: K and V of one layer where vLLM has put them, and the calls that are bound to them. No vLLM is imported here.

vLLM gives a layer a tensor [blocks, heads, block size, 2 * head size] of any strides between blocks. The insides of a
block are the backend's own. We store, for each head, the keys of a block and then its values:

    |K [block size, head size]|V [block size, head size]|  of head 0, of head 1, ...

A connector may split a block between ranks by its heads, so a head must be a run of memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from pagedkv import KVLayer, PagedBatch, bind_attention, bind_write
from pagedkv.errors import InvalidRequest

FP8: Final = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Names of vLLM for K and V of 8 bits."""

CACHE_DTYPES: Final = ("auto", "bfloat16", "float16", *FP8)


def _layer_of(
    kv_cache: torch.Tensor, head_size: int, kv_cache_dtype: str, scales: tuple[float, float] = (1.0, 1.0)
) -> KVLayer:
    """Return K and V of a layer of vLLM as frames. Nothing is copied.

    kv_cache: [blocks, heads, block size, 2 * head_size] whose blocks are runs of memory.
    scales:   the scales of K and of V, used with fp8.
    Raises:   InvalidRequest for a block that is no run of memory, or a dtype that is not served
    """
    is_fp8 = kv_cache_dtype in FP8
    if kv_cache_dtype not in CACHE_DTYPES or (kv_cache.dtype == torch.uint8 and not is_fp8):
        in_bytes = " in bytes" if kv_cache.dtype == torch.uint8 else ""
        raise InvalidRequest(
            f"K and V of {kv_cache_dtype}{in_bytes} are not served; give one of {', '.join(CACHE_DTYPES)}"
        )
    frames = kv_cache.view(FP8[kv_cache_dtype]) if is_fp8 else kv_cache
    blocks, heads, block_size, width = frames.shape
    # The order of strides within a block is that of vLLM's layout, and ours is another over the same bytes.
    if width != 2 * head_size or _extent(frames) != heads * block_size * width:
        raise InvalidRequest(
            f"a cache {list(kv_cache.shape)} with strides {kv_cache.stride()} has no blocks in one piece, as "
            "the layouts LBHNC, LBNHC, BLHNC and BLNHC of vLLM do"
        )
    half = block_size * head_size
    strides = (frames.stride(0), head_size, 2 * half, 1)  # blocks, tokens, heads, elements
    k, v = (
        frames.as_strided((blocks, block_size, heads, head_size), strides, frames.storage_offset() + first)
        for first in (0, half)
    )
    return KVLayer(k, v, *(scales if is_fp8 else (None, None)))


def _extent(frames: torch.Tensor) -> int:
    """Return the elements from the first to the last one of a block."""
    sizes, strides = frames.shape[1:], frames.stride()[1:]
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


class Pages:
    """Bound calls of one attention layer of vLLM. They are bound anew if vLLM gives other memory or other scales.

    head_size, scale, window (None or positions), softcap, sinks, alibi_slopes: of the layer.
    """

    def __init__(self, *, head_size: int, kv_cache_dtype: str, window: int | None, **options: Any) -> None:
        self._head_size, self._kv_cache_dtype = head_size, kv_cache_dtype
        self._window, self._options = window, options
        self._of: torch.Tensor | None = None
        self._scales = (1.0, 1.0)
        self._sinks = _version(options["sinks"])
        self._layer: KVLayer | None = None
        self._calls: dict[Any, Any] = {}

    def _bound(self, kv_cache: torch.Tensor, scales: tuple[float, float]) -> KVLayer:
        if self._layer is None or self._of is not kv_cache or self._scales != scales:
            self._layer = _layer_of(kv_cache, self._head_size, self._kv_cache_dtype, scales)
            self._of, self._scales = kv_cache, scales
            self._calls.clear()
        version = _version(self._options["sinks"])
        if self._sinks != version:  # new weights, and a bound call keeps a copy in float32
            self._sinks = version
            self._calls.clear()
        return self._layer

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        scales: tuple[float, float],
    ) -> None:
        """Store K and V of the new tokens, [T, heads, head size], at `slots`, int64 [at most T]; -1 skips a token."""
        layer, num_tokens = self._bound(kv_cache, scales), slots.shape[0]
        if "write" not in self._calls:
            self._calls["write"] = bind_write(layer)
        self._calls["write"](key[:num_tokens], value[:num_tokens], slots)

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: PagedBatch,
        causal: bool | torch.Tensor,
        out: torch.Tensor,
        scales: tuple[float, float],
    ) -> None:
        """Attend from the new tokens, [T, heads, head size], to the pages. Modifies: out, the same shape.

        causal: for all sequences, or bool [sequences]. Without it, a window has two sides.
        """
        layer = self._bound(kv_cache, scales)
        by_sequence = isinstance(causal, torch.Tensor)
        kind = None if by_sequence else causal
        if kind not in self._calls:
            window: Any = self._window
            if window is not None and kind is not True:
                window = (window - 1, window - 1)
            self._calls[kind] = bind_attention(layer, causal=kind is True, window=window, **self._options)
        if by_sequence:
            self._calls[kind](query, batch, causal=causal, out=out)
        else:
            self._calls[kind](query, batch, out=out)


def _version(sinks: torch.Tensor | None) -> tuple[int, int]:
    if sinks is None:
        return 0, 0
    return sinks.data_ptr(), 0 if sinks.is_inference() else sinks._version


@dataclass
class PagedMetadata:
    """The metadata of a step for the layers of one KV cache group.

    batch: its tables, as vLLM made them. causal: for all sequences, or for each, bool [sequences].
    """

    num_actual_tokens: int
    batch: PagedBatch
    causal: bool | torch.Tensor

    @classmethod
    def of(cls, common: Any) -> PagedMetadata:
        """common: CommonAttentionMetadata of vLLM. No tensor is converted."""
        num_tokens = common.num_actual_tokens
        batch = PagedBatch(
            common.block_table_tensor,
            common.seq_lens,
            common.query_start_loc,
            slots=common.slot_mapping[:num_tokens],
            max_seqlen_q=common.max_query_len,
            max_seqlen_k=common.max_seq_len,
        )
        return cls(num_tokens, batch, common.causal)
