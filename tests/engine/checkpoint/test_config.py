"""config.json: both styles, optional fields, refused models; and rotary frequencies against those of transformers."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagedkv.engine.checkpoint.config import LinearConfig, ModelConfig, RopeConfig
from pagedkv.engine.model.rope_angles import Rotary
from pagedkv.errors import CheckpointError, InvalidRequest
from tests.engine.conftest import LLAMA3, YARN

if TYPE_CHECKING:
    from pathlib import Path

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
}
SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**LLAMA, **changes})


def test_both_styles_of_rope_say_the_same() -> None:
    old = read(rope_scaling={"rope_type": "llama3", **SCALED})
    older = read(rope_scaling={"type": "llama3", **SCALED})
    new = read(rope_theta=None, rope_parameters={"rope_type": "llama3", "rope_theta": 500_000.0, **SCALED})
    assert old == older == new
    assert old.ropes[0] == RopeConfig("llama3", 500_000.0, 8.0, 8192, 1.0, 4.0)


def test_both_styles_of_gemma_3_say_the_same() -> None:
    small = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 7,
        "sliding_window": 1024,
    }
    old = ModelConfig.from_dict(
        {**small, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 10_000}
    )
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000},
    }
    types = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    new = ModelConfig.from_dict({**small, "rope_parameters": nested, "layer_types": types})
    with_vision = ModelConfig.from_dict(
        {"model_type": "gemma3", "text_config": {**small, "rope_parameters": nested}, "dtype": "bfloat16"}
    )

    assert old == new
    assert old.windows == (*(1024,) * 5, None, 1024)
    assert [rope.theta for rope in old.ropes] == [1e4] * 5 + [1e6, 1e4]
    assert [rope.factor for rope in old.ropes] == [1.0] * 5 + [8.0, 1.0]
    assert (old.num_heads, old.num_kv_heads, old.head_dim) == (8, 4, 256)
    assert (old.vocab_size, old.attention_scale) == (262_208, 1 / 16)
    assert (with_vision.ropes, with_vision.dtype, with_vision.family) == (new.ropes, "bfloat16", "gemma3_text")


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 9}, [None] * 3),
        ({"model_type": "mistral", "sliding_window": 9}, [9, 9, 9]),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 3),
        ({"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 1}, [None] * 3),
        (
            {"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 1, "use_sliding_window": True},
            [None, 9, 9],
        ),
        ({"model_type": "qwen3", "sliding_window": 9, "layer_types": ["full_attention"] * 3}, [None] * 3),
        ({"model_type": "gemma2", "sliding_window": 9}, [9, None, 9]),
        ({"model_type": "gemma3_text", "sliding_window": 9, "sliding_window_pattern": 3}, [9, 9, None]),
    ],
)
def test_which_layers_slide(changes: dict[str, Any], windows: list[int | None]) -> None:
    assert list(read(**changes).windows) == windows


REFUSED = [
    ({"model_type": "mamba"}, "model_type is 'mamba'; this decoder knows llama, mistral"),
    ({"hidden_size": None}, "hidden_size is missing; it must be an integer from 1 to"),
    ({"hidden_size": "4096"}, "hidden_size is '4096'; it must be an integer"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be an integer from 1 to"),
    ({"num_key_value_heads": 7}, "num_attention_heads is 32; it must be a multiple of num_key_value_heads"),
    ({"head_dim": 33}, "head_dim 33 is odd"),
    ({"hidden_act": "relu"}, "hidden_act is 'relu'; it must be one of silu, gelu_pytorch_tanh"),
    ({"torch_dtype": "float8"}, "torch_dtype is 'float8'; it must be one of float32, bfloat16, float16"),
    ({"attention_bias": "no"}, "attention_bias is 'no'; it must be true or false"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a number"),
    ({"quantization_config": {"bits": 4}}, "quantised"),
    (
        {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}},
        "rope_type is 'ntk'; it must be one of default, linear, llama3, yarn, longrope",
    ),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        "type is 'dynamic', whose frequencies change .* the keys of a page would depend on what comes later",
    ),
    (
        {"rope_scaling": {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0], "long_factor": [2.0]}},
        r"short_factor is \[1.0\]; it must be a list of 64 numbers",
    ),
    (
        {"head_dim": 4, "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, "2"], "long_factor": [2, 2]}},
        r"short_factor\[1\] is '2'; it must be a number",
    ),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing; it must be a number"),
    ({"rope_scaling": [1.0]}, r"rope_scaling is \[1.0\]; it must be an object"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types is .* a list of 3 times"),
    ({"model_type": "gemma2", "sliding_window": None}, "sliding_window is None; it must be an integer"),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "this decoder is causal"),
]


@pytest.mark.parametrize(
    ("changes", "sentence"), REFUSED, ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
def test_an_unsupported_config_is_refused_in_one_line(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence) as refused:
        read(**changes)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("config.json")


QWEN3_5: dict[str, Any] = {**LLAMA, "model_type": "qwen3_5_text", "num_hidden_layers": 4}


def test_a_hybrid_has_pages_for_its_attention_alone() -> None:
    config = ModelConfig.from_dict(QWEN3_5)
    assert config.linear == LinearConfig((0, 1, 2), 16, 32, 128, 128, 4)
    assert config.num_layers == 4
    assert (config.spec().num_layers, config.layer_groups(), config.windows) == (1, (0,), (None,))
    assert config.ropes[0].rotated == 64
    assert config.qkv_rows == (2 * 32 + 2 * 8) * 256
    nested = {
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": {**QWEN3_5, "full_attention_interval": 2},
    }
    seeing = ModelConfig.from_dict(nested)
    assert seeing.tie_embeddings
    assert seeing.linear == LinearConfig((0, 2), 16, 32, 128, 128, 4)
    whole = ModelConfig.from_dict({**QWEN3_5, "layer_types": ["full_attention"] * 4})
    assert whole.linear is None
    assert whole.state_spec() is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types is .* a list with full_attention in it"),
        ({"layer_types": ["sliding_attention"] * 4}, "a list of 4 times full_attention or linear_attention"),
        ({"full_attention_interval": 5}, "full_attention_interval is 5; it must be an integer from 1 to 4"),
        ({"linear_num_value_heads": 24}, r"linear_num_value_heads is 24; it must be a multiple of .* \(16\)"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must be at least 2"),
        ({"attn_output_gate": 1}, "attn_output_gate is 1; it must be true or false"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh'; it must be silu"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, which rotates 0 dimensions"),
        ({"head_dim": 20}, "partial_rotary_factor is 0.25, which rotates 5 dimensions"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_hybrid_that_the_decoder_lacks_is_refused_in_one_line(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence) as refused:
        ModelConfig.from_dict({**QWEN3_5, **changes})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "has no config.json, only: nothing"),
        (b'{"model_type": "lla', "truncated"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[1]", "holds a list"),
    ],
)
def test_a_missing_or_garbled_file_is_refused_in_one_line(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=sentence) as refused:
        ModelConfig.load(tmp_path)
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    "llama3": LLAMA3,
    "llama3.1": {"rope_type": "llama3", "rope_theta": 500_000.0, **SCALED},
    "yarn": YARN,
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, attention factor": {**YARN, "attention_factor": 1.3},
    "yarn, mscale": {**YARN, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn, mscale alone": {**YARN, "mscale": 0.7},
    "yarn, factor below 1": {**YARN, "factor": 0.5},
    "yarn, tiny original": {**YARN, "original_max_position_embeddings": 1},
    "yarn, no ramp": {**YARN, "original_max_position_embeddings": 6},
    "yarn, small theta": {**YARN, "original_max_position_embeddings": 1_000_000, "rope_theta": 100.0, "beta_fast": 1e5},
}


LONGROPE: dict[str, dict[str, Any]] = {
    "factor by the lengths": {"original_max_position_embeddings": 64},
    "factor": {"original_max_position_embeddings": 64, "factor": 3.0},
    "attention factor": {"original_max_position_embeddings": 64, "attention_factor": 1.2},
    "nothing longer": {"original_max_position_embeddings": 512},
}


def turns_of(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return the angle of each pair at position 1, and the factor of cos and sin."""
    cos, sin = Rotary(rope, head_dim, torch.device("cpu")).angles(torch.tensor([1]), torch.float64)
    return torch.atan2(sin, cos)[0], float(torch.hypot(sin, cos)[0, 0])


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [8, 128])
def test_rotary_frequencies_are_those_of_transformers(tmp_path: Path, name: str, head_dim: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, max_position_embeddings=512, rope_parameters=dict(ROPES[name])
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]](config)
    config.save_pretrained(tmp_path)
    found, own_factor = turns_of(ModelConfig.load(tmp_path).ropes[0], head_dim)
    torch.testing.assert_close(found, frequencies.double(), rtol=2e-6, atol=0)
    assert own_factor == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("name", LONGROPE)
