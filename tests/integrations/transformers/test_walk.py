"""Every causal model of the installed transformers that a tiny config can make: equal tokens, or one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DynamicCache,
    MusicgenForCausalLM,
    MusicgenMelodyForCausalLM,
)
from transformers.models import gemma3n
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers import NEWEST_HOST, PagedCache, patch, unpatch
from pagedkv.integrations.transformers.geometry import CACHE, HOST
from pagedkv.integrations.transformers.linears import PagedLinear
from tests.integrations.transformers.families import FAMILIES, SHARED, SIZES, WINDOW, prompts
from tests.integrations.transformers.hybrids import DELTA, HYBRIDS, MOE, WHOLE

SMALL: Final[dict[str, Any]] = SHARED | {
    "n_embd": 64, "n_layer": 4, "n_head": 4, "num_layers": 4, "num_heads": 4, "d_model": 64, "n_heads": 4,
    "n_layers": 4, "ffn_dim": 128, "ffn_hidden_size": 128, "word_embed_proj_dim": 64, "attention_heads": 4,
    "decoder_layers": 4, "num_decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 128,
    "encoder_layers": 4, "num_encoder_layers": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 128,
    "head_dim": 16, "kv_channels": 16, "rotary_dim": 8, "sliding_window": 16, "window_size": 16, "is_decoder": True,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512,
    "query_pre_attn_scalar": 16, "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
    "num_kv_shared_layers": 2, "state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16,
}  # fmt: skip
"""Sizes by the names that configs have for them."""

GEMMA4: Final = FAMILIES["gemma4_text"] | {"use_bidirectional_attention": None}
TOWER: Final = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
"""A part of a model that sees images, which no test here shows it."""

EAR: Final = {
    "num_mel_bins": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "hidden_size": 32,
    "max_source_positions": 16,
}  # fmt: skip
"""A part of a model that hears."""

LAYERS: Final = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
MUSIC: Final = {
    "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128,
    "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
LATENT: Final = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "head_dim": 32,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
DOTS3: Final = SIZES | LATENT | {f"swa_{name}": value for name, value in LATENT.items()} | WINDOW | {
    "qk_rope_head_dim": 16, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_experts_intermediate_size": 32, "index_topk": 64, "index_head_dim": 16,
    "index_n_heads": 2,
}  # fmt: skip
DORY: Final = SHARED | WINDOW | {"head_dim": 16, "n_input_layers": 1, "n_output_layers": 1}
QWEN4: Final = SHARED | {
    "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "indexer_n_heads": 2,
    "shared_expert_intermediate_size": 32, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
    "indexer_compress_ratio": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "hc_lowrank": 8,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
DRAFTER: Final = GEMMA4 | {"num_kv_shared_layers": 4, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}

BY_HAND: Final[dict[str, dict[str, Any]]] = {
    "blt": LAYERS
    | {
        "vocab_size": 99, "encoder_hash_byte_group_vocab": 64, "local_attention_window_len": 16, "pad_token_id": 0,
        "encoder_config": LAYERS | {"vocab_size": 99, "hidden_size_global": 128}, "bos_token_id": 1,
        "decoder_config": LAYERS | {"vocab_size": 99, "hidden_size_global": 128}, "eos_token_id": None,
        "global_config": LAYERS | {"hidden_size": 128}, "patcher_config": LAYERS | {"vocab_size": 99},
    },
    "cohere_compass_text": SHARED
    | WINDOW
    | {
        "rope_parameters": {
            "full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 4, "vocab_size": 99, "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": DORY,
    "dots3_note": {
        "text_config": DOTS3, "audio_config": {"adapter_out_dim": 64},
        "vision_config": {
            "num_hidden_layers": 1, "pyramid_num_routed": [-1], "adapter_out_dim": 64, "hidden_size": 32,
            "adapter_in_dim": 32, "num_attention_heads": 2,
        },
    },
    "dots3_note_text": DOTS3,
    "gemma3": {"text_config": FAMILIES["gemma3_text"], "vision_config": TOWER},
    "gemma3n": {
        "text_config": FAMILIES["gemma3n_text"] | {"vocab_size_per_layer_input": 90},
        "vision_config": {"vocab_size": 4, "vocab_offset": 90, "hidden_size": 32},
        "audio_config": {
            "hidden_size": 32, "conf_num_attention_heads": 2, "conf_num_hidden_layers": 1, "vocab_size": 4,
            "vocab_offset": 94, "sscp_conv_channel_size": (4, 4), "input_feat_size": 16,
        },
    },
    "gemma3n_text": FAMILIES["gemma3n_text"],
    "gemma4": {"text_config": GEMMA4, "vision_config": TOWER, "audio_config": None},
    "gemma4_assistant": {"text_config": DRAFTER, "backbone_hidden_size": 64},
    "gemma4_text": GEMMA4,
    "gemma4_unified": {"text_config": GEMMA4},
    "gemma4_unified_assistant": {"text_config": DRAFTER, "backbone_hidden_size": 64},
    "gemma4_unified_text": GEMMA4,
    "git": SIZES | {"vision_config": TOWER},
    "got_ocr2": {
        "text_config": SHARED | {"model_type": "qwen2"}, "image_token_index": 98,
        "vision_config": TOWER
        | {"mlp_dim": 64, "output_channels": 16, "window_size": 2, "global_attn_indexes": [0]},
    },
    "hrm_text": SIZES | {"head_dim": 16, "num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 2},
    "lfm2_moe": SHARED
    | {
        "layer_types": ["conv", "full_attention"] * 2, "num_experts": 4, "num_experts_per_tok": 2,
        "num_dense_layers": 1, "moe_intermediate_size": 32,
    },
    "longcat_flash": SIZES
    | {
        "num_key_value_heads": 4, "ffn_hidden_size": 128, "q_lora_rank": 32, "kv_lora_rank": 32, "num_layers": 2,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 16, "moe_topk": 2,
        "n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 32,
    },
    "moss_transcribe_diarize": {
        "text_config": SHARED | {"model_type": "qwen3", "head_dim": 16}, "audio_config": EAR, "audio_token_id": 98,
    },
    "musicgen_decoder": MUSIC,
    "musicgen_melody_decoder": MUSIC,
    "phi4_multimodal": SHARED
    | {
        "eos_token_id": 98,
        "vision_config": TOWER
        | {"image_size": 28, "crop_size": 28, "patch_size": 14, "num_hidden_layers": 2, "image_token_id": 97},
        "audio_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_blocks": 2, "num_attention_heads": 2,
            "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16,
            "input_size": 16, "audio_token_id": 96,
        },
    },
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "reformer": {
        "vocab_size": 99, "hidden_size": 64, "num_attention_heads": 4, "attention_head_size": 16, "is_decoder": True,
        "attn_layers": ["local", "lsh"], "axial_pos_embds": False, "feed_forward_size": 128, "hash_seed": 0,
        "max_position_embeddings": 512, "num_buckets": 4, "local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16,
        "eos_token_id": None,
    },
    "rwkv": SIZES | {"attention_hidden_size": 64},
    "xlstm": SIZES | {"num_heads": 4, "num_blocks": 2, "qk_dim_factor": 1.0},
    "xmod": SIZES | {"is_decoder": True, "default_language": "en_XX"},
    "qwen3_5": {"text_config": DELTA},
    "qwen3_5_moe": {"text_config": DELTA | MOE},
    **HYBRIDS,
    **WHOLE,
}  # fmt: skip
"""Arguments of the configs for which SMALL makes no model."""

DECODERS: Final = {"musicgen": MusicgenForCausalLM, "musicgen_melody": MusicgenMelodyForCausalLM}
"""Models that AutoModelForCausalLM does not make of their config, but of that of their decoder."""


@contextlib.contextmanager
def blind(module: Any) -> Iterator[None]:
    """Let Gemma 3n be made without its eyes, which need the package timm."""
    own = module.AutoModel.from_config

    def make(config: Any, **options: Any) -> Any:
        return torch.nn.Identity() if config.model_type == "gemma3n_vision" else own(config, **options)

    with mock.patch.object(module.AutoModel, "from_config", make):
        yield


def tiny(name: str) -> Any:
    """Return a small model of a type with random weights."""
    kind = f"{name}_decoder" if name in DECODERS else name
    config = CONFIG_MAPPING[kind](**BY_HAND.get(kind, {}))
    for part in {id(one): one for one in (config, config.get_text_config(decoder=True))}.values():
        for field, value in {} if kind in BY_HAND else SMALL.items():
            with contextlib.suppress(Exception):  # properties without a setter, and each config fails in its own way
                if hasattr(part, field):
                    setattr(part, field, value)
        with contextlib.suppress(Exception):
            if hasattr(part, "kv_lora_rank"):  # these have as many KV heads as heads, and turn a part of each
                part.num_key_value_heads = part.num_attention_heads
        with contextlib.suppress(Exception):
            if kind not in BY_HAND and getattr(part, "layer_types", None) is not None:
                kinds = part.layer_types
                part.layer_types = (kinds[:2] + kinds[-2:])[: part.num_hidden_layers]
    torch.manual_seed(0)
    with blind(gemma3n.modeling_gemma3n):
        model = DECODERS.get(name, AutoModelForCausalLM.from_config)(config).float().eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def tokens(model: Any, options: dict[str, Any], **more: Any) -> list[list[int]]:
    inputs = prompts(24, (0, 5, 1))
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0} | options | more
    found: list[list[int]] = model.generate(**inputs, **options).tolist()
    return found


REFUSED: Final = {
    name: why
    for why, names in {
        "and it has DynamicIndexedLayer": (
            "axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4", "qwen4_exp",
            "qwen4_exp_text",
        ),
        "and it has DeepseekV4CSACache": ("deepseek_v4",),
        "it has layers of linear state": ("recurrent_gemma",),
        "MiniMax uses cache of its own": ("minimax",),
        "has layers of chunked attention": ("llama4", "llama4_text"),
        "has layers of cross-attention": ("mllama", "prophetnet"),
        "its layer 0 stored no K and V in the cache": ("openai-gpt", "reformer", "rwkv", "xlnet"),
        "'DynamicCache' object has no attribute 'rnn_state'": ("xlstm",),
        "computes no padded prompt with a DynamicCache": ("blt", "xlm"),
        "inputs_embeds and shared_kv_states cannot be None": ("gemma4_assistant", "gemma4_unified_assistant"),
        "shape '[-1, 4, 1]' is invalid": ("musicgen", "musicgen_melody"),  # a token is four codes
        "it computed 7 tokens, and stored 39 in the cache": ("cpmant",),  # it puts tokens of its own before a prompt
        "nor K and V that are gathered": ("dory", "git", "inkling2_loop_text", "inkling2_text", "inkling_text"),
    }.items()
    for name in names
}  # fmt: skip
"""model type: a part of the sentence that refuses it. All other types are served."""


QUICK: Final = ("cpmant", "git")
"""The types that are not left to `make test-all`: one that is refused in each of two ways."""


def refusal_of(model: Any) -> str:
    """Patch a model, and return "". Or return the sentence that refuses it, which leaves the model as it was."""
    before = set(vars(model))
    try:
        patch(model, memory="64MiB")
    except InvalidRequest as refusal:
        assert set(vars(model)) == before
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert not any(isinstance(module, PagedLinear) for module in model.modules())
        return str(refusal)
    return ""


@pytest.mark.skipif(HOST != NEWEST_HOST, reason="another host has other types")
def test_types_that_are_refused_are_types_of_the_host() -> None:
    assert set(REFUSED) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    ],
)
def test_a_model_gives_its_own_tokens_or_is_refused_in_a_sentence(name: str) -> None:
    model, cached = tiny(name), None
    expected: dict[int, list[list[int]]] = {}
    for beams in (1, 2):
        with contextlib.suppress(Exception):  # the host itself cannot generate with some, or not with beams
            expected[beams] = tokens(model, {}, num_beams=beams)
    with contextlib.suppress(Exception):  # some models have caches of their own alone
        cached = tokens(model, {CACHE: DynamicCache(config=model.config)})
    if cached is not None:
        with contextlib.suppress(InvalidRequest), PagedCache(model.config, memory="64MiB") as cache:
            assert tokens(model, {CACHE: cache}) == cached
    refusal = refusal_of(model)
    if HOST == NEWEST_HOST:
        assert bool(refusal) == (name in REFUSED), refusal
        assert REFUSED.get(name, "") in refusal
    if refusal:
        assert refusal.startswith("a model of type ")
        assert "\n" not in refusal
        return
    assert expected
    for _ in range(2):
        assert {beams: tokens(model, {}, num_beams=beams) for beams in expected} == expected
    unpatch(model)
    assert {beams: tokens(model, {}, num_beams=beams) for beams in expected} == expected
