"""Small random checkpoints of all families, made by transformers, and a minimal allocator of frames.

All parameters are random, biases and norms too: transformers starts them at 0 and 1, where a forgotten one would not
show. They are large enough that 64 greedy tokens do not settle into one token. Windows are shorter than the prompts,
and head_dim differs from hidden / heads if the family allows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from pagedkv.engine.model.decoder import Decoder
from pagedkv.kernels.args import KVLayer, PagedBatch

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HEAD_DIM = {"head_dim": 24}
ROPE = {"rope_theta": 10_000.0}
LONGER = {"factor": 4.0, "original_max_position_embeddings": 128, **ROPE}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONGER}
YARN = {"rope_type": "yarn", **LONGER}

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**HEAD_DIM, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **ROPE}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {**HEAD_DIM, "sliding_window": 37}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**HEAD_DIM, "attention_bias": True}),
    "gemma2": ("Gemma2", {**HEAD_DIM, "sliding_window": 21, "query_pre_attn_scalar": 30}),
    "gemma3": (
        "Gemma3",
        {
            **HEAD_DIM,
            "num_hidden_layers": 4,
            "sliding_window": 21,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 30,
            "final_logit_softcapping": 20.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
}

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5",
        {
            **HEAD_DIM,
            "attention_bias": True,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
        },
    ),
    "qwen3_5-odd": (  # sizes that C++ does not serve
        "Qwen3_5",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 3,
        },
    ),
}
"""Checkpoints with recurrent states, which need a cache with states. Half of a state lives for about 30 tokens."""


@dataclass(frozen=True)
class Checkpoint:
    """A saved folder, and the transformers model that it was saved from."""

    folder: Path
    model: Any

    def decoder(self, device: str = "cpu") -> Decoder:
        return Decoder.load(self.folder, dtype="float32", device=device)

    @torch.inference_mode()
    def logits(self, prompt: list[int]) -> Tensor:
        """Return the logits of transformers: float32 [len(prompt), V]."""
        return self.model(torch.tensor([prompt])).logits[0].float()

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the greedy continuation by transformers."""
        prompt_ids = torch.tensor([prompt])
        out = self.model.generate(
            prompt_ids, attention_mask=torch.ones_like(prompt_ids), do_sample=False, max_new_tokens=num_tokens
        )
        return out[0, len(prompt) :].tolist()


Checkpoints = Callable[[str], Checkpoint]
"""A function from a name in CHECKPOINTS or HYBRIDS to its Checkpoint."""


def build(name: str, seed: int = 0, **sizes: int) -> Any:
    """Build the transformers model that is called `name`, with random parameters. sizes: others than SMALL's"""
    architecture, options = (CHECKPOINTS | HYBRIDS)[name]
    sees = architecture in ("Gemma3", "Qwen3_5")
    config_class = getattr(transformers, f"{architecture}{'Text' if sees else ''}Config")
    config = config_class(**{**SMALL, **options, **sizes}, attn_implementation="eager", dtype="float32")
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[1] ** -0.5
            noise = spread * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_mean(parameter_name, architecture) + noise)
    return model


def _mean(parameter_name: str, architecture: str) -> float:
    if parameter_name.endswith("A_log"):
        return -3.0
    if not parameter_name.endswith("norm.weight"):
        return 0.0
    if architecture == "Qwen3_5":
        return 1.0 if "linear_attn" in parameter_name else 0.0
    # In Gemma, scaled and tied embeddings would dominate the output of the layers: each token would repeat itself.
    if architecture.startswith("Gemma"):
        return 6.0 if "post_" in parameter_name else 0.0
    return 1.0


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Each checkpoint is built at the first call for its name."""
    built: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in built:
            folder = tmp_path_factory.mktemp(name)
            model = build(name)
            model.save_pretrained(folder)
            built[name] = Checkpoint(folder, model)
        return built[name]

    return get


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Return random token ids."""
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


class Paging:
    """Page tables without a manager: frames are handed out in random order and never freed. Unused frames hold NaN."""

    def __init__(self, decoder: Decoder, *, block_size: int, num_frames: int, num_sequences: int) -> None:
        c = decoder.config
        self.decoder, self.block_size = decoder, block_size
        shape = (num_frames, block_size, c.num_kv_heads, c.head_dim)
        poison = torch.full(shape, torch.nan, dtype=decoder.dtype)
        self.layers = [KVLayer(poison.clone(), poison.clone()) for _ in range(c.num_layers)]
        self.free = torch.randperm(num_frames, generator=torch.Generator().manual_seed(7)).tolist()
        self.tables: list[list[int]] = [[] for _ in range(num_sequences)]
        self.lengths = [0] * num_sequences

    def step(self, tokens: dict[int, list[int]], logits_of: Tensor | None = None) -> Tensor:
        """Run the decoder over the new `tokens` of each sequence. Returns: logits [T, V] in this order, or [N, V]."""
        slots, positions, counts = [], [], []
        for sequence, new in tokens.items():
            first, self.lengths[sequence] = self.lengths[sequence], self.lengths[sequence] + len(new)
            table = self.tables[sequence]
            while len(table) * self.block_size < self.lengths[sequence]:
                table.append(self.free.pop())
            positions += range(first, self.lengths[sequence])
            slots += [
                table[t // self.block_size] * self.block_size + t % self.block_size
                for t in range(first, self.lengths[sequence])
            ]
            counts.append(len(new))
        width = max(map(len, self.tables))
        lengths = [self.lengths[sequence] for sequence in tokens]
        batch = PagedBatch(
            block_table=torch.tensor(
                [table + [2**30] * (width - len(table)) for table in self.tables], dtype=torch.int32
            ),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            slots=torch.tensor(slots),
            positions=torch.tensor(positions),
            max_seqlen_q=max(counts),
            max_seqlen_k=max(lengths),
            rows=torch.tensor(list(tokens), dtype=torch.int32),
        )
        token_ids = torch.tensor([t for new in tokens.values() for t in new])
        return self.decoder.forward(token_ids, batch, self.layers, logits_of=logits_of)


def first_logits(decoder: Decoder) -> Tensor:
    """Return the logits [150, V] of a prompt of 150 tokens."""
    return Paging(decoder, block_size=16, num_frames=12, num_sequences=1).step({0: prompt_of(150)})
