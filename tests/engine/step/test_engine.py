"""The engine: a prompt gets the same tokens alone, beside any other requests, and with few frames."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings, strategies

from pagedkv.cache import PagedKVCache
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.requests.request import Completion, StopStrings
from pagedkv.engine.requests.sequence import SequenceState
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.sampling.sampler import SamplingRow, sample
from pagedkv.engine.step.engine import Engine
from pagedkv.engine.step.events import REQUESTS, STEPS, chrome_trace
from pagedkv.errors import InvalidRequest
from tests.engine.conftest import VOCAB, Checkpoint, Checkpoints, Paging, prompt_of

if TYPE_CHECKING:
    from pagedkv.engine.drafts.speculation import Drafter
    from pagedkv.engine.model.decoder import Decoder

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
LENGTHS = (5, 150, 71)
NUM_TOKENS = 64

_decoders: dict[tuple[str, str], Decoder] = {}
_expected: dict[str, list[list[int]]] = {}


def build(
    checkpoint: Checkpoint,
    *,
    block_size: int = 16,
    num_frames: int = 400,
    limits: Limits | None = None,
    drafter: Drafter | None = None,
    **options: Any,
) -> Engine:
    """Build an engine over a random checkpoint. The words of its tokenizer are w0, w1, .."""
    device = options.get("device", "cpu")
    key = str(checkpoint.folder), device
    decoder = _decoders.setdefault(key, checkpoint.decoder(device))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    cache = PagedKVCache(decoder.config.spec(block_size=block_size), num_frames=num_frames, **options)
    return Engine(decoder, Tokenizer(words), cache, limits=limits, drafter=drafter)


def expected(name: str, checkpoint: Checkpoint) -> list[list[int]]:
    """Return, by transformers, 64 greedy tokens after a prompt of each of LENGTHS."""
    if name not in _expected:
        _expected[name] = [checkpoint.generate(prompt_of(length), NUM_TOKENS) for length in LENGTHS]
    return _expected[name]


def outputs(requests: list[Any]) -> list[list[int]]:
    return [completion.token_ids for request in requests for completion in request.completions]


def idle(engine: Engine) -> bool:
    """Check the invariants, and return whether no frame is in use and no sequence is left."""
    engine.cache.check(3)
    now = engine.cache.stats()
    return (now.mapped, now.retired, now.spaces) == (0, 0, 0) and not engine.has_work


@pytest.mark.parametrize(
    ("name", "block_size", "prefill_chunk"),
    [
        pytest.param(name, block_size, chunk, marks=[] if (block_size, chunk) == quick else [pytest.mark.slow])
        for name, quick in zip(FAMILIES, [(16, 13), (16, None)] * 3, strict=True)
        for block_size in (1, 16, 32)
        for chunk in (None, 13)
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    name: str, block_size: int, prefill_chunk: int | None, checkpoint: Checkpoints
) -> None:
    engine = build(checkpoint(name), block_size=block_size, limits=Limits(prefill_chunk=prefill_chunk))
    requests = engine.generate([prompt_of(length) for length in LENGTHS], SamplingParams(max_tokens=NUM_TOKENS))
    assert outputs(requests) == expected(name, checkpoint(name))
    assert idle(engine)


@pytest.mark.parametrize("num_frames", [14, 28])
def test_a_pool_too_small_for_all_costs_time_and_no_token(num_frames: int, checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"), num_frames=num_frames)
    requests = engine.generate([prompt_of(length) for length in LENGTHS], SamplingParams(max_tokens=NUM_TOKENS))
    assert outputs(requests) == expected("llama", checkpoint("llama"))
    assert (engine.scheduler.preemptions > 0) == (num_frames < 28)
    assert idle(engine)


def test_a_tenant_at_its_quota_preempts_only_its_own_sequences(checkpoint: Checkpoints) -> None:
    engine, params = build(checkpoint("llama")), SamplingParams(max_tokens=NUM_TOKENS)
    engine.cache.set_quota(b"small", hard=17)  # its three sequences want 28
    engine.cache.set_quota(b"", hard=1)  # a tenant without sequences: its quota limits no other tenant
    preempted: list[bytes] = []
    preempt = engine.scheduler.preempt

    def recorded(sequence: SequenceState) -> None:
        preempted.append(sequence.completion.request.tenant)
        preempt(sequence)

    engine.scheduler.preempt = recorded  # type: ignore[method-assign]
    requests = [engine.submit(prompt_of(n), params, tenant=tenant) for n in LENGTHS for tenant in (b"small", b"large")]
    while engine.has_work:
        engine.step()
    assert outputs(requests) == [tokens for tokens in expected("llama", checkpoint("llama")) for _ in range(2)]
    assert set(preempted) == {b"small"}
    assert idle(engine)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=strategies.data())
def test_any_workload_gives_each_prompt_its_own_tokens(data: strategies.DataObject, checkpoint: Checkpoints) -> None:
    """Lengths, arrivals, cancellations, chunks, batches and pools are random; some prompts share a prefix."""
    prompts = [
        prompt_of(data.draw(strategies.sampled_from([3, 30, 31, 60])), seed=data.draw(strategies.integers(0, 2)))
        for _ in range(5)
    ]
    counts = [data.draw(strategies.integers(1, 20)) for _ in prompts]
    block_size = data.draw(strategies.sampled_from([1, 4, 16]))
    batch_tokens, chunk = (
        data.draw(strategies.sampled_from([1, 7, 64, 2048])),
        data.draw(strategies.sampled_from([None, 1, 10])),
    )
    limits = Limits(batch_tokens, data.draw(strategies.integers(1, 8)), chunk)
    needed = -(-80 // block_size)
    engine = build(
        checkpoint("llama"),
        block_size=block_size,
        num_frames=data.draw(strategies.integers(needed, 3 * needed)),
        limits=limits,
        prefix_cache=data.draw(strategies.booleans()),
        watermark=data.draw(strategies.sampled_from([0.0, 0.2])),
    )
    requests = []
    for prompt, count in zip(prompts, counts, strict=True):
        requests.append(engine.submit(prompt, SamplingParams(max_tokens=count)))
        for _ in range(data.draw(strategies.integers(0, 3))):
            engine.step()
    cancelled = data.draw(strategies.sets(strategies.sampled_from(requests), max_size=3))
    for request in cancelled:
        engine.cancel(request)
    engine.run()
    whole = build(checkpoint("llama"))
    for request, prompt, count in zip(requests, prompts, counts, strict=True):
        got = request.completions[0].token_ids
        alone = outputs(whole.generate([prompt], SamplingParams(max_tokens=count)))[0]
        assert got == alone[: len(got)]
        assert len(got) == count or request in cancelled
    assert idle(engine)


def test_samples_share_the_frames_of_their_prompt(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"))
    request = engine.submit(prompt_of(150), SamplingParams(max_tokens=8, temperature=2.0, seed=1), num_samples=6)
    engine.step()
    assert engine.cache.stats().mapped == 10  # the pages of 150 tokens, once for all samples
    engine.step()
    assert engine.cache.stats().mapped == 15  # all samples but one copied the last page
    engine.run()
    assert len({tuple(c.token_ids) for c in request.completions}) > 1
    assert idle(engine)


def test_a_seed_gives_the_same_tokens_beside_any_other_requests(checkpoint: Checkpoints) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, top_k=40, seed=11)
    alone = outputs(build(checkpoint("llama")).generate([prompt_of(20)], params, num_samples=3))
    crowd = build(checkpoint("llama"), num_frames=12)
    requests = crowd.generate(
        [prompt_of(33), prompt_of(20), prompt_of(61)],
        [replace(params, seed=5), params, SamplingParams()],
        num_samples=3,
    )
    assert [c.token_ids for c in requests[1].completions] == alone


def by_hand(checkpoint: Checkpoint, prompt: list[int], params: SamplingParams, index: int) -> list[int]:
    """Draw the tokens of sample `index` with one generator from the decoder's logits: no engine, cache or scheduler."""
    paging = Paging(_decoders[str(checkpoint.folder), "cpu"], block_size=16, num_frames=12, num_sequences=1)
    generator, tokens, new = params.generator(index), [], prompt
    for _ in range(params.max_tokens):
        token = int(sample(paging.step({0: new})[-1:], [SamplingRow(params, generator)]).tokens)
        tokens.append(token)
        new = [token]
    return tokens