@pytest.mark.parametrize("context", [None, 65, 64, 1])
def test_the_largest_context_chooses_the_frequencies_of_longrope(
    tmp_path: Path, name: str, context: int | None
) -> None:
    given = {
        "rope_type": "longrope", "rope_theta": 10_000.0, **LONGROPE[name],
        "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
    }  # fmt: skip
    theirs = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=2, max_position_embeddings=512, rope_parameters=dict(given)
    )
    length = context or theirs.max_position_embeddings
    frequencies, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, seq_len=length)
    theirs.save_pretrained(tmp_path)
    config = ModelConfig.load(tmp_path).within(context)
    found, own_factor = turns_of(config.ropes[0], 16)
    torch.testing.assert_close(found, frequencies.double(), rtol=2e-6, atol=0)
    assert own_factor == pytest.approx(factor, rel=1e-6)
    assert config.max_position_embeddings == length
    assert config.rope_set == "short " * (length <= given["original_max_position_embeddings"])


def test_a_context_is_no_longer_than_the_model() -> None:
    assert read().within(100).max_position_embeddings == 100
    for context in (0, read().max_position_embeddings + 1):
        with pytest.raises(InvalidRequest, match=f"context is {context}; give an int from 1 to 131072, the positions"):
            read().within(context)


@pytest.mark.parametrize("name", ROPES)
def test_a_part_of_each_head_is_rotated_as_in_transformers(tmp_path: Path, name: str) -> None:
    """The other pairs turn by 0, and the attention factor of yarn leaves them alone."""
    parameters = {**ROPES[name], "partial_rotary_factor": 0.25}
    theirs = transformers.Qwen3_5TextConfig(head_dim=32, max_position_embeddings=512, rope_parameters=parameters)
    rotary = transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(theirs)
    theirs.save_pretrained(tmp_path)
    rope = ModelConfig.load(tmp_path).ropes[0]
    cos, sin = Rotary(rope, 32, torch.device("cpu")).angles(torch.tensor([1]), torch.float64)
    torch.testing.assert_close(torch.atan2(sin, cos)[0, :4], rotary.inv_freq.double(), rtol=2e-6, atol=0)
    assert float(torch.hypot(sin, cos)[0, 0]) == pytest.approx(rotary.attention_scaling, rel=1e-6)
    assert cos[0, 4:].tolist() == [1.0] * 12
    assert sin[0, 4:].tolist() == [0.0] * 12


