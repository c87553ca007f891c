"""Batching: `generate_batch` and ContinuousBatching of transformers with our kernels, over their own pool.

    with paged_batching(model):
        model.generate_batch(prompts, generation_config)

The host keeps its scheduler and its cache. Its pages are a block table in another form: an index of tokens, from which
the table of a step is read once and serves all layers of full attention. Layers with a window are rings, which new
tokens overwrite: their K and V are gathered by the host, and our kernel attends to the copy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pagedkv import KVLayer, PagedBatch, paged_attention, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers.geometry import HOST, Geometry
from pagedkv.integrations.transformers.names import NameInConfig

BATCHING_NAME: Final = "pagedkv_flash"
"""The host takes any attention function for batches whose name contains "flash"."""

NEEDED: Final = (5, 23)
"""The oldest version of transformers whose batches have the form that is read here."""

_IN_CONFIG: Final = NameInConfig(BATCHING_NAME)

_STEPS: WeakKeyDictionary[Any, tuple[Any, PagedBatch]] = WeakKeyDictionary()
"""cache of the host: (the index of its last step, the table of that step)."""


@contextmanager
def paged_batching(model: Any) -> Iterator[None]:
    """Let batches of `model` attend by our kernels inside of the context. The model is as before afterwards.

    Raises: InvalidRequest for a model that pages cannot serve, see `patch`
    """
    if not isinstance(model, PreTrainedModel):
        raise InvalidRequest(f"paged_batching got a {type(model).__name__}; give a PreTrainedModel of transformers")
    if HOST < NEEDED:
        raise InvalidRequest(f"paged_batching needs transformers {NEEDED[0]}.{NEEDED[1]} or newer")
    Geometry.of(model.config)
    if not model._supports_attention_backend:
        raise InvalidRequest(f"{type(model).__name__} does not use the AttentionInterface, which paged_batching needs")
    _register()
    context = object()
    _IN_CONFIG.put(model.config, context)
    try:
        yield
    finally:
        _IN_CONFIG.take(model.config, lambda user: user is context)


def _register() -> None:
    """Make _batched_attention known to the host, once.

    Layers of transformers 5.24 and newer call `update` of the host's cache before attention, and it gathers K and V of
    all tokens. For models in the context it gathers nothing: _batched_attention gets the cache, as from older layers.
    The replaced method stays, and does what the host's does for all other models.
    """
    if BATCHING_NAME in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return
    if HOST >= (5, 24):
        PagedAttentionCache.update = _update_instead_of(PagedAttentionCache.update)  # type: ignore[method-assign]
    AttentionInterface.register(BATCHING_NAME, _batched_attention)  # last: after an interrupt, all is done again


def _update_instead_of(own: Any) -> Any:
    @functools.wraps(own)
    def update(cache: Any, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: Any) -> Any:
        if cache.config._attn_implementation != BATCHING_NAME or kwargs.get("cache") is cache:
            return own(cache, key_states, value_states, layer_idx, kwargs=kwargs)
        kwargs["cache"] = cache
        return key_states, value_states

    return update


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _batched_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Store K and V of the new tokens of a packed batch in the host's pages, and attend to them.

    Shapes: query [1, H, T, D], key [1, K, T, D], value [1, K, T, Dv]; returns out [1, T, H, Dv]
    """
    cache = options.get("cache")
    if cache is None or not hasattr(cache, "layer_to_allocator"):
        raise InvalidRequest(
            "paged_batching serves generate_batch() and ContinuousBatching alone; leave its context for generate() and "
            "model(...), or use patch(model)"
        )
    allocator = cache.layer_to_allocator[module.layer_idx]
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    if allocator.layer_type == "full_attention":
        keys, values = allocator.get_cache_for_block_table(module.layer_idx)
        layer, batch, window = KVLayer(keys, values), _step_of(cache, allocator, options), None
        slots = options["write_index"][allocator.index]
        write_kv(k[: len(slots)], v[: len(slots)], layer, slots)
    else:
        layer, batch = _gathered(cache, module.layer_idx, key, value, options)
        window = options.get("sliding_window")
    scale, softcap, sinks = options.get("scaling"), options.get("softcap") or 0.0, options.get("s_aux")
    out = paged_attention(q, layer, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
    return out.unsqueeze(0), None


def _step_of(cache: Any, allocator: Any, options: dict[str, Any]) -> PagedBatch:
    """Return the block table of the step under way, for all layers of full attention.

    The host names the tokens that a layer reads one by one: every S-th of a sequence tells its page. Without tokens in
    the cache, it names those that the layer writes.
    """
    kept = _STEPS.get(cache)
    if kept is not None and kept[0] is options["read_index"]:
        return kept[1]
    size, read = allocator.tokens_per_page, options["read_index"][allocator.index]
    write = options["write_index"][allocator.index]
    tokens = read if read.numel() else write
    cu_seqlens_k = options["cu_seq_lens_k"][allocator.layer_type]
    longest = int(options["max_length_k"][allocator.layer_type])
    firsts = torch.arange(max(1, -(-longest // size)), device=tokens.device) * size
    table = tokens[(cu_seqlens_k[:-1, None] + firsts).clamp(max=len(tokens) - 1).long()] // size
    batch = _batch_of(table, cu_seqlens_k, longest, options)
    _STEPS[cache] = options["read_index"], batch
    return batch


def _gathered(
    cache: Any, number: int, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> tuple[KVLayer, PagedBatch]:
    """Return K and V that the host gathers for a layer with a window, as pages of one token, and their table."""
    names = ("cache", "cu_seq_lens_k", "max_length_k", "read_index", "write_index")
    theirs = {name: options[name] for name in names}
    keys, values = cache.update(key_states=key, value_states=value, layer_idx=number, kwargs=theirs)
    keys, values = (one[0].transpose(0, 1).unsqueeze(1).contiguous() for one in (keys, values))
    cu_seqlens_k, longest = theirs["cu_seq_lens_k"], int(theirs["max_length_k"])
    table = cu_seqlens_k[:-1, None] + torch.arange(longest, device=keys.device)
    return KVLayer(keys, values), _batch_of(table.clamp(max=len(keys) - 1), cu_seqlens_k, longest, options)


def _batch_of(table: torch.Tensor, cu_seqlens_k: torch.Tensor, longest: int, options: dict[str, Any]) -> PagedBatch:
    """Return the batch of a step of the host. longest: tokens of the longest sequence."""
    starts, most_queries = options["cu_seq_lens_q"].to(torch.int32), int(options["max_length_q"])
    return PagedBatch(table.to(torch.int32), cu_seqlens_k.diff().to(torch.int32), starts, most_queries, longest)
