"""Scores: log-probabilities of the tokens of prompts are those of transformers, in any chunks and beside any work."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.engine.drafts.prompt_lookup import PromptLookup
from pagedkv.engine.model.decoder import Decoder
from pagedkv.engine.model.pool import new_cache
from pagedkv.engine.model.runner import ModelRunner
from pagedkv.engine.requests import scores
from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import InvalidRequest, PagedKVError
from tests.engine.conftest import VOCAB, Checkpoint, Checkpoints, prompt_of
from tests.engine.model.test_runner import Replayed
from tests.engine.step.test_engine import build, idle

if TYPE_CHECKING:
    from collections.abc import Callable

TOLERANCE = 1e-3
PROMPTS = [prompt_of(length) for length in (1, 2, 33, 70)]
ONLY = SamplingParams(max_tokens=0, prompt_logprobs=0)


def by_transformers(checkpoint: Checkpoint, prompt: list[int]) -> torch.Tensor:
    """Return the log-probabilities of all tokens before each token but the first: float32 [len(prompt) - 1, V]."""
    return checkpoint.logits(prompt)[:-1].log_softmax(-1)


def assert_scored(checkpoint: Checkpoint, prompt: list[int], found: list[float | None]) -> None:
    expected = by_transformers(checkpoint, prompt).gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])
    assert found[0] is None
    assert found[1:] == pytest.approx(expected[:, 0].tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("chunk", [None, 1, 7, 16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_scores_are_those_of_transformers_in_any_chunks(checkpoint: Checkpoints, name: str, chunk: int | None) -> None:
    engine = build(checkpoint(name), limits=Limits(prefill_chunk=chunk))
    for prompt, found in zip(PROMPTS, engine.score(PROMPTS), strict=True):
        assert_scored(checkpoint(name), prompt, found)
    assert idle(engine)


def test_a_hybrid_model_scores_as_transformers(checkpoint: Checkpoints) -> None:
    decoder = checkpoint("qwen3_5").decoder()
    cache = new_cache(decoder, block_size=16, num_frames=100, state_memory=40)
    engine = Engine(decoder, build(checkpoint("llama")).tokenizer, cache, limits=Limits(prefill_chunk=20))
    for _ in range(2):
        assert_scored(checkpoint("qwen3_5"), PROMPTS[-1], engine.score(PROMPTS[-1:])[0])
    assert engine.generate(PROMPTS[-1:], SamplingParams(max_tokens=2))[0].completions[0].cached_tokens > 0


def test_alternatives_are_the_likeliest_and_the_output_goes_on_as_ever(checkpoint: Checkpoints) -> None:
    engine, prompt = build(checkpoint("llama")), PROMPTS[-1]
    (plain,) = engine.generate([prompt], SamplingParams(max_tokens=5, logprobs=2))
    (request,) = engine.generate([prompt], SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=3), num_samples=2)
    for completion in request.completions:
        assert completion.token_ids == plain.completions[0].token_ids
    expected = by_transformers(checkpoint("llama"), prompt).topk(3)
    assert len(request.prompt_logprobs) == len(prompt)
    for told, values, ids, token in zip(
        request.prompt_logprobs[1:], expected.values.tolist(), expected.indices.tolist(), prompt[1:], strict=True
    ):
        assert told is not None
        assert [token for token, _ in told.top] == ids
        assert [value for _, value in told.top] == pytest.approx(values, abs=TOLERANCE)
        assert dict(told.top).get(token, told.logprob) == told.logprob, "clients compare them exactly"


def test_a_scored_prompt_takes_no_pages_and_leaves_its_own(checkpoint: Checkpoints) -> None:
    engine, prompt = build(checkpoint("llama")), PROMPTS[-1]
    for _ in range(2):
        before = engine.meter.computed_tokens
        (request,) = engine.generate([prompt], ONLY)
        assert engine.meter.computed_tokens - before == len(prompt)
        assert request.completions[0].cached_tokens == 0
        assert (request.completions[0].finish_reason, request.completions[0].token_ids) == ("length", [])
    assert engine.cache.lookup(prompt) == 64
    (after,) = engine.generate([prompt], SamplingParams(max_tokens=1))
    assert after.completions[0].cached_tokens == 64
    assert engine.stats().finished == {"length": 3}


def test_only_blocks_of_logits_exist_at_once(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "MOST_LOGITS", 5 * VOCAB + 1)
    sizes, logits = [], Decoder.logits

    def noted(self: Decoder, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        sizes.append(len(x))
        return logits(self, x, *arguments)

    monkeypatch.setattr(Decoder, "logits", noted)
    engine = build(checkpoint("llama"))
    assert_scored(checkpoint("llama"), PROMPTS[-1], engine.score(PROMPTS[-1:])[0])
    assert sizes == [5] * 13 + [4, 1]


def test_scores_survive_preemption_and_neighbours(checkpoint: Checkpoints) -> None:
    """Few frames, and a drafter: others are preempted and resumed from pages that they published themselves."""
    engine = build(checkpoint("llama"), block_size=4, num_frames=32, limits=Limits(prefill_chunk=9, max_sequences=4))
    engine = Engine(
        engine.decoder, engine.tokenizer, engine.cache, limits=engine.scheduler.limits, drafter=PromptLookup()
    )
    several: list[SamplingParams] = [SamplingParams(max_tokens=40, prompt_logprobs=0, ignore_eos=True)] * 4
    prompts = [prompt_of(length) for length in (60, 50, 41, 55)]
    plain = build(checkpoint("llama")).generate(prompts, [replace(one, prompt_logprobs=None) for one in several])
    for request, alone in zip(engine.generate(prompts, several), plain, strict=True):
        assert request.completions[0].token_ids == alone.completions[0].token_ids
        found = [told and told.logprob for told in request.prompt_logprobs]
        assert_scored(checkpoint("llama"), request.prompt_ids, found)
    assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize("when", ["forward", "commit", "deliver"])
def test_an_interrupted_step_is_scored_again(
    checkpoint: Checkpoints, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls = build(checkpoint("llama"), limits=Limits(prefill_chunk=20)), 0
    owner: Any = {"forward": engine, "commit": engine.cache, "deliver": scores.Scores}[when]
    whole: Callable[..., Any] = getattr(owner, when)

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        result = whole(*arguments, **named)
        if calls == 2:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, when, interrupted)
    request = engine.submit(PROMPTS[-1], ONLY)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.run()
    assert_scored(checkpoint("llama"), PROMPTS[-1], [told and told.logprob for told in request.prompt_logprobs])
    assert request.completions[0].finish_reason == "length"
    assert idle(engine)


def test_graphs_of_decode_steps_score_chunks_of_one_token(checkpoint: Checkpoints) -> None:
    """A chunk of one token that is not its prompt's last has a row that no draw reads, the first if it is urgent."""
    engine = build(checkpoint("llama"), limits=Limits(prefill_chunk=1))
    engine.forward = ModelRunner(engine.decoder, engine.cache, graphs=Replayed)
    engine.scheduler._plan = engine.forward.plan
    prompts, before = [prompt_of(30), prompt_of(7)], Replayed.replayed
    expected = build(checkpoint("llama")).generate(prompts, SamplingParams(max_tokens=8))
    params = SamplingParams(max_tokens=8, prompt_logprobs=0)
    requests = [engine.submit(prompt, params, priority=number) for number, prompt in enumerate(prompts)]
    engine.run()
    for request, plain in zip(requests, expected, strict=True):
        assert request.completions[0].token_ids == plain.completions[0].token_ids
        assert_scored(checkpoint("llama"), request.prompt_ids, [one and one.logprob for one in request.prompt_logprobs])
    assert Replayed.replayed > before


