"""Speculation: whatever the drafts are, each request gets the tokens of the plain way; right ones save passes.

The drafters of the tests know the right tokens, and spoil some of them. A drafter that fails ends only the requests for
which it fails alone; the others keep tokens and drafts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.cache import PagedKVCache
from pagedkv.engine.drafts.draft_model import DraftModel
from pagedkv.engine.drafts.prompt_lookup import PromptLookup
from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import InvalidRequest
from tests.engine.conftest import VOCAB, Checkpoint, Checkpoints, prompt_of
from tests.engine.step.test_engine import LENGTHS, NUM_TOKENS, build, expected, idle, outputs
from tests.records import document

if TYPE_CHECKING:
    from pagedkv.engine.requests.sequence import SequenceState

FAMILIES = ("llama", "mistral", "gemma2")
QUICK = (("llama", 0.0), ("llama", 1.0))


@dataclass
class Oracle:
    """A drafter that knows the tokens of each sample of each prompt, and spoils a draft with a chance of `wrong`."""

    num_tokens: int = 4
    wrong: float = 0.0
    vocab_size: int | None = None
    known: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)
    dice: random.Random = field(default_factory=lambda: random.Random(3))
    running: set[SequenceState] = field(default_factory=set)

    def learn(self, requests: list[Any]) -> Oracle:
        for request in requests:
            for completion in request.completions:
                self.known[tuple(request.prompt_ids), completion.index] = list(completion.token_ids)
        return self

    def propose(self, sequences: list[SequenceState], most: list[int]) -> list[list[int]]:
        self.running |= set(sequences)
        drafts = []
        for sequence, count in zip(sequences, most, strict=True):
            completion, begin = sequence.completion, sequence.num_output
            right = self.known[tuple(completion.request.prompt_ids), completion.index][begin : begin + count]
            drafts.append([(t + 1) % VOCAB if self.dice.random() < self.wrong else t for t in right])
        return drafts

    def forget(self, sequence: SequenceState) -> None:
        self.running.discard(sequence)

    def recover(self) -> None:
        self.running.clear()


def crowd(engine: Engine, params: SamplingParams, **options: Any) -> list[Any]:
    return engine.generate([prompt_of(length) for length in LENGTHS], params, **options)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        pytest.param(name, wrong, marks=[] if (name, wrong) in QUICK else [pytest.mark.slow])
        for name in FAMILIES
        for wrong in (0.0, 0.3, 1.0)
    ],
)
def test_greedy_tokens_are_those_of_the_plain_way(name: str, wrong: float, checkpoint: Checkpoints) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS)
    oracle = Oracle(wrong=wrong).learn(crowd(build(checkpoint(name)), params))
    for options in ({"block_size": 1, "limits": Limits(max_batch_tokens=20)}, {"num_frames": 17}):
        engine = build(checkpoint(name), drafter=oracle, **options)
        assert outputs(crowd(engine, params)) == expected(name, checkpoint(name))
        assert idle(engine)
        assert not oracle.running
        assert engine.speculation.num_drafts > 50
        assert (engine.speculation.acceptance == 1.0) == (wrong == 0)
        assert (engine.speculation.acceptance == 0.0) == (wrong == 1)


def test_sampled_tokens_are_those_of_the_plain_way_for_any_seed(checkpoint: Checkpoints) -> None:
    """With filters, penalties whose history holds the drafts that came true, log-probs, and several samples."""
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.3}
    params = SamplingParams(max_tokens=30, temperature=1.3, top_p=0.9, seed=5, logprobs=1, **penalties)
    plain = crowd(build(checkpoint("llama")), params, num_samples=3)
    engine = build(checkpoint("llama"), drafter=Oracle(wrong=0.3).learn(plain))
    drafted = crowd(engine, params, num_samples=3)
    assert outputs(drafted) == outputs(plain)
    for got, want in zip(drafted, plain, strict=True):
        for c, d in zip(got.completions, want.completions, strict=True):
            assert [of_one.logprob for of_one in c.logprobs] == pytest.approx([x.logprob for x in d.logprobs], abs=1e-3)
    assert engine.speculation.acceptance > 0.4
    assert idle(engine)


def test_a_pass_gives_all_drafts_that_are_right_and_one_more(checkpoint: Checkpoints) -> None:
    params = SamplingParams(max_tokens=26)
    plain = build(checkpoint("llama")).generate([prompt_of(9)], params)
    engine = build(checkpoint("llama"), drafter=Oracle(num_tokens=4).learn(plain))
    request, steps = engine.submit(prompt_of(9), params), 0
    while engine.has_work:
        engine.step()
        steps += 1
        assert len(request.completions[0].token_ids) == min(1 + 5 * (steps - 1), 26)
    assert engine.speculation.tokens_per_pass == pytest.approx(26 / 6)


def test_drafts_behind_the_end_of_an_output_count_as_nothing(checkpoint: Checkpoints) -> None:
    (plain,) = build(checkpoint("llama")).generate([prompt_of(9)], SamplingParams(max_tokens=26))
    known = plain.completions[0].token_ids
    end = next(i for i in range(7, 26) if known[i] not in known[:i])
    engine = build(checkpoint("llama"), drafter=Oracle(num_tokens=25).learn([plain]))
    (ended,) = engine.generate([prompt_of(9)], SamplingParams(max_tokens=26, stop_ids=[known[end]]))
    assert ended.completions[0].token_ids == known[: end + 1]
    guesses = engine.speculation
    assert (guesses.num_passes, guesses.num_drafts) == (2, 24)
    assert guesses.num_accepted == end, "the last of them is the token that ends the output"
    assert guesses.tokens_per_pass * guesses.num_passes == end + 1


def test_rejected_drafts_give_their_frames_back_in_the_same_step(checkpoint: Checkpoints) -> None:
    params = SamplingParams(max_tokens=20)
    plain = build(checkpoint("llama"), block_size=1).generate([prompt_of(9)], params)
    engine = build(checkpoint("llama"), block_size=1, drafter=Oracle(num_tokens=6, wrong=1.0).learn(plain))
    engine.submit(prompt_of(9), params)
    for computed in range(9, 28):
        engine.step()
        assert engine.cache.stats().mapped == computed


def test_drafts_preempt_no_sequence(checkpoint: Checkpoints) -> None:
    """The drafts of the longer output do not fit next to the other one, which ends after a few steps."""
    found, oracle = list[Any](), None
    for _ in range(2):
        engine = build(checkpoint("llama"), num_frames=12, drafter=oracle)
        requests = [engine.submit(prompt_of(64, n), SamplingParams(max_tokens=most)) for n, most in enumerate((8, 100))]
        engine.run()
        found.append(outputs(requests))
        assert engine.scheduler.preemptions == 0
        oracle = Oracle(num_tokens=80, wrong=0.8).learn(requests)
    assert found[0] == found[1]


@pytest.mark.parametrize("end", [{"max_tokens": 7}, {"stop_ids": True}, {"stop": True}])
def test_an_output_ends_inside_a_pass_where_the_plain_one_ends(end: dict[str, Any], checkpoint: Checkpoints) -> None:
    free = build(checkpoint("llama")).generate([prompt_of(9)], SamplingParams(max_tokens=20))
    tokens = free[0].completions[0].token_ids
    values = {"max_tokens": 7, "stop_ids": [tokens[5]], "stop": f"w{tokens[5]} w{tokens[6]}"}
    params = SamplingParams(**{"max_tokens": 20, **{name: values[name] for name in end}})
    want = build(checkpoint("llama")).generate([prompt_of(9)], params)[0].completions[0]
    engine = build(checkpoint("llama"), drafter=Oracle(num_tokens=9).learn(free))
    got = engine.generate([prompt_of(9)], params)[0].completions[0]
    assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)
    assert len(got.token_ids) < 9
    assert idle(engine)


@pytest.mark.parametrize("row", [0, 3])
def test_a_row_of_no_numbers_ends_a_request_where_the_plain_way_ends_it(
    row: int, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All logits after the 9 + 3 + row first tokens are NaN, whichever pass computes them."""
    params = SamplingParams(max_tokens=20)
    plain = build(checkpoint("llama")).generate([prompt_of(9)], params)
    got = []
    for drafter in (None, Oracle(num_tokens=5).learn(plain)):
        engine = build(checkpoint("llama"), drafter=drafter)
        real = engine.decoder.forward

        def forward(ids: Any, batch: Any, *args: Any, real: Any = real, **options: Any) -> Any:
            logits = real(ids, batch, *args, **options).clone()
            rows, positions = options["logits_of"], batch.positions
            logits[(positions if rows is None else positions[rows]) >= 9 + 3 + row] = torch.nan
            return logits

        monkeypatch.setattr(engine.decoder, "forward", forward)
        completion = engine.generate([prompt_of(9)], params)[0].completions[0]
        monkeypatch.undo()
        got.append((completion.token_ids, completion.finish_reason, completion.error))
        assert idle(engine)
        whole = [*prompt_of(9), *plain[0].completions[0].token_ids]
        assert engine.cache.lookup(whole) == 0  # no page was full of computed tokens whose logits were usable
    assert got[0] == got[1]
    assert len(got[0][0]) == 4 + row
    assert got[0][1] == "error"


