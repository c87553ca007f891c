"""ModelConfig: what a decoder must know about a checkpoint, read from a Hugging Face folder's config.json. No tensors, no torch.

Six families differ in few places, and each place is one field here; the decoder reads the fields and never the family's name.

| family   | norms           | q, k, v bias     | q/k norm | activation | windows                                   | soft caps         |
|----------|-----------------|------------------|----------|------------|-------------------------------------------|-------------------|
| llama    | w               | `attention_bias` |          | SiLU       |                                           |                   |
| mistral  | w               |                  |          | SiLU       | every layer, if `sliding_window`          |                   |
| qwen2    | w               | always           |          | SiLU       | layers from `max_window_layers`, if asked |                   |
| qwen3    | w               | `attention_bias` | yes      | SiLU       | like qwen2                                |                   |
| gemma2   | 1 + w, sandwich | `attention_bias` |          | GELU-tanh  | every second layer                        | attention, logits |
| gemma3   | 1 + w, sandwich | `attention_bias` | yes      | GELU-tanh  | all but every sixth layer                 | logits            |

Two styles of config.json are read: `rope_theta`, `rope_scaling`, `rope_local_base_freq`, `sliding_window_pattern` up to transformers 4, and
`rope_parameters` (one dict, or one per layer type) with `layer_types` from transformers 5 on.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pagedkv.errors import CheckpointError
from pagedkv.spec import COMPUTE_DTYPES, KVSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
ROPE_KINDS: Final = ("default", "linear", "llama3", "yarn")
ACTIVATIONS: Final = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

FULL, SLIDING = "full_attention", "sliding_attention"

_GEMMA: Final[dict[str, Any]] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {
        **_GEMMA,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "sliding_window_pattern": 6,
    },
}
"""What a config.json may leave out, per family: the published Gemma 3 configs name only what differs from these."""


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding of a layer. What the fields mean is written beside the formulas in `rope.py`."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, and everything in which the families differ.

    num_heads (H), num_kv_heads (K), head_dim (D). `windows` and `ropes` have one entry a layer; a window counts the query's own position.
    Soft caps are 0.0 where there is none. `dtype` is what the checkpoint says it was saved in.
    """

    family: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: str
    attention_scale: float
    attention_softcap: float
    logit_softcap: float
    embedding_scale: float
    unit_offset_norms: bool
    sandwich_norms: bool
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_embeddings: bool
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig, ...]

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Read `folder`/config.json.

        Raises: CheckpointError if the folder or file is missing or garbled, or the model is of a kind this decoder is not.
        """
        if not folder.is_dir():
            raise CheckpointError(
                f"there is no folder {folder}; give one that holds config.json, *.safetensors and tokenizer.json"
            )
        return cls.from_dict(read_json(folder / "config.json"), where=str(folder / "config.json"))

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, where: str = "config.json") -> ModelConfig:
        """The same, from what config.json holds; `where` names it in errors."""
        return _model_config(_Fields(_text_part(values, where), where))

    def spec(self, *, block_size: int = 16, kv_dtype: str | None = None, dtype: str | None = None) -> KVSpec:
        """The geometry of this model's KV cache: one group of all layers, whose windows are arguments of the kernels only.

        dtype: what the model computes in; None for what the checkpoint was saved in.
        """
        return KVSpec(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype or self.dtype,
            kv_dtype=kv_dtype,
        )

    def layer_groups(self) -> tuple[int, ...]:
        """The layer group of each layer, for `PagedKVCache(config.specs(), layer_groups=config.layer_groups())`."""
        places = {layer: number for number, (_, layers) in enumerate(self._groups()) for layer in layers}
        return tuple(places[layer] for layer in range(self.num_layers))

    def specs(
        self, *, block_size: int = 16, kv_dtype: str | None = None, dtype: str | None = None
    ) -> tuple[KVSpec, ...]:
        """The same as `spec`, of groups that give back what lies behind their windows; those without a window come first."""
        whole = self.spec(block_size=block_size, kv_dtype=kv_dtype, dtype=dtype)
        return tuple(replace(whole, num_layers=len(layers), window=window) for window, layers in self._groups())

    def _groups(self) -> list[tuple[int | None, list[int]]]:
        """(window, layers) of each group. All are as large as the smallest kind, but for the last of a kind: a frame serves any of them."""
        kinds: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.windows):
            kinds.setdefault(window, []).append(layer)
        size = min(map(len, kinds.values()))
        ordered = sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        return [(window, layers[at : at + size]) for window, layers in ordered for at in range(0, len(layers), size)]


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file of a checkpoint holds.

    Raises: CheckpointError if it is missing, not JSON, or not an object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = ", ".join(sorted(p.name for p in path.parent.glob("*"))[:8]) or "nothing"
        raise CheckpointError(
            f"{path.parent} has no {path.name}, only: {there}. Give the folder of a Hugging Face checkpoint"
        ) from None
    except (OSError, ValueError) as why:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(
            f"{path} cannot be read as JSON ({why}); it is truncated or not the real file. Fetch it again"
        ) from None
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path} holds a {type(values).__name__}, not an object; it is not the real file. Fetch it again"
        )
    return values


def _text_part(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The language model's part of a config: Gemma 3 with vision keeps it under `text_config`."""
    kind, nested = values.get("model_type"), values.get("text_config")
    if "quantization_config" in values:
        raise CheckpointError(
            f"{where}: the weights are quantised (quantization_config); give a float32, bfloat16 or float16 checkpoint"
        )
    if kind == "gemma3" and isinstance(nested, dict):
        outer: dict[str, Any] = {
            key: values[key] for key in ("torch_dtype", "dtype", "tie_word_embeddings") if key in values
        }
        values = {**outer, **nested}
        kind = values["model_type"] = "gemma3_text"
    if kind not in FAMILIES:
        raise CheckpointError(f"{where}: model_type is {kind!r}; this decoder knows {', '.join(FAMILIES)} and gemma3")
    if values.get("use_bidirectional_attention"):
        raise CheckpointError(
            f"{where}: use_bidirectional_attention is set; this decoder is causal, so it can only give wrong results"
        )
    return values


