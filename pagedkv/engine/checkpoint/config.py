"""ModelConfig: the facts about a checkpoint that a decoder needs, from its config.json. No tensors, no torch.

Seven families differ in a few places. Each place is one field of ModelConfig; the decoder reads the fields and never
the name of the family.

| family  | norms           | q, k, v bias     | q/k norm | activation | windows                    | soft caps |
|---------|-----------------|------------------|----------|------------|----------------------------|-----------|
| llama   | w               | `attention_bias` |          | SiLU       |                            |           |
| mistral | w               |                  |          | SiLU       | all, if `sliding_window`   |           |
| qwen2   | w               | always           |          | SiLU       | from `max_window_layers` * |           |
| qwen3   | w               | `attention_bias` | yes      | SiLU       | from `max_window_layers` * |           |
| gemma2  | 1 + w, sandwich | `attention_bias` |          | GELU-tanh  | every second layer         | both      |
| gemma3  | 1 + w, sandwich | `attention_bias` | yes      | GELU-tanh  | all but every sixth layer  | logits    |
| qwen3_5 | 1 + w           | `attention_bias` | yes      | SiLU       |                            |           |

(*) if `use_sliding_window`. Soft caps: of the attention scores and of the logits. Sandwich: a norm before and one after
each sublayer. Of the layers of qwen3_5, three of four are linear attention (LinearConfig). The others have an output
gate, and rotate a quarter of each head. Its positions are those of a text: those of pictures are not known here.

Two styles of config.json are read. Up to transformers 4: `rope_theta`, `rope_scaling`, `rope_local_base_freq` and
`sliding_window_pattern`. From transformers 5 on: `rope_parameters` (one dict, or one per layer type) and `layer_types`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pagedkv.engine.checkpoint.fields import Fields, shown
from pagedkv.engine.checkpoint.files import read_json
from pagedkv.errors import CheckpointError, InvalidRequest
from pagedkv.spec import ALIGNMENT, COMPUTE_DTYPES, KVSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pagedkv.cache.states import StateSpec

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "qwen3_5_text")
WITH_VISION: Final = ("gemma3", "qwen3_5")
"""Models that also see pictures. Their config has the language model's part under `text_config`."""
ROPE_KINDS: Final = ("default", "linear", "llama3", "yarn", "longrope")
ACTIVATIONS: Final = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

