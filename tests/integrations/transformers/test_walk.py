"""Every causal model of the installed transformers that a tiny config can make: equal tokens, or one sentence."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.transformers import PagedCache, patch, unpatch
from tests.integrations.transformers.families import SHARED, prompts

SMALL: dict[str, Any] = SHARED | {
    "n_embd": 64, "n_layer": 4, "n_head": 4, "num_layers": 4, "num_heads": 4, "d_model": 64, "n_heads": 4,
    "n_layers": 4, "ffn_dim": 128, "ffn_hidden_size": 128, "word_embed_proj_dim": 64, "attention_heads": 4,
    "decoder_layers": 4, "num_decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 128,
    "encoder_layers": 2, "num_encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128,
    "head_dim": 16, "kv_channels": 16, "rotary_dim": 8, "sliding_window": 16, "window_size": 16, "is_decoder": True,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512,
    "query_pre_attn_scalar": 16, "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
    "num_kv_shared_layers": 2, "state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16,
}  # fmt: skip
"""Sizes by the names that configs have for them."""

MOST_PARAMETERS = 40_000_000


def tiny(name: str) -> Any:
    """Return a small model of a type with random weights; skip the test if SMALL makes none."""
    try:
        config = CONFIG_MAPPING[name]()
        for part in {id(one): one for one in (config, config.get_text_config(decoder=True))}.values():
            for field, value in SMALL.items():
                with contextlib.suppress(AttributeError, NotImplementedError):  # properties without a setter
                    if hasattr(part, field):
                        setattr(part, field, value)
            if hasattr(part, "kv_lora_rank"):  # these have as many KV heads as heads, and turn a part of each
                part.num_key_value_heads = part.num_attention_heads
            if getattr(part, "layer_types", None) is not None:
                kinds = part.layer_types
                part.layer_types = (kinds[:2] + kinds[-2:])[: part.num_hidden_layers]
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            pytest.skip(f"the smallest {name} has {size:,} parameters")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        model.generation_config.eos_token_id = None
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
        tokens(model, {})
    except Exception as error:  # each config fails in its own way
        pytest.skip(f"no tiny {name}: {type(error).__name__}: {str(error)[:200]}")
    return model


def tokens(model: Any, options: dict[str, Any], **more: Any) -> list[list[int]]:
    inputs = prompts(24, (0, 5))
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0} | options | more
    found: list[list[int]] = model.generate(**inputs, **options).tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_a_model_gives_its_own_tokens_or_is_refused_in_a_sentence(name: str) -> None:
    model = tiny(name)
    greedy, beams = tokens(model, {}), tokens(model, {}, num_beams=2)
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
