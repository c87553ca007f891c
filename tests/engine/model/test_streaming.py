"""Endless text: the tokens of the paper's algorithm, in constant memory, whatever else the engine does.

The definition is dense and slow: keys are kept as they were before rotation, and those that a query sees are turned by
their places in the cache, anew for each token. It uses the weights of transformers' model and no code of pagedkv.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.engine.drafts.prompt_lookup import PromptLookup
from pagedkv.engine.model.decoder import Decoder
from pagedkv.engine.model.pool import new_cache
from pagedkv.engine.model.streaming import endless
from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import InvalidRequest
from tests.engine.conftest import Checkpoint, Checkpoints, prompt_of
from tests.engine.step.test_engine import build, idle, outputs

if TYPE_CHECKING:
    from torch import Tensor


WINDOW, SINKS = 21, 5
LENGTHS = (3, 60, 24)
NUM_TOKENS = 30


def turned(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (table[0, :, None] for table in angles)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@torch.inference_mode()
def by_the_paper(checkpoint: Checkpoint, prompt: list[int], num_tokens: int) -> tuple[list[int], list[Tensor]]:
    """Return the greedy output of a Llama-like model, and the logits of each of its tokens."""
    model = checkpoint.model.model
    keys: list[list[Tensor]] = [[] for _ in model.layers]
    values: list[list[Tensor]] = [[] for _ in model.layers]
    tokens, logits = list(prompt), []
    for p in range(len(prompt) + num_tokens - 1):
        seen = [j for j in range(p + 1) if j < SINKS or j > p - WINDOW]
        angles = model.rotary_emb(keys[0][0] if p else torch.zeros(1), torch.arange(len(seen))[None])
        x = model.embed_tokens(torch.tensor([tokens[p]]))
        for layer, k, v in zip(model.layers, keys, values, strict=True):
            at = layer.self_attn
            h = layer.input_layernorm(x)
            q, new_k, new_v = (project(h).view(1, -1, at.head_dim) for project in (at.q_proj, at.k_proj, at.v_proj))
            k.append(at.k_norm(new_k) if hasattr(at, "k_norm") else new_k)
            v.append(new_v)
            q = turned(at.q_norm(q) if hasattr(at, "q_norm") else q, tuple(table[:, -1:] for table in angles))
            cached_k, cached_v = turned(torch.cat([k[j] for j in seen]), angles), torch.cat([v[j] for j in seen])
            groups = q.shape[1] // cached_k.shape[1]
            scores = torch.einsum("hd,jhd->hj", q[0], cached_k.repeat_interleave(groups, 1)) * at.head_dim**-0.5
            read = torch.einsum("hj,jhd->hd", scores.softmax(-1), cached_v.repeat_interleave(groups, 1))
            x = x + at.o_proj(read.reshape(1, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        if p >= len(prompt) - 1:
            logits.append(checkpoint.model.lm_head(model.norm(x))[0])
            tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], logits


def streaming(checkpoint: Checkpoint, *, block_size: int = 4, grouped: bool = True, **options: Any) -> Engine:
    loaded, tokenizer = checkpoint.decoder(), build(checkpoint).tokenizer
    decoder = Decoder(endless(loaded.config, WINDOW, SINKS), loaded.weights)
    engine_options = {name: options.pop(name) for name in ("limits", "drafter", "preemption") if name in options}
    cache = new_cache(decoder, block_size=block_size, grouped=grouped, **{"num_frames": 200, **options})
    return Engine(decoder, tokenizer, cache, **engine_options)


_expected: dict[str, list[tuple[list[int], list[Tensor]]]] = {}


def expected(name: str, checkpoint: Checkpoints) -> list[tuple[list[int], list[Tensor]]]:
    if name not in _expected:
        _expected[name] = [by_the_paper(checkpoint(name), prompt_of(length), NUM_TOKENS) for length in LENGTHS]
    return _expected[name]


@pytest.mark.parametrize(("name", "block_size"), [("llama", 1), ("llama-yarn", 4), ("qwen3", 16)])
def test_tokens_and_logits_are_those_of_the_paper(name: str, block_size: int, checkpoint: Checkpoints) -> None:
    engine = streaming(checkpoint(name), block_size=block_size)
    params = SamplingParams(max_tokens=NUM_TOKENS, logprobs=5)
    requests = engine.generate([prompt_of(length) for length in LENGTHS], params)
    for request, (tokens, logits) in zip(requests, expected(name, checkpoint), strict=True):
        completion = request.completions[0]
        assert completion.token_ids == tokens
        for found, row in zip(completion.logprobs, logits, strict=True):
            want = row.log_softmax(-1)
            assert [logprob for _, logprob in found.top] == pytest.approx(
                [float(want[t]) for t, _ in found.top], abs=2e-3
            )
    assert idle(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"limits": Limits(max_batch_tokens=5)},
        {"grouped": False},
        {"num_frames": 20, "limits": Limits(prefill_chunk=8), "prefix_cache": False},
        {"drafter": PromptLookup(shortest=1)},
    ],
    ids=lambda options: " ".join(options),
)
def test_chunks_preemption_and_drafts_change_no_token(options: dict[str, Any], checkpoint: Checkpoints) -> None:
    engine = streaming(checkpoint("llama"), **options)
    params = SamplingParams(max_tokens=NUM_TOKENS)
    for _ in range(2):  # the second time, most pages are found
        requests = engine.generate([prompt_of(length) for length in LENGTHS], params)
        assert outputs(requests) == [tokens for tokens, _ in expected("llama", checkpoint)]
    assert ("num_frames" in options) <= (engine.scheduler.preemptions > 0)
    assert idle(engine)


def test_samples_and_beams_are_the_same_with_and_without_holes(checkpoint: Checkpoints) -> None:
    prompts = [prompt_of(60), prompt_of(24)]
    for params, count in (
        (SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=1), 3),
        (SamplingParams(NUM_TOKENS, num_beams=3), 2),
    ):
        whole, holes = (
            streaming(checkpoint("llama"), grouped=grouped, num_frames=400).generate(prompts, params, num_samples=count)
            for grouped in (False, True)
        )
        assert outputs(holes) == outputs(whole)


def test_frames_at_the_peak_do_not_grow_with_the_text(checkpoint: Checkpoints) -> None:
    """The text is four times as long as the model has positions. Drafts, all right, give sixteen tokens a step."""
    limits, drafter = Limits(prefill_chunk=16), PromptLookup(num_tokens=15, shortest=1)
    engine = streaming(checkpoint("llama"), block_size=16, num_frames=6, limits=limits, drafter=drafter)
    request = engine.submit(prompt_of(100), SamplingParams(max_tokens=2000, allowed_ids=[5]))
    while engine.has_work:
        engine.step()
        if request.completions[0].token_ids:
            assert engine.cache.stats().mapped <= 1 + 2 + 1  # a page of sinks, a window of two pages, one being filled
    assert len(request.completions[0].token_ids) == 2000
    assert engine.cache.stats().peak_mapped <= engine.cache.frames_for(100, 16) == engine.cache.frames_for(2**20, 16)
    assert idle(engine)


BAD = {
    "sinks is 4 without a window": {"sinks": 4},
    "sinks is -1": {"sinks": -1, "window": 8},
    "window is 0": {"window": 0},
    "a window of 511 and 4 sinks are more than the 512 positions": {"window": 511, "sinks": 4},
}


@pytest.mark.parametrize("message", BAD)
def test_a_window_that_cannot_be_is_refused(message: str, checkpoint: Checkpoints) -> None:
    with pytest.raises(InvalidRequest, match=message):
        endless(checkpoint("llama").decoder().config, **{"window": None, "sinks": 0, **BAD[message]})


def test_a_cache_that_gives_the_sinks_back_is_refused(checkpoint: Checkpoints) -> None:
    plain = checkpoint("llama").decoder()
    windowed, both = (Decoder(endless(plain.config, WINDOW, sinks), plain.weights) for sinks in (0, SINKS))
    with pytest.raises(InvalidRequest, match="made for sinks 0, the decoder has 5"):
        Engine(both, build(checkpoint("llama")).tokenizer, new_cache(windowed, block_size=4, num_frames=9))