BASE, BASE_2 = {"rope_theta": 1e6}, {"rope_theta": 1e5}
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 128}
PLAIN: dict[str, Any] = {"rope_type": "default", **BASE}
SCALINGS: dict[str, Any] = {
    "absent": None,
    "empty": {},
    "default": {"rope_type": "default"},
    "yarn by type": {"type": "yarn", **STRETCHED},
    "yarn": {"rope_type": "yarn", **STRETCHED},
    "yarn, base": {"rope_type": "yarn", **STRETCHED, **BASE},
    "yarn, other base": {"rope_type": "yarn", **STRETCHED, **BASE_2},
    "yarn, other factor": {"rope_type": "yarn", **STRETCHED, "factor": 2.0},
    "yarn, two types": {"rope_type": "yarn", "type": "linear", **STRETCHED},
    "linear": {"rope_type": "linear", "factor": 8.0},
}
PARAMETERS: dict[str, Any] = {
    "absent": None,
    "default": PLAIN,
    "default without base": {"rope_type": "default"},
    "default, other base": {**PLAIN, **BASE_2},
    "yarn": {"rope_type": "yarn", **STRETCHED, **BASE},
    "yarn, beta": {"rope_type": "yarn", **STRETCHED, **BASE, "beta_fast": 16.0},
    "linear": {"rope_type": "linear", "factor": 8.0, **BASE},
    "by type": {"full_attention": {"rope_type": "linear", "factor": 8.0, **BASE}, "sliding_attention": PLAIN},
    "default by type": {"full_attention": PLAIN, "sliding_attention": {**PLAIN, **BASE_2}},
}
TAKEN = [("absent", name) for name in SCALINGS] + [(name, "absent") for name in PARAMETERS if "by type" not in name]
TAKEN += [
    ("default", "empty"),
    ("default", "yarn"),
    ("default", "yarn by type"),
    ("yarn", "yarn"),
    ("linear", "linear"),
]


