"""Families: tiny models that differ in their layers, whose greedy choices are no near ties. test_walk.py has all."""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pagedkv.integrations.transformers.geometry import HOST

SIZES: Final = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 99,
    "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
OPTIONS: Final[dict[str, Any]] = {"max_new_tokens": 12, "do_sample": False}
"""Of generate(), in most tests."""
SHARED: Final = SIZES | {"num_key_value_heads": 2}
WINDOW: Final = {"sliding_window": 16}
GPT2: Final = {"n_embd": 64, "n_layer": 4, "n_head": 4}

FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": SHARED,
    "qwen2 with windows": SHARED | WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
    "mistral": SHARED | WINDOW,
    "gemma2": SHARED | WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": SHARED | WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    "gpt2": SIZES | GPT2,
    "gpt_oss": SHARED | WINDOW | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": SIZES
    | {
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    "falcon": SIZES | {"new_decoder_architecture": False, "multi_query": True},
    "gemma3n_text": SHARED
    | WINDOW
    | {
        "head_dim": 16, "num_hidden_layers": 10, "num_kv_shared_layers": 5, "intermediate_size": [128] * 10,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2, "vocab_size_per_layer_input": 99,
        "hidden_size_per_layer_input": 8, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 10,
    },
    "gemma4_text": SHARED
    | WINDOW
    | {
        "head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 99,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 8,
    },
}  # fmt: skip

GATHERED: Final = {"falcon", *(["deepseek_v3"] if HOST >= (5, 23) else ["gemma3n_text", "gemma4_text"])}
"""The families whose layers change K or V after the cache, or do not use the AttentionInterface."""


def model_of(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a model of a family, in float32. Its weights are four times the usual, so that logits are far apart."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name.partition(" ")[0], **FAMILIES[name] | changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def prompts(length: int = 37, pads: tuple[int, ...] = (0, 9, 1), seed: int = 5) -> dict[str, torch.Tensor]:
    """Return ids and mask of prompts of one length, with so many columns of padding before each."""
    torch.manual_seed(seed)
    ids = torch.randint(1, 99, (len(pads), length))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}
