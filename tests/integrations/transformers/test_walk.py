"""Every causal model of the installed transformers that a tiny config can make: equal tokens, or one sentence."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers import PagedCache, patch, unpatch
from tests.integrations.transformers.families import FAMILIES, SHARED, SIZES, WINDOW, prompts

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

BY_HAND: Final[dict[str, dict[str, Any]]] = {
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
    "gemma3": {"text_config": FAMILIES["gemma3_text"], "vision_config": TOWER},
    "gemma3n_text": FAMILIES["gemma3n_text"],
    "gemma4": {"text_config": GEMMA4, "vision_config": TOWER, "audio_config": None},
    "gemma4_text": GEMMA4,
    "gemma4_unified": {"text_config": GEMMA4},
    "gemma4_unified_text": GEMMA4,
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
    "qwen4_exp_text": SHARED
    | {
        "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "indexer_n_heads": 2,
        "shared_expert_intermediate_size": 32, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
        "indexer_compress_ratio": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "hc_lowrank": 8,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "xmod": SIZES | {"is_decoder": True, "default_language": "en_XX"},
}  # fmt: skip
"""Arguments of the configs for which SMALL makes no model."""

NOT_MADE: Final = {
    "blt": "three models, each with a config of its own",
    "dots3_note": "its sizes differ by layer",
    "dots3_note_text": "its sizes differ by layer",
    "gemma3n": "it needs the package timm",
    "gemma4_assistant": "it reads the K and V of another model alone",
    "gemma4_unified_assistant": "it reads the K and V of another model alone",
    "git": "86 million parameters that see images",
    "got_ocr2": "91 million parameters that see images",
    "moss_transcribe_diarize": "308 million parameters that hear",
    "musicgen": "its decoder is another model type",
    "musicgen_melody": "its decoder is another model type",
    "phi4_multimodal": "870 million parameters that see images and hear",
    "qwen4_exp": "its text is qwen4_exp_text",
    "reformer": "it has no K and V that a cache could keep",
}
"""model type: the reason why the walk leaves it out."""


def tiny(name: str) -> Any:
    """Return a small model of a type with random weights."""
    config = CONFIG_MAPPING[name](**BY_HAND.get(name, {}))
    for part in {id(one): one for one in (config, config.get_text_config(decoder=True))}.values():
        for field, value in {} if name in BY_HAND else SMALL.items():
            with contextlib.suppress(Exception):  # properties without a setter, and each config fails in its own way
                if hasattr(part, field):
                    setattr(part, field, value)
        with contextlib.suppress(Exception):
            if hasattr(part, "kv_lora_rank"):  # these have as many KV heads as heads, and turn a part of each
                part.num_key_value_heads = part.num_attention_heads
        with contextlib.suppress(Exception):
            if name not in BY_HAND and getattr(part, "layer_types", None) is not None:
                kinds = part.layer_types
                part.layer_types = (kinds[:2] + kinds[-2:])[: part.num_hidden_layers]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def tokens(model: Any, options: dict[str, Any], **more: Any) -> list[list[int]]:
    inputs = prompts(24, (0, 5))
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0} | options | more
    found: list[list[int]] = model.generate(**inputs, **options).tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_a_model_gives_its_own_tokens_or_is_refused_in_a_sentence(name: str) -> None:
    if name in NOT_MADE:
        pytest.skip(NOT_MADE[name])
    model = tiny(name)
    try:
        greedy, beams = tokens(model, {}), tokens(model, {}, num_beams=2)
    except Exception:  # the host itself cannot generate with it
        with pytest.raises(InvalidRequest):
            patch(model, memory="64MiB")
        return
    cached = None
    with contextlib.suppress(Exception):  # some models have caches of their own alone
        cached = tokens(model, {"past_key_values": DynamicCache(config=model.config)})
    if cached is not None:
        with contextlib.suppress(InvalidRequest), PagedCache(model.config, memory="64MiB") as cache:
            assert tokens(model, {"past_key_values": cache}) == cached
    try:
        patch(model, memory="64MiB")
    except InvalidRequest as refusal:
        print(name, refusal)
        return
    for _ in range(2):
        assert tokens(model, {}) == greedy
        assert tokens(model, {}, num_beams=2) == beams
    unpatch(model)
    assert tokens(model, {}) == greedy