class _Fields:
    """The values of one object of config.json, read by type; an error names file, field and what was found."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        family = values.get("model_type", "")
        present = {key: value for key, value in values.items() if value is not None}
        # A null counts as absent, except where it means "none of it" against a family's default.
        nulls = {key: None for key, value in values.items() if value is None and key in ("sliding_window", *_SOFTCAPS)}
        self.values = {**_DEFAULTS.get(family, {}), **present, **nulls}
        self.family, self.where = family, where

    def bad(self, name: str, must: str) -> CheckpointError:
        found = f"is {self.values[name]!r}" if name in self.values else "is missing"
        return CheckpointError(f"{self.where}: {name} {found}; it must be {must}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.bad(name, "an integer of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
            raise self.bad(name, "a number of at least 0")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value == 0:
            raise self.bad(name, "a number above 0")
        return value

    def cap(self, name: str) -> float:
        return 0.0 if self.values.get(name) is None else self.positive(name)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.bad(name, "true or false")
        return value

    def choice(self, name: str, default: str, among: tuple[str, ...]) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str) or value not in among:
            raise self.bad(name, f"one of {', '.join(among)}")
        return value


_SOFTCAPS: Final = ("attn_logit_softcapping", "final_logit_softcapping")


def _model_config(f: _Fields) -> ModelConfig:
    gemma = f.family in ("gemma2", "gemma3_text")
    hidden_size, num_heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    head_dim, num_kv_heads = (
        f.integer("head_dim", max(1, hidden_size // num_heads)),
        f.integer("num_key_value_heads", num_heads),
    )
    if num_heads % num_kv_heads:
        raise f.bad("num_attention_heads", f"a multiple of num_key_value_heads ({num_kv_heads})")
    if head_dim % 2:
        raise CheckpointError(
            f"{f.where}: head_dim {head_dim} is odd; rotary embeddings turn pairs of dimensions, give an even one"
        )
    attention_bias = f.family != "mistral" and f.flag("attention_bias", default=False)
    types = _layer_types(f)
    ropes = {kind: _rope(f, kind) for kind in sorted(set(types))}
    return ModelConfig(
        family=f.family,
        dtype=f.choice("dtype" if "dtype" in f.values else "torch_dtype", "float32", COMPUTE_DTYPES),
        vocab_size=f.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=f.integer("intermediate_size"),
        num_layers=len(types),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=f.integer("max_position_embeddings"),
        norm_eps=f.number("rms_norm_eps", 1e-6),
        activation=ACTIVATIONS[f.choice("hidden_activation" if gemma else "hidden_act", "silu", tuple(ACTIVATIONS))],
        attention_scale=(f.positive("query_pre_attn_scalar") if gemma else head_dim) ** -0.5,
        attention_softcap=f.cap("attn_logit_softcapping") if f.family == "gemma2" else 0.0,
        logit_softcap=f.cap("final_logit_softcapping") if gemma else 0.0,
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
        unit_offset_norms=gemma,
        sandwich_norms=gemma,
        qk_norm=f.family in ("qwen3", "gemma3_text"),
        qkv_bias=f.family == "qwen2" or attention_bias,
        output_bias=f.family != "qwen2" and attention_bias,
        mlp_bias=f.family == "llama" and f.flag("mlp_bias", default=False),
        tie_embeddings=f.flag("tie_word_embeddings", default=False),
        windows=_windows(f, types),
        ropes=tuple(ropes[kind] for kind in types),
    )


def _layer_types(f: _Fields) -> tuple[str, ...]:
    """`full_attention` or `sliding_attention` for each layer: as listed, or by the family's old rule."""
    num_layers = f.integer("num_hidden_layers")
    listed = f.values.get("layer_types")
    if f.family in ("llama", "mistral"):  # they take no list: every layer is alike
        return (SLIDING if f.family == "mistral" and f.values["sliding_window"] is not None else FULL,) * num_layers
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != num_layers or not set(listed) <= {FULL, SLIDING}:
            raise f.bad("layer_types", f"a list of {num_layers} times {FULL} or {SLIDING}")
        return tuple(listed)
    slides: Callable[[int], bool]
    if f.family == "gemma2":
        slides = lambda i: i % 2 == 0  # noqa: E731
    elif f.family == "gemma3_text":
        pattern = f.integer("sliding_window_pattern")
        slides = lambda i: (i + 1) % pattern != 0  # noqa: E731
    else:
        first = f.integer("max_window_layers", 28) if _qwen_slides(f) else num_layers
        slides = lambda i: i >= first  # noqa: E731
    return tuple(SLIDING if slides(i) else FULL for i in range(num_layers))