def test_prompts_of_other_salts_and_tenants_share_no_page(checkpoint: Checkpoints) -> None:
    engine, prompt, found = build(checkpoint("llama")), PROMPTS[-1], []
    for salt, tenant in ((b"", b""), (b"a", b""), (b"b", b""), (b"a", b"t"), (b"a", b""), (b"", b"")):
        (request,) = engine.generate([prompt], SamplingParams(max_tokens=1), salt=salt, tenant=tenant)
        found.append(request.completions[0].cached_tokens)
    assert found == [0, 0, 0, 0, 64, 64]
    requests = [engine.submit(PROMPTS[2], SamplingParams(max_tokens=1), salt=salt) for salt in (b"c", b"d", b"c")]
    engine.run()
    assert [request.completions[0].cached_tokens for request in requests] == [0, 0, 32], "the third waits for the first"


def test_a_prompt_may_fill_the_context_if_it_is_only_scored(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"))
    longest = engine.decoder.config.max_position_embeddings
    assert len(engine.score([prompt_of(longest)])[0]) == longest
    for length, params in ((longest + 1, ONLY), (longest, SamplingParams(max_tokens=1, prompt_logprobs=0))):
        with pytest.raises(InvalidRequest, match=f"the prompt has {length} tokens, the model ends at {longest}"):
            engine.submit(prompt_of(length), params)


def test_damaged_logits_end_the_request_and_no_other(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, given = build(checkpoint("llama")), scores.given
    monkeypatch.setattr(scores, "given", lambda logits, *rest: given(logits / 0 if rest[1] == 7 else logits, *rest))
    damaged = engine.submit(PROMPTS[-1], SamplingParams(max_tokens=0, prompt_logprobs=7))
    assert_scored(checkpoint("llama"), PROMPTS[-1], engine.score(PROMPTS[-1:])[0])
    assert damaged.completions[0].finish_reason == "error"
    assert "the logits hold NaN" in damaged.completions[0].error
    monkeypatch.setattr(scores, "given", lambda logits, *rest: given(logits / 0, *rest))
    with pytest.raises(PagedKVError, match="prompt 0 was not scored: the logits hold NaN"):
        engine.score(PROMPTS[-1:])
    assert idle(engine)


def test_no_token_is_asked_for_only_with_scores_and_without_beams() -> None:
    for bad in ({"max_tokens": 0}, {"prompt_logprobs": 21}, {"prompt_logprobs": 0, "num_beams": 2}):
        with pytest.raises(InvalidRequest, match=f"{next(iter(bad))} is"):
            SamplingParams(**bad)  # type: ignore[arg-type]