def draft_model(checkpoint: Checkpoint, num_frames: int = 200, **options: Any) -> DraftModel:
    decoder = checkpoint.decoder()
    return DraftModel(decoder, PagedKVCache(decoder.config.spec(), num_frames=num_frames), **options)


def is_empty(drafter: DraftModel) -> bool:
    drafter.cache.check(3)
    return drafter.cache.stats().spaces == 0


@pytest.mark.parametrize(
    ("name", "sampling"), [("llama", {"temperature": 1.0, "seed": 4}), ("llama-tied", {})], ids=["sampled", "greedy"]
)
def test_a_draft_model_gives_the_tokens_of_the_plain_way(
    name: str, sampling: dict[str, Any], checkpoint: Checkpoints
) -> None:
    """All drafts of the same model come true, also those drawn by chance; those of another model seldom."""
    params = SamplingParams(max_tokens=20, **sampling)
    plain = crowd(build(checkpoint("llama")), params, num_samples=2)
    drafter = draft_model(checkpoint(name), num_tokens=3)
    engine = build(checkpoint("llama"), drafter=drafter)
    assert outputs(crowd(engine, params, num_samples=2)) == outputs(plain)
    if name == "llama":
        assert engine.speculation.acceptance == 1.0
        assert engine.speculation.tokens_per_pass > 3
    else:
        assert engine.speculation.acceptance < 0.5
        assert engine.speculation.num_drafts > 100
    assert idle(engine)
    assert is_empty(drafter)