def _qwen_slides(f: _Fields) -> bool:
    return f.flag("use_sliding_window", default=False) and f.values.get("sliding_window", 4096) is not None


def _windows(f: _Fields, types: tuple[str, ...]) -> tuple[int | None, ...]:
    if SLIDING not in types:
        return (None,) * len(types)
    window = f.integer("sliding_window", 4096 if f.family.startswith("qwen") else None)
    return tuple(window if kind == SLIDING else None for kind in types)


def _rope(f: _Fields, layer_type: str) -> RopeConfig:
    """The rotary embedding of the layers of one type, from either style of config."""
    given = f.values.get("rope_parameters") or f.values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise f.bad("rope_parameters" if f.values.get("rope_parameters") else "rope_scaling", "an object")
    theta = f.positive("rope_theta", 10_000.0)
    if (
        f.family == "gemma3_text" and layer_type == SLIDING
    ):  # local layers have a base of their own, and are never scaled by the old style
        theta = f.positive("rope_local_base_freq", 10_000.0)
        given = given if "rope_parameters" in f.values else {}
    if any(isinstance(part, dict) for part in given.values()):
        given = given.get(layer_type) or {}
    r = _Fields(dict(given), f"{f.where}: rope of {layer_type}")
    kind = r.choice("rope_type" if "rope_type" in r.values else "type", "default", ROPE_KINDS)
    partial = r.number("partial_rotary_factor", f.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise CheckpointError(f"{r.where}: partial_rotary_factor is {partial}; this decoder turns whole heads (1.0)")
    theta = r.positive("rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    longest = f.integer("max_position_embeddings")
    original = f.integer("original_max_position_embeddings", r.integer("original_max_position_embeddings", longest))
    factor = r.positive("factor", longest / original if kind == "yarn" else None)
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    if kind == "llama3":
        return RopeConfig(kind, theta, factor, original, r.positive("low_freq_factor"), r.positive("high_freq_factor"))
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=r.number("beta_fast", 32.0) or 32.0,
        beta_slow=r.number("beta_slow", 1.0) or 1.0,
        attention_factor=r.number("attention_factor") if "attention_factor" in r.values else None,
        mscale=r.number("mscale", 0.0),
        mscale_all_dim=r.number("mscale_all_dim", 0.0),
        truncate=r.flag("truncate", default=True),
    )
