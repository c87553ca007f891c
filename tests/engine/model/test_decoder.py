"""The decoder against transformers: the same logits and greedy tokens for any page size, batch and chunk size.

The cost of a KV kind (pagedkv/engine/model/kv_quality.py) is compared with the same figures of whole texts at once.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from pagedkv.cache.paged import PagedKVCache
from pagedkv.engine.model.decoder import Decoder
from pagedkv.engine.model.kv_quality import PIECE, kv_quality
from pagedkv.engine.model.pool import new_cache
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import cpu
from pagedkv.kernels.linear import Operations
from tests.engine.conftest import CHECKPOINTS, Checkpoints, Paging, first_logits, prompt_of
from tests.engine.step.test_engine import FAMILIES, LENGTHS, NUM_TOKENS, expected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

TOLERANCE = {"float32": 1e-4, "felt": 1e-2}
"""The largest |logit - logit of transformers|; the least change of a logit that a changed option must cause."""


def run(paging: Paging, prompts: list[list[int]], chunk: int) -> tuple[list[Tensor], list[list[int]]]:
    """Prefill all prompts together, at most `chunk` tokens of each per step; decode a prompt as soon as it is done.

    Returns: for each prompt, the logits of its tokens and the greedy continuation
    """
    waiting = dict(enumerate(map(list, prompts)))
    logits: list[Tensor] = [torch.empty(0)] * len(prompts)
    output: list[list[int]] = [[] for _ in prompts]
    while waiting:
        step = {b: tokens[:chunk] for b, tokens in waiting.items()}
        parts = paging.step(step).split([len(new) for new in step.values()])
        for (b, tokens), got in zip(step.items(), parts, strict=True):
            if not output[b]:
                logits[b] = torch.cat((logits[b], got))
            waiting[b] = waiting[b][len(tokens) :]
            if not waiting[b]:
                output[b].append(int(got[-1].argmax()))
                waiting[b] = output[b][-1:]
        waiting = {b: tokens for b, tokens in waiting.items() if len(output[b]) < NUM_TOKENS}
    return logits, output


@pytest.mark.parametrize(
    ("name", "block_size", "chunk"),
    [
        pytest.param(name, size, chunk, marks=[] if (size, chunk) == (16, 13) else [pytest.mark.slow])
        for name in CHECKPOINTS
        for size in ((1, 16, 32) if name in FAMILIES else (16,))
        for chunk in (1000, 13)
    ],
)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoint: Any, name: str, block_size: int, chunk: int
) -> None:
    want = expected(name, checkpoint(name))
    num_frames = 4 + sum(-(-(length + NUM_TOKENS) // block_size) for length in LENGTHS)
    paging = Paging(
        checkpoint(name).decoder(), block_size=block_size, num_frames=num_frames, num_sequences=len(LENGTHS)
    )

    prompts = [prompt_of(length) for length in LENGTHS]
    logits, tokens = run(paging, prompts, chunk)

    for found, prompt in zip(logits, prompts, strict=True):
        torch.testing.assert_close(found, checkpoint(name).logits(prompt), rtol=0, atol=TOLERANCE["float32"])
    assert tokens == want
    assert len({token for each in want for token in each}) > 8  # a constant sequence would prove little


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_a_cache_that_knows_the_prompt_gives_the_same_tokens_from_less_work(checkpoint: Any, name: str) -> None:
    decoder, prompt = checkpoint(name).decoder(), prompt_of(LENGTHS[1])
    cache = PagedKVCache(decoder.config.spec(block_size=16), num_frames=40)
    num_computed = []
    for _ in range(2):
        space = cache.open(prompt)
        tokens, new = [], prompt[len(space) :]
        num_computed.append(len(new))
        while len(tokens) < NUM_TOKENS:
            batch = cache.plan([space], [len(new)])
            logits = decoder.forward(torch.tensor(new), batch, cache, logits_of=torch.tensor([len(new) - 1]))
            cache.commit(batch, new)
            new = [int(logits[0].argmax())]
            tokens += new
        assert tokens == expected(name, checkpoint(name))[1]
        space.release()
    assert num_computed == [LENGTHS[1], LENGTHS[1] % 16]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(checkpoint: Any, name: str) -> None:
    saved = checkpoint(name)
    exact = saved.logits(prompt_of(150))
    rounded = transformers.AutoModelForCausalLM.from_pretrained(
        saved.folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    theirs = rounded(torch.tensor([prompt_of(150)])).logits[0].float()
    ours = first_logits(Decoder.load(saved.folder, dtype="bfloat16"))
    assert ours.dtype == torch.float32
    assert (ours - exact).square().mean().sqrt() <= 1.1 * (theirs - exact).square().mean().sqrt()


@pytest.mark.skipif(bool(cpu.missing()), reason="the C++ extension is not built")
def test_heads_of_a_prompt_are_rotated_in_cpp(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = checkpoint("llama").decoder()
    monkeypatch.delattr(Operations, "norm_rotate")  # the definition, which would serve a long prompt
    assert first_logits(decoder).shape[0] > 128


def test_an_unknown_dtype_is_refused(checkpoint: Any) -> None:
    with pytest.raises(InvalidRequest, match="float99"):
        Decoder.load(checkpoint("llama").folder, dtype="float99")


def test_a_step_computes_in_the_context_of_its_operations(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this context the kernels for CPUs have threads of their own."""
    depths, depth, linear = [], [0], Operations._linear

    @contextmanager
    def step(self: Operations) -> Iterator[None]:
        depth[0] += 1
        yield
        depth[0] -= 1

    def seen(self: Operations, *arguments: Any) -> Any:
        depths.append(depth[0])
        return linear(self, *arguments)

    monkeypatch.setattr(Operations, "step", step)
    monkeypatch.setattr(Operations, "_linear", seen)
    monkeypatch.setenv("PAGEDKV_KERNELS", "reference")
    first_logits(checkpoint("llama").decoder())
    assert set(depths) == {1}
    assert depth == [0]


@pytest.mark.parametrize("length", [PIECE, 2 * PIECE + 45])
def test_the_cost_of_a_kind_is_that_of_the_whole_text_at_once(checkpoint: Checkpoints, length: int) -> None:
    tiny, text = checkpoint("gemma3"), prompt_of(length)
    decoder = tiny.decoder()
    cache = new_cache(decoder, block_size=16, kv_dtype="int8", num_frames=64)
    batch = cache.plan([cache.open()], [length])
    p, q = (z[:-1].log_softmax(-1) for z in (tiny.logits(text), decoder.forward(torch.tensor(text), batch, cache)))
    kl, next_ids = (p.exp() * (p - q)).sum(-1), torch.tensor(text[1:])
    found = kv_quality(decoder, text, ["int8", "k8v4"])
    assert found[None][:4] == (0, 0, 0, 1)
    assert found[None].perplexity == pytest.approx(torch.nn.functional.nll_loss(p, next_ids).exp().item(), rel=1e-4)
    expected = kl.mean(), kl.quantile(0.99), kl.std() / len(kl) ** 0.5, (p.argmax(-1) == q.argmax(-1)).float().mean()
    assert found["int8"][:4] == pytest.approx([number.item() for number in expected], rel=1e-2)
    assert found["int8"].kl < found["k8v4"].kl / 2
    with pytest.raises(InvalidRequest, match="the text has 2 tokens; a mean and its standard error need three"):
        kv_quality(decoder, text[:2], ["int8"])
