"""The pool of an engine: the cache for the keys and values of a model, and its size if the user gives none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pagedkv.cache import PagedKVCache
from pagedkv.cache.states import LEAST_FRAMES
from pagedkv.errors import InvalidRequest
from pagedkv.spec import parse_bytes

if TYPE_CHECKING:
    from pagedkv.engine.model.decoder import Decoder
    from pagedkv.spec import KVSpec

DEFAULT_TOKENS: Final = 32768
DEFAULT_MEMORY: Final = "4GiB"
"""The size of a pool for which the user gives no size: DEFAULT_TOKENS tokens, but at most DEFAULT_MEMORY."""
_HISTORY: Final = 2**16
"""Tokens of past prompts with which a receipt compares a prompt, 4 MiB."""
KEPT_STATES: Final = 64
"""Recurrent states that stay for later prompts, if the user gives no number."""


def new_cache(
    decoder: Decoder, *, block_size: int, kv_dtype: str | None = None, grouped: bool = True, at_once: int = 256,
    **options: Any,
) -> PagedKVCache:  # fmt: skip
    """Return a cache for the decoder.

    grouped: whether layers with different windows have page tables of their own, and give back frames behind windows
    at_once: sequences that may run at once
    options: options of PagedKVCache. Without state_memory, a model with recurrent states has three states for each
        sequence that may run, and KEPT_STATES, but at most DEFAULT_MEMORY of them beside the pool
    Raises: InvalidRequest for state_memory of a model without recurrent states
    """
    config, layer_groups, dtype = decoder.config, None, str(decoder.dtype).removeprefix("torch.")
    geometry: dict[str, Any] = {"block_size": block_size, "kv_dtype": kv_dtype, "dtype": dtype}
    specs: tuple[KVSpec, ...] = (config.spec(**geometry),)
    if grouped:
        specs, layer_groups = config.specs(**geometry), config.layer_groups()
    if options.get("num_frames") is None and options.get("memory") is None:
        largest = max(specs, key=lambda spec: spec.frame_bytes)
        options["num_frames"] = min(len(specs) * largest.pages(DEFAULT_TOKENS), largest.frames_in(DEFAULT_MEMORY))
    options.setdefault("history", _HISTORY)
    states, wanted = config.state_spec(dtype), options.pop("state_memory", None)
    if states is not None:
        most = parse_bytes(DEFAULT_MEMORY) // states.frame_bytes
        default = max(LEAST_FRAMES, min(3 * at_once + KEPT_STATES, most))
        options |= {"states": states, "state_memory": default if wanted is None else wanted}
    elif wanted is not None:
        raise InvalidRequest(f"state_memory is {wanted!r}, and this model has no recurrent states; leave it out")
    return PagedKVCache(specs, layer_groups=layer_groups, device=decoder.device, **options)