def test_each_sample_draws_from_one_generator_of_its_own(checkpoint: Checkpoints) -> None:
    params = SamplingParams(max_tokens=12, temperature=2.0, seed=11)
    request = build(checkpoint("llama")).generate([prompt_of(20)], params, num_samples=4)[0]
    for index, tokens in enumerate(outputs([request])):
        assert tokens == by_hand(checkpoint("llama"), prompt_of(20), params, index)


def test_stop_strings_and_ids_end_the_text_before_them(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"))
    free = engine.generate([prompt_of(9)], SamplingParams(max_tokens=12))[0].completions[0]
    words = free.text.split()
    stop_string = SamplingParams(max_tokens=12, stop=" ".join(words[4:6]))
    by_string = engine.generate([prompt_of(9)], stop_string)[0].completions[0]
    assert (by_string.text.split(), by_string.finish_reason) == (words[:4], "stop")
    stop_id = SamplingParams(max_tokens=12, stop_ids=[free.token_ids[3]])
    by_id = engine.generate([prompt_of(9)], stop_id)[0].completions[0]
    assert by_id.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[3]) + 1]
    assert by_id.finish_reason == "stop"
    assert by_id.text.split() == words[: len(by_id.token_ids) - 1]


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["END", "\n\n"])
    assert [stops.push(piece) for piece in ("a E", "N", "E", "\n", "b\n", "\nc")] == [
        ("a ", False),
        ("", False),
        ("EN", False),
        ("E", False),
        ("\nb", False),
        ("", True),
    ]
    assert stops.finish() == ""


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_cancelling_gives_everything_back_at_any_point(steps: int, checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"), limits=Limits(prefill_chunk=20))
    doomed = engine.submit(prompt_of(50), SamplingParams(max_tokens=30), num_samples=3)
    other = engine.submit(prompt_of(30), SamplingParams(max_tokens=10))
    for _ in range(steps):
        engine.step()
    engine.cancel(doomed)
    assert [c.finish_reason for c in doomed.completions] == ["cancelled"] * 3
    engine.run()
    assert other.completions[0].finish_reason == "length"
    assert idle(engine)


def test_a_listener_may_cancel(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"))

    def listen(completion: Completion, text: str) -> None:
        if len(completion.token_ids) == 3:
            engine.cancel(completion.request)

    request = engine.submit(prompt_of(9), SamplingParams(max_tokens=30), num_samples=2, on_text=listen)
    engine.run()
    assert [len(c.token_ids) for c in request.completions] == [3, 3]
    assert idle(engine)


def test_a_listener_may_submit_and_must_not_step(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"))
    later: list[Any] = []

    def listen(completion: Completion, text: str) -> None:
        if len(completion.token_ids) == 1:
            later.append(engine.submit(prompt_of(12), SamplingParams(max_tokens=3)))
        if len(completion.token_ids) == 2:
            engine.run()

    request = engine.submit(prompt_of(9), SamplingParams(max_tokens=4), on_text=listen)
    engine.run()
    assert "a listener may only submit and cancel" in request.completions[0].error
    assert [len(r.completions[0].token_ids) for r in (request, *later)] == [2, 3]
    assert idle(engine)


def test_samples_not_yet_forked_count(checkpoint: Checkpoints) -> None:
    """They count against max_sequences and against the frames promised to running sequences."""
    engine = build(checkpoint("llama"), limits=Limits(max_sequences=4, prefill_chunk=10))
    params = SamplingParams(max_tokens=5)
    for _ in range(2):
        engine.submit(prompt_of(40), params, num_samples=3)
    while engine.has_work:
        engine.step()
        assert sum(len(s.receivers) for s in engine.scheduler.running) <= 4
    narrow = build(checkpoint("llama"), num_frames=9, prefix_cache=False, limits=Limits(prefill_chunk=10))
    for seed in range(2):  # 3 frames of prompt and 2 more tails, of 9: the second waits
        narrow.submit(prompt_of(40, seed=seed), params, num_samples=3)
    narrow.run()
    assert narrow.scheduler.preemptions == 0
    assert idle(narrow)


def test_a_sequence_behind_a_cancelled_head_is_admitted_at_once(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"), num_frames=10)
    first = engine.submit(prompt_of(70), SamplingParams(max_tokens=8))
    large, small = (engine.submit(prompt_of(length, seed=1), SamplingParams(max_tokens=1)) for length in (120, 5))
    engine.step()
    engine.step()
    assert not small.finished  # it waits behind the large one, which does not fit
    engine.cancel(large)
    engine.step()
    assert small.finished
    assert not first.finished


def test_a_cache_of_another_geometry_is_refused(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"))
    changes = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 32, "head_dim_v": 8, "dtype": "bfloat16"}
    for name, value in changes.items():
        other = PagedKVCache(replace(engine.cache.spec, **{name: value}), num_frames=4)
        with pytest.raises(InvalidRequest, match=f"made for {name} "):
            Engine(engine.decoder, engine.tokenizer, other)


BAD = {
    "half of a surrogate pair": lambda e: e.submit("w1 \ud800"),
    "raise num_frames or memory": lambda e: e.submit([1] * 60, SamplingParams(max_tokens=10)),
    "the model ends at 512": lambda e: e.submit([1] * 512),
    "2 prompts and 1 params": lambda e: e.generate([[1], [2]], [SamplingParams()]),
    "one text was given; give": lambda e: e.generate("w1 w2"),
    "limits is 3; give Limits": lambda e: Engine(e.decoder, e.tokenizer, e.cache, limits=3),  # type: ignore[arg-type]
    "device is 'cuda:99'; torch finds": lambda e: Engine.load(device="cuda:99"),
    "device is 'toaster', which torch does not know": lambda e: Engine.load(device="toaster"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_requests_are_refused_where_they_are_made(message: str, checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"), num_frames=4)
    with pytest.raises(InvalidRequest, match=message):
        BAD[message](engine)
    assert idle(engine)


def test_a_trace_has_each_step_and_each_life(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"), limits=Limits(max_batch_tokens=32))
    engine.events = []
    first = engine.submit(prompt_of(50), SamplingParams(max_tokens=4), num_samples=2)
    engine.run()
    engine.cancel(engine.submit(prompt_of(9)))  # it never ran
    cancelled = engine.submit(prompt_of(9, 1), SamplingParams(max_tokens=30))
    engine.step()
    engine.cancel(cancelled)
    engine.run()
    entries = json.loads(json.dumps(chrome_trace(engine.events)))["traceEvents"]

    slices = [entry for entry in entries if entry["ph"] == "X"]
    assert min(entry["ts"] for entry in slices) == 0.0
    assert [e["args"]["tokens"] for e in slices if e["pid"] == STEPS] == [32, 18, 2, 2, 2, 9]
    names = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert list(names.values()) == [f"request {n}, sample {s}" for n, s in ((0, 0), (0, 1), (1, 0))]
    for track, name in names.items():
        own = [entry for entry in slices if (entry["pid"], entry["tid"]) == (REQUESTS, track)]
        phases = {entry["name"]: entry for entry in own if entry["name"] != "chunk"}
        assert list(phases) == ["queued", "prefill", "decode"], name
        chunks = [entry for entry in own if entry["name"] == "chunk"]
        assert all(entry["ts"] >= phases["queued"]["ts"] for entry in chunks)
        for before, after in zip(phases.values(), list(phases.values())[1:], strict=False):
            assert before["dur"] >= 0
            assert abs(before["ts"] + before["dur"] - after["ts"]) < 0.01
    computed = sum(e["args"]["tokens"] for e in slices if e["name"] == "chunk")
    assert computed == engine.stats().computed_tokens == 50 + 6 + 9
    assert [len(completion.token_ids) for completion in first.completions] == [4, 4]
