"""Geometry: which layers of a config cache K and V, with which windows, and what a paged cache cannot serve.

Layers of hybrid models have a recurrent state: instead of K and V, or beside them.

transformers decides what each layer caches: DynamicCache(config) has one layer object for each. This file reads their
types, so it follows the host where configs differ. The shapes of K and V are not in the config in a form that all
models share; they are read off the model (`shapes_of`) or off the first tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from pagedkv import KVSpec, StateSpec
from pagedkv.errors import InvalidRequest

HOST: Final = tuple(int(part) for part in transformers.__version__.split(".")[:2])
"""The version of transformers."""

CACHE: Final = "cache" if HOST >= (5, 24) else "past_key_values"
"""The name of the cache among the arguments of a model, and in its output."""

KEPT: Final = 64
"""Positions that a layer with a window keeps behind it, so that rejected drafts can be taken back."""

_BOTH: Final = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
_WITH_STATE: Final = ("LinearAttentionLayer", *_BOTH) if HOST >= (5, 24) else ()  # older hosts: another interface

_CHANGING_ROTATION: Final = ("dynamic", "longrope")  # the angles of a token depend on the length of its sequence


class Shape(NamedTuple):
    """Shapes of one layer's K and V: heads, elements of a key, elements of a value, dtype."""

    heads: int
    key: int
    value: int
    dtype: torch.dtype

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor) -> Shape:
        """k, v: [B, heads, L, elements]."""
        return cls(k.shape[1], k.shape[-1], v.shape[-1], k.dtype)


class Shapes(NamedTuple):
    """The shapes of what the layers of a model cache.

    kv:     the shape of each layer in Geometry.cached.
    states: the tensors of each layer in Geometry.states that has any: (shape, dtype) by `state_name`.
    """

    kv: dict[int, Shape]
    states: dict[int, dict[str, tuple[tuple[int, ...], str]]]

    def state_spec(self) -> StateSpec | None:
        """Return the state of a sequence, layers in order; None for a model without states."""
        return StateSpec(list(self.states.values())) if self.states else None


@dataclass(frozen=True)
class Geometry:
    """The cache that a config asks for.

    windows: for each layer of the host, the positions that it sees, or None for all.
    cached:  the layers that have K and V of their own. Other layers use those of an earlier layer, or have none.
    states:  the layers that have a recurrent state.
    reusable: whether K and V of a token depend on the tokens before it alone, so that other prompts may use them.
    """

    windows: tuple[int | None, ...]
    cached: tuple[int, ...]
    reusable: bool
    states: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Any) -> Geometry:
        """Raises: InvalidRequest for a model that a paged cache cannot serve."""
        if not hasattr(config, "get_text_config"):
            raise InvalidRequest(f"got a {type(config).__name__} as the config of a model; give model.config")
        if getattr(config, "is_encoder_decoder", False):
            raise InvalidRequest(refusal(config, "it is an encoder-decoder, and pages serve decoders alone"))
        text = config.get_text_config(decoder=True)
        if getattr(text, "cross_attention_layers", None) or getattr(text, "add_cross_attention", False):
            raise InvalidRequest(refusal(config, "it has layers of cross-attention"))
        if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
            raise InvalidRequest(refusal(config, "it has layers of chunked attention"))
        if "recurrent" in (getattr(text, "block_types", None) or ()):  # before 5.24 the cache does not show this
            raise InvalidRequest(refusal(config, "it has layers of linear state"))
        with refused_if_it_fails(config, "transformers makes no DynamicCache for it"):
            layers = DynamicCache(config=text).layers
        kinds = [type(layer).__name__ for layer in layers]
        known = {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__, "DummyLayer", *_WITH_STATE}
        if not layers or set(kinds) - known:
            what = ", ".join(sorted(set(kinds) - known)) or "none"
            raise InvalidRequest(refusal(config, f"pages serve full and sliding attention, and it has {what}"))
        windows = tuple(getattr(layer, "sliding_window", None) for layer in layers)
        cached = tuple(n for n, kind in enumerate(kinds) if kind not in ("DummyLayer", "LinearAttentionLayer"))
        states = tuple(n for n, kind in enumerate(kinds) if kind in _WITH_STATE)
        rotations = repr([getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")])  # or of layers
        return cls(windows, cached, not any(repr(kind) in rotations for kind in _CHANGING_ROTATION), states)

    def specs(self, shapes: dict[int, Shape], block_size: int, kv_dtype: str | None) -> tuple[list[KVSpec], list[int]]:
        """Return the spec of each layer group, and the group of each cached layer. shapes: of each cached layer.

        A model without K and V gets pages of one small layer: they hold the tokens, by which prompts find states.
        """
        if not self.cached:
            return [KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=block_size)], [0]
        kinds = [(self.windows[layer], shapes[layer]) for layer in self.cached]
        groups = sorted(set(kinds), key=lambda kind: (kind[0] is not None, kind[0] or 0, *kind[1][:3]))
        specs = [
            KVSpec(
                num_layers=kinds.count((window, shape)),
                num_kv_heads=shape.heads,
                head_dim=shape.key,
                head_dim_v=shape.value,
                block_size=block_size,
                dtype=str(shape.dtype).removeprefix("torch."),
                kv_dtype=kv_dtype,
                window=window,
                keep=0 if window is None else KEPT,
            )
            for window, shape in groups
        ]
        return specs, [groups.index(kind) for kind in kinds]


def shapes_of(model: Any, geometry: Geometry) -> Shapes:
    """Return the shapes of what each layer caches: the model computes one token into a DynamicCache."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with refused_if_it_fails(model.config, "it computes no token with a DynamicCache"), torch.no_grad():
        model.forward(input_ids=token, use_cache=True, **{CACHE: cache})
    found = {}
    for layer in geometry.cached:
        held: Any = cache.layers[layer] if layer < len(cache.layers) else None
        if held is None or not isinstance(held.keys, torch.Tensor):
            raise InvalidRequest(refusal(model.config, f"its layer {layer} stored no K and V in the cache"))
        found[layer] = Shape.of(held.keys, held.values)
    states = {layer: _state_of(cache.layers[layer]) for layer in geometry.states}
    return Shapes(found, {layer: parts for layer, parts in states.items() if parts})


def state_name(kind: str, number: int) -> str:
    """Return the name of a tensor in the state of a layer. kind: "conv" or "recurrent"; number: the host's state_idx"""
    return kind if number == 0 else f"{kind}{number}"


def _state_of(layer: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return (shape without rows, dtype) of each tensor in a layer of the host's cache."""
    kept = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
    return {
        state_name(kind, number): (tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch."))
        for kind, tensors in kept.items()
        for number, tensor in tensors.items()
        if tensor is not None
    }


@contextmanager
def refused_if_it_fails(config: Any, why: str) -> Iterator[None]:
    """Raise InvalidRequest with the reason `why` for what models and configs raise: each fails in its own way."""
    try:
        yield
    except (InvalidRequest, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise InvalidRequest(refusal(config, f"{why} ({said(error)})")) from error


def said(error: Exception) -> str:
    """Return the class and the message of an error, in one line."""
    return ": ".join([type(error).__name__, *filter(None, [" ".join(str(error).split())])])


def refusal(config: Any, why: str) -> str:
    """Return the sentence that refuses a model because of `why`."""
    return f"a model of type {config.model_type!r} keeps the cache of transformers: {why}"
