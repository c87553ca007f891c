"""The checkpoint's folder as bytes: Hugging Face files made from the circuit.

Only numpy and json write the files, so that the version of no other library changes their bytes.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from bundled import circuit
from bundled.codes import BOS, EOS, IDS, UNK, VOCABULARY
from tests.records import WORD

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_POSITIONS = 8192


def bfloat16(values: NDArray[np.float64]) -> bytes:
    """Encode `values` as little-endian bfloat16, rounded to the nearest value, ties to even."""
    bits = values.astype("<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


def safetensors(tensors: dict[str, NDArray[np.float64]]) -> bytes:
    """Write a safetensors file: length of the header, header, then the tensors in the order of their names."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, end = [], 0
    for name in sorted(tensors):
        parts.append(bfloat16(tensors[name]))
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensors[name].shape),
            "data_offsets": [end, end + len(parts[-1])],
        }
        end += len(parts[-1])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()


def config(num_layers: int) -> dict[str, Any]:
    """Return config.json, with the fields of both transformers 4 and 5."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(VOCABULARY),
        "hidden_size": circuit.HIDDEN,
        "intermediate_size": circuit.NEURONS,
        "num_hidden_layers": num_layers,
        "num_attention_heads": circuit.HEADS,
        "num_key_value_heads": circuit.KV_HEADS,
        "head_dim": circuit.HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": circuit.ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": circuit.ROPE_THETA},
        "max_position_embeddings": MAX_POSITIONS,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": IDS[BOS],
        "eos_token_id": IDS[EOS],
        "pad_token_id": None,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def tokenizer() -> dict[str, Any]:
    """Return tokenizer.json: tokens are whole words, split by the pattern of `records`.

    Decoding puts a space before each token but punctuation. A question ends its line, so an answer begins with a word.
    """
    added = [
        {
            "id": IDS[t],
            "content": t,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for t in (UNK, BOS, EOS)
    ]
    spaces = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    line = {"type": "Replace", "pattern": {"Regex": r"\? ?"}, "content": "?\n"}
    first = {"SpecialToken": {"id": BOS, "type_id": 0}}
    text, pair = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": "’"}, "content": "'"},
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": WORD.pattern}, "behavior": "Removed", "invert": True},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text, pair],
            "special_tokens": {BOS: {"id": BOS, "ids": [IDS[BOS]], "tokens": [BOS]}},
        },
        "decoder": {"type": "Sequence", "decoders": [spaces, {"type": "Fuse"}, line]},
        "model": {"type": "WordLevel", "vocab": IDS, "unk_token": UNK},
    }


def files(layers: tuple[int, ...] = tuple(range(circuit.LAYERS))) -> dict[str, bytes]:
    """Return the machine-readable files of the checkpoint with these layers of the circuit: name → contents."""
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNK,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{{ bos_token }}{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    generation = {"bos_token_id": IDS[BOS], "eos_token_id": IDS[EOS], "do_sample": False, "max_new_tokens": 32}
    return {
        "config.json": _json(config(len(layers))),
        "generation_config.json": _json(generation),
        "model.safetensors": safetensors(circuit.tensors(layers)),
        "tokenizer.json": _json(tokenizer()),
        "tokenizer_config.json": _json(tokenizer_config),
    }