@pytest.mark.parametrize("num_frames", [6, 40])
def test_a_draft_model_with_few_frames_drafts_less(num_frames: int, checkpoint: Checkpoints) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS)
    drafter = draft_model(checkpoint("llama"), num_frames)
    engine = build(checkpoint("llama"), drafter=drafter)
    assert outputs(crowd(engine, params)) == expected("llama", checkpoint("llama"))
    assert (engine.speculation.num_drafts > 145) == (num_frames == 40)
    assert is_empty(drafter)


def test_a_draft_model_takes_a_long_prompt_in_parts(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedkv.engine.drafts.draft_model.MOST_IN_A_PASS", 40)
    params = SamplingParams(max_tokens=NUM_TOKENS)
    engine = build(checkpoint("llama"), drafter=draft_model(checkpoint("llama")))
    assert outputs(crowd(engine, params)) == expected("llama", checkpoint("llama"))
    assert engine.speculation.acceptance == 1.0


def test_a_draft_model_with_windows_rolls_back_wrong_drafts(checkpoint: Checkpoints) -> None:
    """Its window is 37 tokens; two prompts are longer. A cache that gives back all behind it cannot roll back."""
    spec = replace(checkpoint("mistral").decoder().config.specs()[0], keep=4)
    kept = PagedKVCache(spec, num_frames=200)
    for drafter in (
        DraftModel.load(checkpoint("mistral").folder, dtype="float32", num_frames=200),
        DraftModel(checkpoint("mistral").decoder(), kept, num_tokens=4),
    ):
        engine = build(checkpoint("llama"), drafter=drafter)
        found = outputs(crowd(engine, SamplingParams(max_tokens=24)))
        assert found == [tokens[:24] for tokens in expected("llama", checkpoint("llama"))]
        assert engine.speculation.acceptance < 0.5
        assert engine.speculation.num_drafts > 40
        assert is_empty(drafter)
    with pytest.raises(InvalidRequest, match="keeps 4 tokens behind a window of 37, and 5 drafts may be wrong"):
        DraftModel(checkpoint("mistral").decoder(), kept, num_tokens=5)


def test_a_draft_model_of_another_vocabulary_is_refused(checkpoint: Checkpoints) -> None:
    with pytest.raises(InvalidRequest, match="the draft model has 97 tokens in its vocabulary, the model has"):
        Engine.load(speculate=checkpoint("llama").folder, num_frames=8)
    with pytest.raises(InvalidRequest, match="speculate is 5; give 'prompt-lookup', 'draft', the"):
        Engine.load(speculate=5, num_frames=8)  # type: ignore[arg-type]


def passes(engine: Engine, prompts: list[str]) -> tuple[list[Any], int]:
    """Return the requests, answered one after another, and the number of steps."""
    requests, before = list[Any](), engine.meter.steps
    for prompt in prompts:
        requests += engine.generate([prompt])
    return requests, engine.meter.steps - before


def test_held_out_questions_take_fewer_passes_with_the_draft_model() -> None:
    asked = document(300, seed=41)
    prompts = [asked.prompt(question) for question in asked.questions[:6]]
    plain, slow = passes(Engine.load(num_frames=128), prompts)
    engine = Engine.load(num_frames=128, speculate="draft")
    drafted, fast = passes(engine, prompts)
    assert outputs(drafted) == outputs(plain)
    assert slow >= 1.5 * fast
    assert engine.speculation.acceptance > 0.5
    assert idle(engine)


def lookup(tokens: list[int], count: int = 8, **options: Any) -> list[int]:
    """Return the drafts of a PromptLookup that has seen the text grow token by token."""
    drafter = PromptLookup(num_tokens=count, **options)
    sequence: Any = type("Sequence", (), {"tokens": []})()
    drafts: list[list[int]] = [[]]
    for token in tokens:
        sequence.tokens.append(token)
        drafts = drafter.propose([sequence], [count])
    assert drafts == PromptLookup(num_tokens=count, **options).propose([sequence], [count])
    return drafts[0]


def test_drafts_are_the_tokens_that_followed_before() -> None:
    assert lookup([1, 2, 3, 4, 5, 6, 1, 2], 3) == [3, 4, 5]
    assert lookup([1, 2, 3, 1, 2, 4, 9, 1, 2], 2) == [4, 9]  # the last time
    assert lookup([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 1) == [3]  # a longer run is more certain
    assert lookup([1, 2, 3, 4]) == []
    assert lookup([1, 2, 1], shortest=2) == []
    assert lookup([1, 2, 1], 2, shortest=1) == [2, 1]
    assert lookup([5]) == []


def test_text_that_repeats_itself_is_drafted_round_and_round() -> None:
    assert lookup([7, 8, 9, 7, 8, 9, 7, 8], 8) == [9, 7, 8, 9, 7, 8, 9, 7]
    assert lookup([4, 4, 4], 5) == [4, 4, 4, 4, 4]


@pytest.mark.parametrize("options", [{"num_tokens": 0}, {"longest": 0}, {"shortest": True}, {"shortest": 5}])
def test_an_option_of_prompt_lookup_out_of_range_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"PromptLookup.{next(iter(options))} is"):
        PromptLookup(**options)


PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
BAD = 71
"""The length of the prompt for which a drafter fails, from its fifth token on."""


@dataclass
class Failing(Oracle):
    """An Oracle that raises `given`, or returns it for the sequences of the bad prompt; `times` times, if given."""

    given: Any = None
    times: int = 1 << 30
    recovered: int = 0

    def propose(self, sequences: list[SequenceState], most: list[int]) -> Any:
        drafts: list[Any] = super().propose(sequences, most)
        for n, sequence in enumerate(sequences):
            if len(sequence.completion.request.prompt_ids) == BAD and sequence.num_output > 4 and self.times:
                self.times -= 1
                if isinstance(self.given, BaseException):
                    raise self.given
                drafts[n] = self.given
        return drafts

    def recover(self) -> None:
        self.recovered += 1
        super().recover()


def run(checkpoint: Checkpoint, drafter: Any, **options: Any) -> tuple[Any, list[Any]]:
    engine = build(checkpoint, drafter=drafter, **options)
    requests = [engine.submit(prompt_of(length), PARAMS, num_samples=2) for length in LENGTHS]
    engine.run()
    assert idle(engine)
    return engine, requests


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (ValueError("a bug of mine"), "ValueError: a bug of mine"),
        (StopIteration(), "StopIteration: "),
        (None, "TypeError: object of type 'NoneType' has no len()"),
        ([1] * 5, "InvalidRequest: propose returned 5 drafts for a sequence that may have 4"),
        ([1, VOCAB], f"InvalidRequest: propose returned [1, {VOCAB}]; drafts must be from 0 to {VOCAB - 1}"),
        ([-1], "InvalidRequest: propose returned [-1]; drafts must be from 0 to"),
        (["a"], "TypeError: "),
        (GeneratorExit("bad arguments"), "GeneratorExit: bad arguments"),
    ],
    ids=str,
)
def test_a_drafter_that_fails_for_one_request_ends_that_one_only(
    given: Any, words: str, checkpoint: Checkpoints
) -> None:
    plain = crowd(build(checkpoint("llama")), PARAMS, num_samples=2)
    drafter = Failing(given=given)
    engine, requests = run(checkpoint("llama"), drafter.learn(plain))
    for request, wanted in zip(requests, plain, strict=True):
        if len(request.prompt_ids) == BAD:
            for one, whole in zip(request.completions, wanted.completions, strict=True):
                assert one.finish_reason == "error"
                assert one.error.startswith(f"the drafter failed: {words}")
                assert 4 < len(one.token_ids) < 24
                assert one.token_ids == whole.token_ids[: len(one.token_ids)]  # nothing is lost that came before
        else:
            assert outputs([request]) == outputs([wanted])
    assert engine.speculation.acceptance == 1.0
    assert drafter.recovered == 2  # for the whole step, and for the first of its two samples, alone
    assert not drafter.running


