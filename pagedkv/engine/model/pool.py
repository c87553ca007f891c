"""The pool of an engine: the cache for the keys and values of a model, and its size if the user gives none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pagedkv.cache import PagedKVCache

if TYPE_CHECKING:
    from pagedkv.engine.model.decoder import Decoder
    from pagedkv.spec import KVSpec

DEFAULT_TOKENS: Final = 32768
DEFAULT_MEMORY: Final = "4GiB"
"""The size of a pool for which the user gives no size: DEFAULT_TOKENS tokens, but at most DEFAULT_MEMORY."""


def new_cache(
    decoder: Decoder, *, block_size: int, kv_dtype: str | None = None, grouped: bool = True, **options: Any
) -> PagedKVCache:
    """Return a cache for the decoder.

    grouped: whether layers with different windows have page tables of their own, and give back frames behind windows
    options: options of PagedKVCache
    """
    config, layer_groups = decoder.config, None
    geometry: dict[str, Any] = {"block_size": block_size, "kv_dtype": kv_dtype}
    geometry["dtype"] = str(decoder.dtype).removeprefix("torch.")
    specs: tuple[KVSpec, ...] = (config.spec(**geometry),)
    if grouped:
        specs, layer_groups = config.specs(**geometry), config.layer_groups()
    if options.get("num_frames") is None and options.get("memory") is None:
        largest = max(specs, key=lambda spec: spec.frame_bytes)
        options["num_frames"] = min(len(specs) * largest.pages(DEFAULT_TOKENS), largest.frames_in(DEFAULT_MEMORY))
    return PagedKVCache(specs, layer_groups=layer_groups, device=decoder.device, **options)
