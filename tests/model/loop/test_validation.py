"""Validation: a rejected output is made again from the pages of its prompt, and only an accepted one is shown."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import pytest

from pagedkv.errors import InvalidRequest
from pagedkv.model.engine import Engine
from pagedkv.model.loop.events import Events
from pagedkv.model.request import Completion
from pagedkv.sampling.params import SamplingParams
from tests.interrupts import Interrupter, count_instructions
from tests.model.conftest import Checkpoint, prompt_of
from tests.model.test_engine import build, idle, outputs

if TYPE_CHECKING:
    from collections.abc import Callable


WARM: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 3}


def judged(*verdicts: bool | str, **options: Any) -> SamplingParams:
    """Parameters whose validator gives these verdicts in turn, the last one from then on."""
    left = list(verdicts)

    def validator(_: Completion) -> bool | str:
        return left.pop(0) if len(left) > 1 else left[0]

    return SamplingParams(**{**WARM, "validator": validator, "max_retries": 5, **options})


def with_seed(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{**WARM, "seed": seed, **options})


@pytest.fixture
def engine(checkpoint: Callable[[str], Checkpoint]) -> Engine:
    return build(checkpoint("llama"))


@pytest.mark.parametrize("length", [1, 16, 40])
def test_a_retry_gives_the_output_of_the_next_seed(engine: Engine, length: int) -> None:
    plain = [engine.generate([prompt_of(length)], with_seed(3 + retry))[0].completions[0] for retry in range(3)]
    (one,) = engine.generate([prompt_of(length)], judged("too short", False, True))[0].completions
    assert [one.token_ids, one.text] == [plain[2].token_ids, plain[2].text]
    assert (one.finish_reason, one.error) == ("length", "")
    assert [rejected.reason for rejected in one.rejections] == ["too short", "no reason was given"]
    assert [rejected.token_ids for rejected in one.rejections] == [plain[0].token_ids, plain[1].token_ids]
    assert [rejected.text for rejected in one.rejections] == [plain[0].text, plain[1].text]
    assert idle(engine)


def test_a_retry_does_not_compute_the_prompt_again(checkpoint: Callable[[str], Checkpoint]) -> None:
    engine = build(checkpoint("llama"), prefix_cache=False)
    engine.generate([prompt_of(40)], judged(False, False, True))
    assert engine.stats().computed_tokens == 40 + 5 + 2 * (1 + 5)  # one token of the prompt gives the first logits
    assert engine.stats().steps == 3 * 6


@pytest.mark.parametrize("num_frames", [400, 13])
def test_each_sample_and_each_neighbour_is_judged_alone(
    num_frames: int, checkpoint: Callable[[str], Checkpoint]
) -> None:
    engine, plain = build(checkpoint("llama"), num_frames=num_frames), build(checkpoint("llama"))
    tries: dict[int, int] = {}

    def rejects_by_index(completion: Completion) -> bool:
        tries[completion.index] = tries.get(completion.index, 0) + 1
        return tries[completion.index] > completion.index + (completion.index == 0)

    params = judged(True, validator=rejects_by_index)
    request = engine.submit(prompt_of(40), params, num_samples=3)
    other = engine.submit(prompt_of(70), with_seed(9))
    engine.run()
    retries = (1, 1, 2)
    assert [len(one.rejections) for one in request.completions] == list(retries)
    for one, retry in zip(request.completions, retries, strict=True):
        expected = plain.generate([prompt_of(40)], with_seed(3 + retry), num_samples=3)[0].completions[one.index]
        assert one.token_ids == expected.token_ids
    assert outputs([other]) == outputs(plain.generate([prompt_of(70)], with_seed(9)))
    assert idle(engine)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_retry_under_a_window_gives_the_same_output(name: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    from pagedkv.model.loop.pool import new_cache

    plain = build(checkpoint(name))
    cache = new_cache(plain.decoder, block_size=4, num_frames=400)
    engine = Engine(plain.decoder, plain.tokenizer, cache)
    (one,) = engine.generate([prompt_of(90)], judged(False, True))[0].completions
    assert one.token_ids == plain.generate([prompt_of(90)], with_seed(4))[0].completions[0].token_ids
    assert idle(engine)


def test_penalties_and_drafts_begin_anew(checkpoint: Callable[[str], Checkpoint]) -> None:
    from pagedkv.model.ways.prompt_lookup import PromptLookup

    options = {"frequency_penalty": 1.5, "max_tokens": 30, "logprobs": 1}
    prompt = prompt_of(20) * 3
    drafting = build(checkpoint("llama"), drafter=PromptLookup(shortest=1))
    (one,) = drafting.generate([prompt], judged(False, True, **options))[0].completions
    plain = build(checkpoint("llama")).generate([prompt], with_seed(4, **options))[0].completions[0]
    assert one.token_ids == plain.token_ids
    assert len(one.logprobs) == 30
    assert idle(drafting)


def test_without_a_retry_left_the_request_ends_with_the_last_reason(engine: Engine) -> None:
    (one,) = engine.generate([prompt_of(9)], judged("no verb", max_retries=1))[0].completions
    assert (one.finish_reason, one.error) == ("error", "the validator rejected all 2 outputs; the last one: no verb")
    assert len(one.rejections) == 2
    assert one.token_ids == one.rejections[-1].token_ids
    (one,) = engine.generate([prompt_of(9)], judged("no verb", max_retries=0, temperature=0.0))[0].completions
    assert one.error == "the validator rejected the output; the last one: no verb"


def test_a_listener_hears_only_an_accepted_output(engine: Engine) -> None:
    heard: list[tuple[str, str]] = []

    def hear(completion: Completion, text: str) -> None:
        heard.append((text, completion.finish_reason))

    (request,) = engine.generate([prompt_of(9)], judged(False, True), on_text=hear)
    assert heard == [(request.completions[0].text, "length")]
    heard.clear()
    engine.generate([prompt_of(9)], judged(False, max_retries=0), on_text=hear)
    assert heard == [("", "error")]


def test_the_validator_sees_the_finished_output_and_cannot_change_it(engine: Engine) -> None:
    seen: list[tuple[str, list[int], str]] = []

    def validator(completion: Completion) -> bool:
        seen.append((completion.finish_reason, list(completion.token_ids), completion.text))
        completion.token_ids.clear()
        completion.text = "mine"
        return True

    (one,) = engine.generate([prompt_of(9)], with_seed(3, validator=validator))[0].completions
    assert seen == [("length", one.token_ids, one.text)]
    assert len(one.token_ids) == 6


class Nameless:
    def __repr__(self) -> str:
        raise ValueError


@pytest.mark.parametrize("verdict", [None, "", 1, [], Nameless(), "raises"], ids=lambda verdict: type(verdict).__name__)
def test_a_validator_that_fails_ends_its_own_request_only(engine: Engine, verdict: Any) -> None:
    def validator(_: Completion) -> Any:
        if verdict == "raises":
            raise ValueError("a bug of mine")
        return verdict

    request = engine.submit(prompt_of(9), with_seed(3, validator=validator, max_retries=5), num_samples=2)
    other = engine.submit(prompt_of(9), with_seed(3))
    engine.run()
    assert [one.finish_reason for one in request.completions] == ["error"] * 2
    words = "the validator raised ValueError: a bug of mine" if verdict == "raises" else "the validator returned"
    assert request.completions[0].error.startswith(words)
    assert other.completions[0].finish_reason == "length"
    assert idle(engine)


class Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("kind", [SystemExit, Panic])
def test_an_exit_of_a_validator_ends_its_request_and_is_raised_once(engine: Engine, kind: type[BaseException]) -> None:
    asked: list[int] = []

    def leave(completion: Completion) -> bool:
        asked.append(completion.index)
        raise kind("bad arguments")

    request = engine.submit(prompt_of(9), with_seed(3, validator=leave, max_retries=5), num_samples=2)
    late = engine.submit(prompt_of(9), with_seed(3, validator=leave, max_retries=5, max_tokens=7))
    other = engine.submit(prompt_of(9), with_seed(3, max_tokens=20))
    finished, raised = list[Completion](), list[int]()
    for _ in range(30):
        try:
            finished += engine.step()
        except kind:
            raised.append(len(other.completions[0].token_ids))
    assert raised == [6, 7]  # the step that asked has given the others their tokens
    assert asked == [0, 0] or asked == [1, 0]
    ended = [*request.completions, *late.completions]
    assert [one.error for one in ended] == [f"the validator raised {kind.__name__}: bad arguments"] * 3
    assert finished == [*ended, *other.completions]
    assert outputs([other]) == outputs(engine.generate([prompt_of(9)], with_seed(3, max_tokens=20)))
    assert idle(engine)


def test_an_exit_in_a_call_of_cancel_is_raised_by_the_next_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(_: Completion) -> bool:
        raise SystemExit

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    request, other = engine.submit(prompt_of(9), with_seed(3, validator=leave)), engine.submit(prompt_of(9))
    for _ in range(5):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.delivery, "retries", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.cancel(other)
    assert request.completions[0].finish_reason == "error"
    with pytest.raises(SystemExit):
        engine.run()
    assert engine.step() == request.completions
    assert idle(engine)


def test_a_keyboard_interrupt_in_a_validator_ends_no_request(engine: Engine) -> None:
    interrupts = iter([KeyboardInterrupt, KeyboardInterrupt])

    def validator(_: Completion) -> bool:
        for interrupt in interrupts:
            raise interrupt
        return True

    request = engine.submit(prompt_of(9), with_seed(3, validator=validator))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            engine.run()
    engine.run()
    assert (request.completions[0].finish_reason, len(request.completions[0].token_ids)) == ("length", 6)
    assert idle(engine)


def test_a_request_that_its_validator_cancels_is_cancelled(engine: Engine) -> None:
    def validator(completion: Completion) -> bool:
        engine.cancel(completion.request)
        return False

    (request,) = engine.generate([prompt_of(9)], with_seed(3, validator=validator, max_retries=5))
    assert request.completions[0].finish_reason == "cancelled"
    assert idle(engine)


def test_rejections_are_events(engine: Engine) -> None:
    engine.events = Events()
    (one,) = engine.generate([prompt_of(9)], judged("a", "b", True))[0].completions
    (other,) = engine.generate([prompt_of(9)], judged("c", max_retries=0))[0].completions
    told = [event for event in engine.events.events if event.kind in ("token", "rejected", "finished")]
    mine, last = [event for event in told if not event.request], [event for event in told if event.request]
    tokens = [event.value for event in mine if event.kind == "token"]
    assert tokens == [token for part in (*one.rejections, one) for token in part.token_ids]
    assert [(event.value, event.detail) for event in mine if event.kind == "rejected"] == [(6, "a"), (6, "b")]
    assert [event.value for event in last if event.kind == "token"] == other.token_ids
    assert [event.kind for event in last][-2:] == ["token", "finished"]


def test_rejections_of_candidates_that_are_not_chosen_are_counted(engine: Engine) -> None:
    def rejects_once(completion: Completion) -> bool:
        return bool(completion.rejections)

    params = with_seed(3, validator=rejects_once, max_retries=1, best_of=3)
    (request,) = engine.generate([prompt_of(9)], params)
    assert len(request.completions) == 1
    assert engine.stats().rejected == 3


def test_an_interrupt_behind_the_last_rejection_judges_nothing_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[int] = []

    def rejects(completion: Completion) -> bool:
        judged.append(len(completion.rejections))
        return False

    request, end = engine.submit(prompt_of(9), with_seed(3, validator=rejects, max_retries=1)), Completion.end

    def interrupted(completion: Completion, reason: str, error: str = "") -> None:
        monkeypatch.setattr(Completion, "end", end)
        raise KeyboardInterrupt

    monkeypatch.setattr(Completion, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.run()
    (one,) = request.completions
    assert (judged, len(one.rejections)) == ([0, 1], 2)
    assert one.error.startswith("the validator rejected all 2 outputs")
    assert engine.stats().rejected == 2
    assert idle(engine)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("at_step", [6, pytest.param(5, marks=pytest.mark.slow)])
def test_an_interrupt_loses_no_token_and_repeats_no_retry(
    at_step: int, checkpoint: Callable[[str], Checkpoint]
) -> None:
    """Step 5 ends the first try of both samples; step 6 computes the first token of the second."""

    def begun() -> tuple[Engine, Any]:
        engine = build(checkpoint("llama"), num_frames=60)

        def validator(completion: Completion) -> bool | str:
            return len(completion.rejections) == 2 or f"try {len(completion.rejections)}"

        params = with_seed(3, validator=validator, max_retries=5)
        request = engine.submit(prompt_of(40), params, num_samples=2)
        for _ in range(at_step):
            engine.step()
        return engine, request

    engine, request = begun()
    total = count_instructions(engine.step)
    engine.run()
    expected = outputs([request])
    for at in range(1, total + 1, total // 5):
        engine, request = begun()
        with contextlib.suppress(KeyboardInterrupt):
            Interrupter(at).run(engine.step)
        engine.run()
        assert outputs([request]) == expected
        for one in request.completions:
            assert [rejected.reason for rejected in one.rejections] == ["try 0", "try 1"]
        gc.collect()
        engine.step()
        assert idle(engine)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"validator": "json"}, "validator is 'json'; it must be None or a function of a completion"),
        ({"validator": bool, "max_retries": -1}, "max_retries is -1; it must be an integer from 0"),
        ({"max_retries": 2}, "without a validator"),
        ({"validator": bool, "max_retries": 2}, "temperature 0, which gives the same output again"),
        ({"validator": bool, "num_beams": 2}, "validator is .* with num_beams 2"),
    ],
)
def test_parameters_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(**options)
