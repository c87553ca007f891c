"""Engines of vLLM in processes of their own, and tiny models for them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

SIZES: Final = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 8192,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: Final[dict[str, dict[str, Any]]] = {
    "llama": SIZES,
    "qwen3": SIZES,
    "mistral": SIZES | {"sliding_window": 200},
    "gemma2": SIZES
    | {
        "sliding_window": 128, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 32, "tie_word_embeddings": True,
    },
    "bloom": {  # ALiBi
        "hidden_size": 256, "n_head": 8, "n_layer": 4, "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "gpt_oss": SIZES | {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64},
}  # fmt: skip


def model_in(folder: Path, name: str) -> Path:
    """Write a model of a family, in float32; its weights are larger than usual, so that logits are far apart."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **MODELS[name])
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    model.save_pretrained(folder / name)
    return folder / name


def adapter_in(folder: Path) -> Path:
    """Write a LoRA of rank 8 for all linear layers of the decoder layers of "llama"."""
    torch.manual_seed(1)
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    heads, kv_heads = (SIZES[name] * SIZES["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "self_attn.q_proj": (hidden, heads), "self_attn.k_proj": (hidden, kv_heads),
        "self_attn.v_proj": (hidden, kv_heads), "self_attn.o_proj": (heads, hidden), "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    tensors = {}
    for layer in range(SIZES["num_hidden_layers"]):
        for name, (columns, rows) in shapes.items():
            stem = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{stem}.lora_A.weight"] = 0.1 * torch.randn(8, columns)
            tensors[f"{stem}.lora_B.weight"] = 0.1 * torch.randn(rows, 8)
    (folder / "adapter").mkdir()
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": [name.split(".")[1] for name in shapes]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return folder / "adapter"


def encoder_in(folder: Path) -> Path:
    """Write an encoder, in float32, with the tokenizer that vLLM wants for embeddings."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "bert", hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=512,
        max_position_embeddings=512, architectures=["BertModel"],
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(folder / "bert")
    words = models.WordLevel({str(token): token for token in range(512)}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0").save_pretrained(folder / "bert")
    return folder / "bert"


def prompts(count: int = 32, longest: int = 4000) -> list[list[int]]:
    """Return prompts of 10 to `longest` tokens; every third begins as another one does."""
    dice = random.Random(7)
    made: list[list[int]] = []
    for number in range(count):
        length = int(10 * (longest / 10) ** (number / max(1, count - 1)))
        ids = [dice.randrange(3, 500) for _ in range(length)]
        if number % 3 == 2:
            shared = dice.choice(made)[: length - 3]
            ids = shared + ids[len(shared) :]
        made.append(ids)
    dice.shuffle(made)
    return made


def environment() -> dict[str, str]:
    """Return the environment of a process that runs an engine: on two processors, offline, with its log."""
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO",
    }  # fmt: skip
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | settings


def generate(
    model: Path, *, environ: dict[str, str] | None = None, job: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Run an engine, and return what generate.py writes. options: of LLM. Raises: AssertionError with its log."""
    options = {
        "model": str(model), "dtype": "float32", "max_model_len": 4096, "max_num_batched_tokens": 1024,
        "enable_chunked_prefill": True, "enable_prefix_caching": True, "max_num_seqs": 16, "enforce_eager": True,
        "num_gpu_blocks_override": 400,
    } | options  # fmt: skip
    work: dict[str, Any] = {"prompts": prompts(), "max_tokens": 24, "rounds": 2} | (job or {}) | {"options": options}
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("generate.py"))],
        input=json.dumps(work),
        env=environment() | (environ or {}),
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    errors = [line for line in run.stderr.splitlines() if "Error" in line or "pagedkv" in line]
    assert run.returncode == 0, "\n".join([*errors, run.stderr[-3000:]])
    return json.loads(run.stdout) | {"log": run.stderr}