MOST_LAYERS: Final = 4096

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
    "qwen3_5_text": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
}
"""Defaults of each family, for fields that config.json leaves out. The published Gemma 3 configs rely on them."""


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding of a layer. The formulas in `rope_angles.py` explain the fields.

    rotated: the first dimensions of each head, which are rotated; 0 for all of them.
    short_factors: the factor of each pair of longrope, for contexts up to `original_length`.
    long_factors:  the factors for longer contexts.
    is_long: whether the long ones are taken, see ModelConfig.within.
    """

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
    rotated: int = 0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False


@dataclass(frozen=True)
class LinearConfig:
    """The linear attention layers of a hybrid model: a gated delta rule behind a short convolution.

    layers:     their numbers among all layers
    conv_width: the inputs of each channel that the convolution sees, the token's own included
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def value_rows(self) -> int:
        """The values of a token, all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution: q and k of each key head, then v of each value head."""
        return 2 * self.num_key_heads * self.key_dim + self.value_rows

    def state_bytes(self, element_bytes: int) -> int:
        """Return the bytes of the state of a sequence, as a StateSpec pads them. element_bytes: of the inputs' dtype"""
        conv = self.channels * (self.conv_width - 1) * element_bytes
        recurrent = self.value_rows * self.key_dim * 4
        return len(self.layers) * sum(-(-part // ALIGNMENT) * ALIGNMENT for part in (conv, recurrent))


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, and each option in which the families differ.

    num_heads (H), num_kv_heads (K), head_dim (D). `windows` and `ropes` have one entry per layer with KV, that is, one
    with attention. A window counts the query's own position. A soft cap of 0.0 means no cap. `dtype` is the dtype that
    the checkpoint was saved in. `sinks` are the first tokens that all layers see beside their windows: 0, unless
    model/streaming.py made the config. `linear` is None for a model without recurrent states. With `output_gate`, the
    output of attention is multiplied by the sigmoid of a projection as wide as q.
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
    sinks: int = 0
    output_gate: bool = False
    linear: LinearConfig | None = None

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Read `folder`/config.json.

        Raises: CheckpointError if the folder or the file is missing, the file is damaged, or the decoder does not
            support the model
        """
        if not folder.is_dir():
            raise CheckpointError(
                f"there is no folder {folder}; give a folder that holds config.json, *.safetensors and tokenizer.json"
            )
        return cls.from_dict(read_json(folder / "config.json"), where=str(folder / "config.json"))

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, where: str = "config.json") -> ModelConfig:
        """Build the config from the values of a config.json; errors call the file `where`. Raises: as `load`."""
        values = _text_part(values, where)
        family = values["model_type"]
        return _model_config(family, Fields(values, where, defaults=_DEFAULTS[family]))

    def spec(self, *, block_size: int = 16, kv_dtype: str | None = None, dtype: str | None = None) -> KVSpec:
        """Return the geometry of a KV cache with one group of all layers with KV. Only the kernels know their windows.

        dtype: the dtype that the model computes in; None for the dtype of the checkpoint.
        """
        return KVSpec(
            num_layers=len(self.windows),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype or self.dtype,
            kv_dtype=kv_dtype,
        )

    def within(self, context: int | None) -> ModelConfig:
        """Return the config of the model for sequences of up to `context` tokens; None for all positions.

        longrope has two sets of frequencies. Keys that were turned by one fit no query turned by the other, so the
        longest sequence that may come chooses the set for all. Raises: InvalidRequest
        """
        if context is None:
            return self
        most = self.max_position_embeddings
        if not isinstance(context, int) or not 1 <= context <= most:
            raise InvalidRequest(f"context is {context!r}; give an int from 1 to {most}, the positions of the model")
        ropes = tuple(replace(rope, is_long=context > rope.original_length) for rope in self.ropes)
        return replace(self, max_position_embeddings=context, ropes=ropes)

    @property
    def rope_set(self) -> str:
        """The name of the set of frequencies, for the identity of stored KV: "short " of longrope, "" of all others."""
        return "short " * any(rope.short_factors and not rope.is_long for rope in self.ropes)

    def layer_groups(self) -> tuple[int, ...]:
        """Return the group of each layer, for `PagedKVCache(config.specs(), layer_groups=config.layer_groups())`."""
        places = {layer: number for number, (_, layers) in enumerate(self._groups()) for layer in layers}
        return tuple(places[layer] for layer in range(len(self.windows)))

    def state_spec(self, dtype: str | None = None) -> StateSpec | None:
        """Return the recurrent state of a sequence, for `PagedKVCache(states=...)`; None for a model without one.

        dtype: as of `spec`. The state of the delta rule is float32 in any case. Imports torch.
        """
        from pagedkv.cache.states import StateSpec
        from pagedkv.kernels.recurrent import conv_state, delta_state

        at = self.linear
        if at is None:
            return None
        layer = {
            "conv": (conv_state(at.channels, at.conv_width), dtype or self.dtype),
            "recurrent": (delta_state(at.num_value_heads, at.key_dim, at.value_dim), "float32"),
        }
        return StateSpec([layer] * len(at.layers))

    @property
    def qkv_rows(self) -> int:
        """The rows of the matrix that gives q, k and v of attention, and the output gate behind them."""
        return ((1 + self.output_gate) * self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def specs(
        self, *, block_size: int = 16, kv_dtype: str | None = None, dtype: str | None = None
    ) -> tuple[KVSpec, ...]:
        """Return one geometry per layer group; arguments as `spec`. The groups without a window come first.

        A group with a window gives back its frames behind the window.
        """
        whole = self.spec(block_size=block_size, kv_dtype=kv_dtype, dtype=dtype)
        return tuple(
            replace(whole, num_layers=len(layers), window=window, sinks=self.sinks) for window, layers in self._groups()
        )

    def _groups(self) -> list[tuple[int | None, list[int]]]:
        """Return (window, layers) of each group.

        The layers of one window form a set. Each set is cut into groups of the size of the smallest set, so that a
        frame fits any group. Only the last group of a window may be smaller.
        """
        kinds: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.windows):
            kinds.setdefault(window, []).append(layer)
        size = min(map(len, kinds.values()))
        ordered = sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        return [(window, layers[at : at + size]) for window, layers in ordered for at in range(0, len(layers), size)]


def _text_part(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the language model's part of a config.

    Raises: CheckpointError if the decoder does not support the model
    """
    kind, nested = values.get("model_type"), values.get("text_config")
    if "quantization_config" in values:
        raise CheckpointError(
            f"{where}: the weights are quantised (quantization_config); give a float32, bfloat16 or float16 checkpoint"
        )
    if kind in WITH_VISION and isinstance(nested, dict):
        outer: dict[str, Any] = {
            key: values[key] for key in ("torch_dtype", "dtype", "tie_word_embeddings") if key in values
        }
        values = {**outer, **nested}
        kind = values["model_type"] = f"{kind}_text"
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"{where}: model_type is {shown(kind)}; this decoder knows {', '.join((*FAMILIES, *WITH_VISION))}"
        )
    if values.get("use_bidirectional_attention"):
        raise CheckpointError(
            f"{where}: use_bidirectional_attention is set; this decoder is causal and would give wrong results"
        )
    return values


def _model_config(family: str, f: Fields) -> ModelConfig:
    """Build a ModelConfig from the fields of the language model."""
    gemma, hybrid = family in ("gemma2", "gemma3_text"), family == "qwen3_5_text"
    hidden_size, num_heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    num_kv_heads = f.integer("num_key_value_heads", num_heads)
    head_dim = f.integer("head_dim", max(1, hidden_size // num_heads))
    if num_heads % num_kv_heads:
        raise f.bad("num_attention_heads", f"a multiple of num_key_value_heads ({num_kv_heads})")
    if head_dim % 2:
        raise CheckpointError(
            f"{f.where}: head_dim {head_dim} is odd; it must be even: rotary embeddings turn pairs of dimensions"
        )
    attention_bias = family != "mistral" and f.flag("attention_bias", default=False)
    types = _layer_types(family, f)
    with_kv = tuple(kind for kind in types if kind != LINEAR)
    ropes = {kind: _rope(family, f, kind) for kind in sorted(set(with_kv))}
    return ModelConfig(
        family=family,
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
        attention_softcap=f.cap("attn_logit_softcapping") if family == "gemma2" else 0.0,
        logit_softcap=f.cap("final_logit_softcapping") if gemma else 0.0,
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
        unit_offset_norms=gemma or hybrid,
        sandwich_norms=gemma,
        qk_norm=family in ("qwen3", "gemma3_text") or hybrid,
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and f.flag("mlp_bias", default=False),
        tie_embeddings=f.flag("tie_word_embeddings", default=False),
        windows=_windows(family, f, with_kv),
        ropes=tuple(ropes[kind] for kind in with_kv),
        output_gate=hybrid and f.flag("attn_output_gate", default=True),
        linear=_linear(f, types) if LINEAR in types else None,
    )


def _layer_types(family: str, f: Fields) -> tuple[str, ...]:
    """Return FULL, SLIDING or LINEAR for each layer: from `layer_types`, or by the rule of the family."""
    num_layers = f.integer("num_hidden_layers", most=MOST_LAYERS)
    allowed = (FULL, LINEAR) if family == "qwen3_5_text" else (FULL, SLIDING)
    listed = f.values.get("layer_types")
    if family in ("llama", "mistral"):  # these read no `layer_types`: all layers are alike
        return (SLIDING if family == "mistral" and f.values["sliding_window"] is not None else FULL,) * num_layers
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != num_layers or any(t not in allowed for t in listed):
            raise f.bad("layer_types", f"a list of {num_layers} times {' or '.join(allowed)}")
        if set(listed) == {LINEAR}:
            raise f.bad("layer_types", f"a list with {FULL} in it: without attention there are no pages to keep")
        return tuple(listed)
    if family == "qwen3_5_text":
        interval = f.integer("full_attention_interval", most=num_layers)
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(num_layers))
    slides: Callable[[int], bool]
    if family == "gemma2":
        slides = lambda i: i % 2 == 0  # noqa: E731
    elif family == "gemma3_text":
        pattern = f.integer("sliding_window_pattern")
        slides = lambda i: (i + 1) % pattern != 0  # noqa: E731
    else:
        has_windows = f.flag("use_sliding_window", default=False) and f.values.get("sliding_window", 4096) is not None
        first = f.integer("max_window_layers", 28) if has_windows else num_layers
        slides = lambda i: i >= first  # noqa: E731
    return tuple(SLIDING if slides(i) else FULL for i in range(num_layers))


def _linear(f: Fields, types: tuple[str, ...]) -> LinearConfig:
    """Return the sizes of the linear layers. Raises: CheckpointError"""
    key_heads, value_heads = f.integer("linear_num_key_heads"), f.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise f.bad("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
    if f.values.get("hidden_act", "silu") != "silu":
        raise f.bad("hidden_act", "silu in a model with linear attention")
    width = f.integer("linear_conv_kernel_dim", most=64)
    if width < 2:
        raise f.bad("linear_conv_kernel_dim", "at least 2: the convolution sees earlier tokens")
    return LinearConfig(
        layers=tuple(i for i, kind in enumerate(types) if kind == LINEAR),
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=f.integer("linear_key_head_dim"),
        value_dim=f.integer("linear_value_head_dim"),
        conv_width=width,
    )


def _windows(family: str, f: Fields, types: tuple[str, ...]) -> tuple[int | None, ...]:
    """Return the window of each layer in tokens, None for full attention."""
    if SLIDING not in types:
        return (None,) * len(types)
    window = f.integer("sliding_window", 4096 if family.startswith("qwen") else None)
    return tuple(window if kind == SLIDING else None for kind in types)


def _rope_fields(family: str, f: Fields) -> dict[str, Any]:
    """Return `rope_parameters` or `rope_scaling`. Raises: CheckpointError if there are both, and they differ.

    Instructions for long contexts say to add `rope_scaling`. It counts next to parameters of type default that have the
    same base, as in transformers 5, which would drop all other parameters.
    """
    names = ("rope_parameters", "rope_scaling")
    new, old = (f.values.get(name) or {} for name in names)
    for name, given in zip(names, (new, old), strict=True):
        if not isinstance(given, dict):
            raise f.bad(name, "an object")
    if not (new and old):
        return new or old
    is_nested = any(isinstance(part, dict) for part in new.values())
    (own, theta), (added, base) = _rope_kind((new.get(FULL) or {}) if is_nested else new, f), _rope_kind(old, f)
    holds = own == added if is_nested else own in (added, {"rope_type": "default"})
    if not holds or theta != base or is_nested != (family == "gemma3_text"):
        raise CheckpointError(
            f"{f.where}: rope_parameters is {shown(new)} and rope_scaling is {shown(old)}; they differ. Remove one"
        )
    return new if is_nested else {**added, "rope_theta": theta}


def _rope_kind(given: Any, f: Fields) -> tuple[dict[str, Any], Any]:
    """Return the fields of a rope without its base, and its base."""
    fields = {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    old_kind, theta = fields.pop("type", "default"), fields.pop("rope_theta", f.values.get("rope_theta", 10_000.0))
    return {"rope_type": old_kind, **fields}, theta


def _rope(family: str, f: Fields, layer_type: str) -> RopeConfig:
    """Read the rotary embedding of the layers of one type, from either style of config."""
    given = _rope_fields(family, f)
    theta = f.positive("rope_theta", 10_000.0, least=2)
    # Gemma 3's sliding layers have a base of their own, and the old style never scales them.
    if family == "gemma3_text" and layer_type == SLIDING:
        theta = f.positive("rope_local_base_freq", 10_000.0, least=2)
        given = given if "rope_parameters" in f.values else {}
    if any(isinstance(part, dict) for part in given.values()):
        given = given.get(layer_type) or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{f.where}: the rope of {layer_type} is {shown(given)}; it must be an object")
    r = Fields(given, f"{f.where}: rope of {layer_type}")
    name = "rope_type" if "rope_type" in r.values else "type"
    if r.values.get(name) == "dynamic":
        raise CheckpointError(
            f"{r.where}: {name} is 'dynamic', whose frequencies change with the length of a sequence: the keys of a "
            "page would depend on what comes later, and no other prompt could use it; set yarn or linear"
        )
    kind = r.choice(name, "default", ROPE_KINDS)
    rotated = _rotated(family, f, r)
    theta = r.positive("rope_theta", theta, least=2)
    if kind == "default":
        return RopeConfig(theta=theta, rotated=rotated)
    longest = f.integer("max_position_embeddings")
    original = f.integer("original_max_position_embeddings", r.integer("original_max_position_embeddings", longest))
    factor = r.positive("factor", longest / original if kind in ("yarn", "longrope") else None)
    if kind == "linear":
        return RopeConfig(kind, theta, factor, rotated=rotated)
    if kind == "llama3":
        low, high = r.positive("low_freq_factor"), r.positive("high_freq_factor")
        if high <= low:
            raise r.bad("high_freq_factor", f"above low_freq_factor ({low:g})")
        return RopeConfig(kind, theta, factor, original, low, high, rotated=rotated)
    attention_factor = r.number("attention_factor") if "attention_factor" in r.values else None
    if kind == "longrope":
        if original < 2:
            raise r.bad("original_max_position_embeddings", "an integer of at least 2")
        head_dim = f.integer("head_dim", max(1, f.integer("hidden_size") // f.integer("num_attention_heads")))
        short, long = (r.numbers(name, (rotated or head_dim) // 2) for name in ("short_factor", "long_factor"))
        return RopeConfig(
            kind, theta, factor, original, attention_factor=attention_factor, rotated=rotated,
            short_factors=short, long_factors=long, is_long=longest > original,
        )  # fmt: skip
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=r.positive_or("beta_fast", 32.0),
        beta_slow=r.positive_or("beta_slow", 1.0),
        attention_factor=attention_factor,
        mscale=r.number("mscale", 0.0),
        mscale_all_dim=r.number("mscale_all_dim", 0.0),
        truncate=r.flag("truncate", default=True),
        rotated=rotated,
    )


def _rotated(family: str, f: Fields, r: Fields) -> int:
    """Return how many dimensions of each head are rotated: 0 for all. r: the fields of the rope"""
    partial = r.number("partial_rotary_factor", f.number("partial_rotary_factor", 1.0))
    if partial == 1.0:
        return 0
    if family != "qwen3_5_text":
        raise CheckpointError(f"{r.where}: partial_rotary_factor is {partial}; this decoder rotates whole heads (1.0)")
    rotated = int(f.integer("head_dim") * partial) if partial < 1 else 0
    if rotated < 2 or rotated % 2:
        raise CheckpointError(
            f"{r.where}: partial_rotary_factor is {partial}, which rotates {rotated} dimensions of a head; "
            "it must be below 1 and give an even number of them"
        )
    return rotated
