"""Attention: the function that models call by the name "pagedkv", and the mask function of that name.

The name is in a model's config only while a forward pass with a PagedCache runs (patching.py). In another thread, the
same model may be in a forward pass without one: then the functions hand over to those of the model's own name.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers.names import NameInConfig

if TYPE_CHECKING:
    from pagedkv.integrations.transformers.cache import PagedCache

NAME: Final = "pagedkv"

OF_GENERATE: Final = frozenset(inspect.signature(GenerationMixin.generate).parameters) | frozenset(
    inspect.signature(GenerationMixin._assisted_decoding).parameters
)
"""Arguments of generate() and of its decoding methods. The host passes an argument that the method does not take, such
as `tokenizer`, on to the model. No attention function reads it."""

_KNOWN: Final = OF_GENERATE | frozenset(
    ("cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
     "position_embeddings", "position_ids", "return_dict", "s_aux", "scaling", "sliding_window", "softcap", "use_cache",
     "logits_to_keep", "num_items_in_batch", "mm_token_type_ids", "token_type_ids")
)  # fmt: skip
"""Arguments of an attention function that the kernels serve, or that do not concern attention."""


class _Active(threading.local):
    """The forward pass with a PagedCache that runs in this thread.

    cache: its cache, or None. own: the name of the attention function that the model has otherwise.
    shared: for models whose later layers use the keys of earlier ones: id(key): (layer, key, value); else None.
    kept: how many of the last columns the model was asked to compute logits for; 0: all.
    asked: whether the model asked for masks with a window and without one; None: not noted (trial.py).
    """

    def __init__(self) -> None:
        self.cache: PagedCache | None = None
        self.shared: dict[int, tuple[int, torch.Tensor, torch.Tensor]] | None = None
        self.kept = 0
        self.asked: set[bool] | None = None


ACTIVE: Final = _Active()

IN_CONFIG: Final = NameInConfig(NAME)
"""Its users are (thread, id of a Patched): the forward passes that attend to pages."""


def register() -> None:
    """Make the attention function and the mask function "pagedkv" known to transformers. `patch` does so."""
    if NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, mask)


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Store K and V of the new tokens in the pages of the layer, and attend to the pages.

    torch.compile traces it: a graph calls one operator for each layer.
    Shapes: query [B, H, L, D], key [B, K, L, D], value [B, K, L, Dv]; returns out [B, L, H, Dv]
    Raises: InvalidRequest for what pages cannot serve; the model is then to be used without `patch`
    """
    cache = ACTIVE.cache
    if cache is None:
        own: tuple[torch.Tensor, None] = _own_attention(module)(module, query, key, value, attention_mask, **options)
        return own
    layer, is_new = _layer_of(cache, key, value)
    if attention_mask is not None:
        raise InvalidRequest("the model makes a mask of its own, which pages do not serve; use it without patch()")
    if options.get("is_causal") is False:
        raise InvalidRequest("a layer of the model is not causal, which pages do not serve; use it without patch()")
    unknown = sorted(name for name, given in options.items() if name not in _KNOWN and given is not None)
    if unknown:
        raise InvalidRequest(f"the model's attention takes {unknown}, which pages do not serve; use it without patch()")
    window = cache.pool.geometry.windows[layer]
    if options.get("sliding_window") not in (None, window):
        raise InvalidRequest(
            f"layer {layer} has a window of {options['sliding_window']}, and its cache one of {window}; use the model "
            "without patch()"
        )
    attend = torch.ops.pagedkv_transformers.attend.default if torch.compiler.is_compiling() else _attend
    softcap, sinks = options.get("softcap") or 0.0, options.get("s_aux")
    return attend(query, key, value, layer, is_new, options.get("scaling"), softcap, sinks), None


def _layer_of(cache: PagedCache, key: torch.Tensor, value: torch.Tensor) -> tuple[int, bool]:
    """Return the layer to whose pages K and V belong, and whether they are to be stored there."""
    if cache.pending is not None:
        layer, k, v = cache.pending
        cache.pending = None
        if key is not k or value is not v:
            raise InvalidRequest(
                f"layer {layer} changes K or V between cache and attention, so it cannot read pages; use the model "
                "without patch()"
            )
        if ACTIVE.shared is not None:
            ACTIVE.shared[id(key)] = (layer, key, value)
        return layer, True
    found = (ACTIVE.shared or {}).get(id(key))
    if found is None or found[1] is not key or found[2] is not value:
        raise InvalidRequest(
            "a layer attends to K and V that are in no cache; use the model without patch(). If a forward pass was "
            "interrupted, call the patched model itself before its parts"
        )
    return found[0], False


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    is_new: bool,
    scale: float | None,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Write K and V if they are new, and attend to the pages of `layer` in the step of this thread's forward pass."""
    cache = ACTIVE.cache
    step = None if cache is None else cache.holdings.step
    if cache is None or step is None:
        raise InvalidRequest("a compiled layer attends to pages outside of the forward pass of a patched model")
    pool = cache.pool
    place = pool.place(layer)
    if is_new:
        cache.note_stored(layer)
        pool.write(layer)(_tokens(key), _tokens(value), step.batch[place])
    columns = query.shape[2]
    if columns not in (step.width, ACTIVE.kept):
        raise InvalidRequest(
            f"layer {layer} attends with {columns} of the {step.width} columns of a forward pass, and logits_to_keep "
            f"is {ACTIVE.kept}; use the model without patch()"
        )
    batch = step.batch[place] if columns == step.width else step.last_columns(place, columns)
    out: torch.Tensor = pool.attention(layer, scale, softcap, sinks)(_tokens(query), batch)
    return out.view(query.shape[0], columns, *out.shape[1:])


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """Return [B, heads, L, D] as [B * L, heads, D]: a view if L is 1, or as models of the host make it."""
    return x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)


def _shape_of_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


_LIBRARY: Any = torch.library.Library("pagedkv_transformers", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attend(Tensor query, Tensor key, Tensor value, int layer, bool is_new, float? scale, float softcap, Tensor? sinks)"
    " -> Tensor"
)
_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("pagedkv_transformers::attend", _shape_of_attend, lib=_LIBRARY)


def mask(*args: Any, **options: Any) -> Any:
    """Return no mask: pages hold no padding, and the kernels are causal. Raises: InvalidRequest for another mask."""
    if ACTIVE.cache is None:
        own = IN_CONFIG.own(options.get("config"))
        return ALL_MASK_ATTENTION_FUNCTIONS[own](*args, **options)
    if not options.get("allow_is_causal_skip", True) or "allow_is_bidirectional_skip" in options:
        raise InvalidRequest("the model asks for a mask that is not causal; use it without patch()")
    if ACTIVE.asked is not None:
        ACTIVE.asked.add(options.get("mask_function") is not causal_mask_function)
    return None


def _own_attention(module: Any) -> Callable[..., Any]:
    """Return the attention function that the model of `module` has without us."""
    own = IN_CONFIG.own(module.config)
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(own, eager)
