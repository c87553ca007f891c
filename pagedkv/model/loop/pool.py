"""The pool of an engine: the cache for the keys and values of a model, and its size if the user gives none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pagedkv.cache import PagedKVCache

if TYPE_CHECKING:
    from pagedkv.model.decoder import Decoder
    from pagedkv.spec import KVSpec

DEFAULT_TOKENS: Final = 32768
DEFAULT_MEMORY: Final = "4GiB"
"""The size of a pool for which the user gives no size: DEFAULT_TOKENS tokens, but at most DEFAULT_MEMORY."""


def new_cache(
    decoder: Decoder,
    *,
    block_size: int,
    kv_dtype: str | None = None,
    grouped: bool = True,
    kind: type[PagedKVCache] = PagedKVCache,
    **options: Any,
) -> PagedKVCache:
    """Return a cache for the decoder.

    grouped: whether layers with different windows have page tables of their own, and give back frames behind windows
    kind: the class of the cache
    options: options of PagedKVCache
    """
    specs, layer_groups = geometry_of(decoder, block_size=block_size, kv_dtype=kv_dtype, grouped=grouped)
    if options.get("num_frames") is None and options.get("memory") is None:
        largest = max(specs, key=lambda spec: spec.frame_bytes)
        options["num_frames"] = min(len(specs) * largest.pages(DEFAULT_TOKENS), largest.frames_in(DEFAULT_MEMORY))
    return kind(specs, layer_groups=layer_groups, device=decoder.device, **options)


def geometry_of(
    decoder: Decoder, *, block_size: int, kv_dtype: str | None, grouped: bool
) -> tuple[tuple[KVSpec, ...], tuple[int, ...] | None]:
    """Return the geometry of each layer group, and the group of each layer; None if one group has all. See new_cache.

    Raises: InvalidRequest
    """
    config = decoder.config
    options: dict[str, Any] = {"block_size": block_size, "kv_dtype": kv_dtype}
    options["dtype"] = str(decoder.dtype).removeprefix("torch.")
    if grouped:
        return config.specs(**options), config.layer_groups()
    return (config.spec(**options),), None
