"""Write a checkpoint of the shape of Qwen3 as a GGUF file, with its weights of bfloat16 or float16, and no vocabulary.

This file imports gguf and numpy. It must not import pagedkv, which the environment of llama.cpp lacks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""A tensor of safetensors: the same in a GGUF file; those of a layer follow its number."""


def write(folder: Path, path: Path, dtype: str) -> None:
    """Write the checkpoint in `folder` to `path`, with weights of `dtype`: bf16, as they are, or f16."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    out = gguf.GGUFWriter(str(path), "qwen3")
    out.add_file_type(gguf.LlamaFileType[f"MOSTLY_{dtype.upper()}"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_key_length(config["head_dim"])
    out.add_value_length(config["head_dim"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_theta"])
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("no_vocab")
    for name, bits in _tensors(folder / "model.safetensors"):
        if bits.ndim == 1 or dtype == "f16":
            wide = (bits.astype(np.uint32) << 16).view(np.float32)  # norms are of float32 in all GGUF files
            out.add_tensor(_name(name), wide if bits.ndim == 1 else wide.astype(np.float16))
        else:
            out.add_tensor(_name(name), bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def _tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name of each tensor and its bits, uint16 of its shape; numpy has no bfloat16."""
    data = np.memmap(path, np.uint8, "r")
    length = int(data[:8].view(np.uint64)[0])
    header = json.loads(bytes(data[8 : 8 + length]))
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in about["data_offsets"])
            yield name, data[begin:end].view(np.uint16).reshape(about["shape"])