def test_a_drafter_that_fails_once_costs_no_request(checkpoint: Checkpoints) -> None:
    plain = crowd(build(checkpoint("llama")), PARAMS, num_samples=2)
    drafter = Failing(given=MemoryError("of the GPU"), times=1)
    engine, requests = run(checkpoint("llama"), drafter.learn(plain))
    assert outputs(requests) == outputs(plain)
    assert engine.speculation.tokens_per_pass > 4
    assert drafter.recovered == 1


def test_a_draft_model_that_raises_inside_of_a_pass_gives_all_its_frames_back(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = crowd(build(checkpoint("llama")), PARAMS)
    drafter = draft_model(checkpoint("llama"))
    forward, calls = drafter.decoder.forward, list[int]()

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) in (3, 9):  # for two sequences, then for the second of them alone
            raise RuntimeError("out of memory")
        return forward(*arguments, **options)

    monkeypatch.setattr(drafter.decoder, "forward", failing)
    engine = build(checkpoint("llama"), drafter=drafter, limits=Limits(max_sequences=2))
    requests = [engine.submit(prompt_of(length), PARAMS) for length in LENGTHS]
    engine.run()
    errors = [request.completions[0].error for request in requests]
    assert sorted(errors) == ["", "", "the drafter failed: RuntimeError: out of memory"]
    for request, wanted in zip(requests, plain, strict=True):
        own = request.completions[0].token_ids
        assert own == wanted.completions[0].token_ids[: len(own) if request.completions[0].error else None]
    assert idle(engine)
    assert drafter.cache.stats().mapped == 0
