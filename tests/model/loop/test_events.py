"""Events: each life is told in order, tokens and chunks add up, and a record changes no output."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from pagedkv.model.engine import Engine, Limits
from pagedkv.model.loop.events import Event, Events
from pagedkv.sampling.params import SamplingParams

if TYPE_CHECKING:
    from pagedkv.model.request import Request

PAGE = "Mira keeps a red lamp in the cellar. Otto lives in Ghent and works as a baker. Ghent has ten bridges."
QUESTIONS = ("Where is the lamp of Mira?", "Where does Otto live?", "How many bridges does Ghent have?")


def recorded(engine: Engine) -> Engine:
    engine.events = Events()
    return engine


def lives(engine: Engine) -> dict[tuple[int, int], list[Event]]:
    """The events of each completion, without those of steps."""
    assert engine.events is not None
    found = defaultdict(list)
    for event in engine.events.events:
        if event.kind != "step":
            found[event.request, event.sample].append(event)
    return found


def kinds(life: list[Event]) -> list[str]:
    return [event.kind for event in life]


def assert_whole(life: list[Event], request: Request, sample: int = 0) -> None:
    """The events tell the output of a completion, in order of time."""
    completion = request.completions[sample]
    assert [event.value for event in life if event.kind == "token"] == completion.token_ids
    logprobs = [event.logprob for event in life if event.kind == "token" and event.logprob is not None]
    assert logprobs == [found.logprob for found in completion.logprobs]
    assert (life[-1].kind, life[-1].detail) == ("finished", completion.finish_reason)
    assert life[-1].value == len(completion.token_ids)
    assert all(a.at <= b.until for a, b in pairwise(life))
    assert kinds(life)[0] == ("forked" if sample else "queued")


def test_a_life_is_told_in_order():
    engine = recorded(Engine.load(num_frames=64, limits=Limits(prefill_chunk=16)))
    (request,) = engine.generate([f"{PAGE} {QUESTIONS[1]}"], SamplingParams(logprobs=0))
    assert len(request.completions[0].logprobs) == len(request.completions[0].token_ids)
    (life,) = lives(engine).values()
    prompt, output = len(request.prompt_ids), len(request.completions[0].token_ids)
    chunks = -(-prompt // 16)
    expected = ["queued", "admitted", *["chunk"] * chunks, "token", *["chunk", "token"] * (output - 1), "finished"]
    assert kinds(life) == expected
    assert_whole(life, request)
    assert [event.value for event in life[:2]] == [prompt, 0]
    assert sum(event.value for event in life if event.kind == "chunk") == prompt + output - 1
    assert life[0].at == request.submitted_at
    assert life[1].at >= life[0].at


def test_steps_tell_all_tokens_computed():
    engine = recorded(Engine.load(num_frames=64))
    engine.generate([f"{PAGE} {question}" for question in QUESTIONS])
    assert engine.events is not None
    steps = {(event.at, event.until): event.value for event in engine.events.events if event.kind == "step"}
    chunks: dict[tuple[float, float], int] = defaultdict(int)
    for event in engine.events.events:
        if event.kind == "chunk":
            chunks[event.at, event.until] += event.value
    assert steps == chunks
    assert all(first[1] <= second[0] for first, second in pairwise(sorted(steps)))


def test_a_prefix_that_was_found_is_told_at_admission():
    engine = recorded(Engine.load(num_frames=64))
    engine.generate([f"{PAGE} {QUESTIONS[0]}"])
    (request,) = engine.generate([f"{PAGE} {QUESTIONS[1]}"])
    life = lives(engine)[1, 0]
    assert life[1].value == request.completions[0].cached_tokens == 16
    assert life[2].value == len(request.prompt_ids) - 16


def test_samples_are_forked_with_their_first_token():
    engine = recorded(Engine.load(num_frames=64))
    params = SamplingParams(temperature=5, seed=1, max_tokens=9)
    (request,) = engine.generate([PAGE + QUESTIONS[0]], params, num_samples=3)
    found = lives(engine)
    assert sorted(found) == [(0, 0), (0, 1), (0, 2)]
    for sample in range(3):
        assert_whole(found[0, sample], request, sample)
    assert kinds(found[0, 1])[:3] == ["forked", "token", "chunk"]


@pytest.mark.parametrize(("max_tokens", "seed"), [(1, 1), (3, 0)])
def test_candidates_of_which_few_are_chosen_keep_their_numbers(max_tokens: int, seed: int):
    """The choice is made in the step of the last tokens, before their events."""
    prompt = f"{PAGE} {QUESTIONS[2]}"
    params = SamplingParams(max_tokens=max_tokens, temperature=4, seed=seed, ignore_eos=True)
    (plain,) = Engine.load(num_frames=64).generate([prompt], params, num_samples=4)
    engine = recorded(Engine.load(num_frames=64, speculate="draft"))
    (request,) = engine.generate([prompt], replace(params, best_of=4))
    assert request.completions[0].token_ids != plain.completions[0].token_ids, "another candidate is chosen"
    found = lives(engine)
    assert sorted(found) == [(0, index) for index in range(4)]
    for index, completion in enumerate(plain.completions):
        life = found[0, index]
        assert [event.value for event in life if event.kind == "token"] == completion.token_ids
        assert (kinds(life)[0], kinds(life)[-1]) == ("forked" if index else "queued", "finished")
    assert engine.events is not None
    assert not engine.events._numbers


def test_a_sample_that_has_ended_is_not_forked_again_by_a_retry():
    engine, tries = recorded(Engine.load(num_frames=64)), [0]

    def rejects_the_first_sample_once(completion):
        tries[0] += completion.index == 0
        return completion.index > 0 or tries[0] > 1

    params = SamplingParams(
        temperature=5, seed=1, max_tokens=5, validator=rejects_the_first_sample_once, max_retries=3, ignore_eos=True
    )
    (request,) = engine.generate([PAGE + QUESTIONS[0]], params, num_samples=2)
    found = lives(engine)
    assert_whole(found[0, 1], request, 1)
    assert kinds(found[0, 0]).count("rejected") == 1
    assert not engine.events._lives


def test_preempted_lives_are_told_and_all_outputs_stay_the_same():
    prompts = [f"{PAGE} {question}" for question in QUESTIONS]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    plain = Engine.load(num_frames=64).generate(prompts, params)
    engine = recorded(Engine.load(num_frames=10, watermark=0.0))
    requests = engine.generate(prompts, params)
    assert engine.scheduler.preemptions
    found = lives(engine)
    assert [r.completions[0].token_ids for r in requests] == [r.completions[0].token_ids for r in plain]
    preempted = [event for life in found.values() for event in life if event.kind == "preempted"]
    assert len(preempted) == engine.scheduler.preemptions
    for number, request in enumerate(requests):
        life = found[number, 0]
        assert_whole(life, request)
        computed = num_tokens = 0
        for event in life:
            if event.kind == "admitted":
                computed = event.value
            elif event.kind == "chunk":
                computed += event.value
            elif event.kind == "token":
                assert computed == len(request.prompt_ids) + num_tokens
                num_tokens += 1
        assert kinds(life).count("admitted") == 1 + kinds(life).count("preempted")


def test_drafts_that_are_rolled_back_are_told():
    class Wrong:
        """A drafter whose guesses never come true."""

        num_tokens, vocab_size = 2, None

        def propose(self, sequences, most):
            return [[3] * min(2, count) for count in most]

        def forget(self, sequence):
            pass

        def recover(self):
            pass

    engine = Engine.load(num_frames=64, speculate=Wrong())
    recorded(engine)
    (request,) = engine.generate([f"{PAGE} {QUESTIONS[1]}"])
    (life,) = lives(engine).values()
    assert_whole(life, request)
    assert "rolled_back" in kinds(life)
    for event in life:
        if event.kind == "chunk" and event.value == 3:
            assert Event("rolled_back", event.until, event.until, 0, 0, 2) in life


def test_drafts_behind_a_stop_that_came_true_are_not_rolled_back():
    prompt = f"{PAGE} {QUESTIONS[1]}"
    (plain,) = Engine.load(num_frames=64).generate([prompt])
    known = plain.completions[0].token_ids

    class Right:
        """A drafter that knows the output."""

        num_tokens, vocab_size = 4, None

        def propose(self, sequences, most):
            return [known[one.num_output :][:count] for one, count in zip(sequences, most, strict=True)]

        def forget(self, sequence):
            pass

        def recover(self):
            pass

    engine = recorded(Engine.load(num_frames=64, speculate=Right()))
    (request,) = engine.generate([prompt], SamplingParams(stop="lives"))
    (life,) = lives(engine).values()
    assert_whole(life, request)
    assert [event.value for event in life if event.kind == "chunk"][-1] == 5
    assert len(request.completions[0].token_ids) < 5
    assert "rolled_back" not in kinds(life)


def test_a_request_that_ends_while_it_runs_or_waits_is_told_and_forgotten():
    """By cancel or by a deadline, before the first step, between two steps, and as the last call of all."""
    engine = recorded(Engine.load(num_frames=64, limits=Limits(max_sequences=1)))
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    early = engine.submit(PAGE, params)
    engine.cancel(early)
    runs, late, cancelled = engine.submit(PAGE, params), engine.submit(PAGE, timeout=1e-9), engine.submit(PAGE, params)
    for _ in range(3):
        engine.step()
    engine.cancel(cancelled)
    engine.cancel(runs)
    engine.run()
    last = engine.submit(PAGE, params)
    engine.cancel(last)
    assert not engine.has_work
    found = lives(engine)
    assert sorted(found) == [(number, 0) for number in range(5)]
    for number, request in enumerate((early, runs, late, cancelled, last)):
        life = found[number, 0]
        assert_whole(life, request)
        assert life[0].at == request.submitted_at
        assert life[0].value == len(request.prompt_ids)
        if request is not runs:
            assert kinds(life) == ["queued", "finished"]
    assert [found[number, 0][-1].detail for number in range(5)] == ["cancelled"] * 2 + ["error"] + ["cancelled"] * 2
    assert engine.events is not None
    assert not engine.events._lives
    assert not engine.events._numbers


def test_without_a_record_no_clock_is_read_for_it(monkeypatch: pytest.MonkeyPatch):
    for name in ("queue", "step", "end"):
        monkeypatch.setattr(Events, name, lambda *_: pytest.fail("an event was recorded"))
    assert Engine.load(num_frames=64).generate([PAGE + QUESTIONS[0]])
