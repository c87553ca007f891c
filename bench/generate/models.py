"""The model of `bench generate`: a checkpoint of the shape of Qwen3-0.6B with random weights, and contexts for it.

28 layers, 1,024 wide, 16 heads and 8 KV heads of 128, gates of 3,072, a tied vocabulary of 32,768: 474 million
parameters, 948 MB in bfloat16, and 114,688 bytes of K and V a token. SHALLOW has fewer layers, for quick runs.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from pagedkv import debug
from pagedkv.bench.clock import track
from pagedkv.bench.record import shallow
from pagedkv.cache import PagedKVCache
from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.model.decoder import Decoder
from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.linear.cpu import is_slow_in_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pagedkv.engine.requests.request import Request

CONFIG: Final[dict[str, Any]] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 32_768, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False,
    "max_position_embeddings": 40_960, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "dtype": "bfloat16",
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
SHALLOW: Final = CONFIG | {"num_hidden_layers": 7}
"""The model of quick runs on processors without AVX-512, where torch is slow in bfloat16."""
TINY: Final = CONFIG | {
    "vocab_size": 640, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
"""A model for tests."""


def quick_config() -> dict[str, Any]:
    """Return the config of a quick run."""
    return SHALLOW if is_slow_in_torch(torch.bfloat16) else CONFIG


def of_model(config: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return a row that was measured with `config`. A row of SHALLOW has `layers`, and no promise."""
    return shallow(row, config["num_hidden_layers"]) if config == SHALLOW else row


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int = 0) -> None:
    """Write config.json and random weights."""
    lots = torch.Generator().manual_seed(seed)
    c, wide = config, config["hidden_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], wide)}
    for i in range(c["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes |= {f"{attention}.q_proj.weight": (q, wide), f"{attention}.o_proj.weight": (wide, q)}
        shapes |= {f"{attention}.{name}_proj.weight": (kv, wide) for name in "kv"}
        shapes |= {f"{mlp}.{name}_proj.weight": (c["intermediate_size"], wide) for name in ("gate", "up")}
        shapes[f"{mlp}.down_proj.weight"] = (wide, c["intermediate_size"])
    tensors = {
        name: torch.randn(shapes[name], generator=lots).mul_(0.05).bfloat16() for name in track(list(shapes), "weights")
    }
    norms = {"model.norm.weight": wide}
    for i in range(c["num_hidden_layers"]):
        norms |= {f"model.layers.{i}.{name}_layernorm.weight": wide for name in ("input", "post_attention")}
        norms |= {f"model.layers.{i}.self_attn.{name}_norm.weight": c["head_dim"] for name in "qk"}
    tensors |= {name: torch.ones(size, dtype=torch.bfloat16) for name, size in norms.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def engine_of(folder: Path, num_tokens: int, max_sequences: int = 256) -> Engine:
    """Return an engine whose pool holds `num_tokens` tokens and is full of noise.

    Raises: InvalidRequest with PAGEDKV_DEBUG from 2 on, which fills unmapped frames with NaN instead
    """
    if debug.level() >= 2:
        raise InvalidRequest(f"PAGEDKV_DEBUG is {debug.level()}; steps are timed with 0 or 1")
    decoder = Decoder.load(folder)
    spec = decoder.config.spec(block_size=16, dtype="bfloat16")
    cache = PagedKVCache(spec, num_frames=spec.pages(num_tokens) + 64, watermark=0.0)
    numbers = cache.storage.frames.view(torch.bfloat16).view(-1)
    noise = torch.randn(1 << 20).bfloat16()
    for part in numbers.split(len(noise)):
        part.copy_(noise[: len(part)])
    limits = Limits(max_batch_tokens=num_tokens + max_sequences, max_sequences=max_sequences)
    return Engine(decoder, Tokenizer.load(BUNDLED), cache, limits=limits)


class Skipped:
    """A decoder that computes nothing: it gives random logits, and K and V are what lies in the frames."""

    def __init__(self, decoder: Decoder) -> None:
        self.config, self.dtype, self.device = decoder.config, decoder.dtype, decoder.device
        self._logits = torch.randn(256, decoder.config.vocab_size)

    def forward(
        self, token_ids: Tensor, batch: object, layers: object, *, logits_of: Tensor | None, **options: object
    ) -> Tensor:
        """Return logits for the tokens asked for."""
        return self._logits[: len(token_ids if logits_of is None else logits_of)]


@contextmanager
def skipping(engine: Engine) -> Iterator[None]:
    """Let the steps of `engine` compute nothing."""
    with patch.object(engine.forward, "decoder", Skipped(engine.decoder)):
        yield


def filled(engine: Engine, batch: int, context: int, params: SamplingParams | None = None) -> list[Request]:
    """Submit `batch` prompts and let the engine take them in without computing them: its next steps decode.

    The first of these steps computes with `context` tokens in each sequence, its own among them.
    """
    vocabulary = engine.decoder.config.vocab_size
    params = params or SamplingParams(max_tokens=1000, ignore_eos=True)
    with skipping(engine):
        prompts = torch.randint(3, vocabulary, (batch, context - 1)).tolist()
        requests = [engine.submit(prompt, params) for prompt in prompts]
        while not all(request.completions[0].token_ids for request in requests):
            engine.step()
    return requests


def emptied(engine: Engine, requests: list[Request]) -> None:
    """End the requests and forget their pages."""
    broken = [one for request in requests if (one := request.completions[0]).finish_reason]
    assert not broken, f"requests ended while they were timed: {broken[0].finish_reason} {broken[0].error}"
    assert not engine.scheduler.preemptions, "the pool was too small for the sequences that were timed"
    for request in requests:
        engine.cancel(request)
    engine.step()
    engine.cache.forget()
