"""nano-vllm, an engine of another author, generates the right tokens behind the name flash_attn.

`make test-nano-vllm` fetches its sources and names them in NANO_VLLM. Its norms overwrite their input in float32, so
the model is float16, and a token is right if transformers, in float32, finds no other that is clearly better.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SOURCES = os.environ.get("NANO_VLLM")
CHILD = Path(__file__).with_name("nano_vllm_child.py")
VOCABULARY, MAX_TOKENS = 199, 24
pytestmark = pytest.mark.skipif(SOURCES is None, reason="NANO_VLLM names no sources: make test-nano-vllm")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, eos_token_id=0, dtype="float16",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    made = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)  # a larger spread of logits
    folder = tmp_path_factory.mktemp("qwen3")
    made.half().save_pretrained(folder)
    words = {str(token): token for token in range(VOCABULARY)}
    model = tokenizers.models.WordLevel(words, unk_token="0")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model), eos_token="0").save_pretrained(
        folder
    )
    return folder, made.float().eval()


@pytest.mark.parametrize(("kv_bytes", "preempts"), [(20 << 20, False), (1 << 20, True)])
def test_every_token_is_among_the_best(model: Any, kv_bytes: int, preempts: bool) -> None:
    """Prefixes of a block are shared, a prompt is found again, and a pool of few blocks preempts."""
    folder, host = model
    draw = random.Random(0)
    shared = [draw.randrange(1, VOCABULARY) for _ in range(300)]
    prompts = [[*shared, 5, 6], [*shared, 7], [9] * 245, [draw.randrange(1, VOCABULARY) for _ in range(900)], [3]]
    job = {"sources": SOURCES, "model": str(folder), "prompts": prompts, "max_tokens": MAX_TOKENS, "rounds": 2}
    command, text = [sys.executable, "-P", str(CHILD)], json.dumps({**job, "kv_bytes": kv_bytes})
    child = subprocess.run(command, input=text, capture_output=True, text=True, timeout=600, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    found = json.loads(child.stdout)
    assert (found["preempted"] > 0) is preempts, found["blocks"]
    for tokens in found["tokens"]:
        for prompt, answer in zip(prompts, tokens, strict=True):
            assert len(answer) == MAX_TOKENS
            with torch.no_grad():
                logits = host(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
            chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            worse = (logits.max(1).values - chosen) / logits.std(1)
            assert worse.max() < 0.05, (len(prompt), worse)
