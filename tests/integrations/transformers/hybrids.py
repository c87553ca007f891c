"""Hybrids: the configs of tiny models with recurrent states, that are served with reuse of prompts and without."""

from __future__ import annotations

from typing import Any, Final

BASE: Final = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "max_position_embeddings": 40000, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
DELTA: Final = BASE | {
    "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
MOE: Final = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
LATENT: Final = BASE | {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MAMBA: Final = BASE | {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 64,
}  # fmt: skip
BARE: Final = {"vocab_size": 300, "hidden_size": 64, "state_size": 16, "num_hidden_layers": 3, "eos_token_id": None}
LINEAR: Final = ["linear_attention"] * 3 + ["full_attention"]

HYBRIDS: Final[dict[str, dict[str, Any]]] = {
    "qwen3_next": DELTA | MOE,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | MOE,
    "olmo_hybrid": DELTA | {"layer_types": LINEAR},
    "lara_mini": DELTA | MOE | {"sliding_window": 64},
    "kimi_linear": LATENT | {
        "num_local_experts": 4, "linear_head_dim": 16, "linear_num_heads": 4, "layer_types": LINEAR,
    },
    "bailing_hybrid": LATENT | {"num_experts": 4, "head_dim": 16, "num_hidden_layers": 6, "q_lora_rank": None},
    "granitemoehybrid": MAMBA | {
        "layer_types": ["mamba"] * 3 + ["attention"], "num_local_experts": 4, "shared_intermediate_size": 32,
    },
    "bamba": MAMBA | {"attn_layer_indices": [2]},
    "nemotron_h": BASE | {
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "ssm_state_size": 16, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 64, "head_dim": 16, "expand": 2,
    },
    "falcon_h1": MAMBA | {"num_hidden_layers": 3, "mamba_d_ssm": 128},
    "zamba2": BASE | {
        "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 16, "n_mamba_heads": 8, "mamba_headdim": 16,
        "mamba_ngroups": 1, "chunk_size": 64, "hybrid_layer_ids": [1, 3], "num_mem_blocks": 1,
    },
    "mamba2": BARE | {"num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 64},
    "lfm2": BASE | {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm3": BASE | {
        "head_dim": 16, "layer_types": ["conv", "sliding_attention", "full_attention", "conv"], "sliding_window": 64,
    },
    "zaya": BASE | {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, "router_hidden_size": 16},
}  # fmt: skip
"""The types that are served with reuse."""

WHOLE: Final[dict[str, dict[str, Any]]] = {
    "falcon_mamba": BARE,
    "jamba": BASE | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "mamba": BARE,
    "zamba": BASE | {
        "num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2, "mamba_d_state": 8, "n_mamba_heads": 2,
        "use_mamba_kernels": False,
    },
}  # fmt: skip
"""The types that are served without reuse."""