def ropes_of_transformers(folder: Path, layers: set[str]) -> dict[str, tuple[torch.Tensor, float]]:
    """Return, for each type of layer, the inverse frequencies and the attention factor."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).model
    rotary, found = model.rotary_emb, {}
    for layer in layers:
        of = f"{layer}_" if hasattr(rotary, f"{layer}_inv_freq") else ""
        found[layer] = getattr(rotary, f"{of}inv_freq"), getattr(rotary, f"{of}attention_scaling")
    return found


@pytest.mark.parametrize(
    ("family", "top", "scaling", "parameters"),
    [
        pytest.param(family, top, scaling, parameters, marks=[] if number % 18 in (0, 4) else pytest.mark.slow)
        for number, (parameters, scaling, family, top) in enumerate(
            itertools.product(PARAMETERS, SCALINGS, ("llama", "qwen2", "gemma3_text"), (BASE, {}))
        )
    ],
)
def test_two_fields_of_a_rope_are_read_as_in_transformers_or_refused(
    family: str, top: dict[str, Any], scaling: str, parameters: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32, "num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 128}
    fields = {"rope_parameters": PARAMETERS[parameters], "rope_scaling": SCALINGS[scaling]}
    layers = {"layer_types": ["full_attention", "sliding_attention"]} if family == "gemma3_text" else {}
    values = {"model_type": family, **sizes, **layers, **top, **{k: v for k, v in fields.items() if v is not None}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    if (parameters, scaling) not in TAKEN or top != BASE or family == "gemma3_text":
        try:
            config = ModelConfig.load(tmp_path)
        except CheckpointError:
            with pytest.raises(CheckpointError, match="rope_parameters is .* and rope_scaling is .* they differ"):
                ModelConfig.load(tmp_path)
            return
    config = ModelConfig.load(tmp_path)
    if fields["rope_parameters"] and fields["rope_scaling"]:
        theirs = ropes_of_transformers(tmp_path, {"full_attention", *layers.get("layer_types", ())})
        for layer, rope in zip(layers.get("layer_types", ["full_attention"]), config.ropes, strict=False):
            frequencies, factor = theirs[layer]
            found, own_factor = turns_of(rope, 32)
            torch.testing.assert_close(found, frequencies.double(), rtol=1e-5, atol=0)
            assert own_factor == pytest.approx(factor)


def test_parameters_by_type_take_a_scaling_that_says_the_same() -> None:
    small = {**LLAMA, "model_type": "gemma3_text", "rope_theta": None, "layer_types": ["full_attention"] * 3}
    new = ModelConfig.from_dict({**small, "rope_parameters": PARAMETERS["by type"]})
    same = {"rope_parameters": PARAMETERS["by type"], "rope_scaling": {**SCALINGS["linear"], **BASE}}
    assert ModelConfig.from_dict({**small, **same}).ropes == new.ropes
