"""Trust: no interrupt, no bad request and no second thread loses a token, leaks a frame or stops the other requests.

One thread steps, and others submit, cancel and ask for figures at any moment. None makes another fail.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from pagedkv.engine.checkpoint.tokenizer import TextStream
from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.requests.request import Completion
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import ConcurrentUse, InvalidRequest, QueueFull
from tests.engine.conftest import Checkpoints, prompt_of
from tests.engine.drafts.test_speculation import draft_model, is_empty
from tests.engine.step.test_engine import build, idle, outputs
from tests.interrupts import Interrupter, count_instructions, interrupted

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
PARAMS = SamplingParams(max_tokens=6, temperature=1.0, seed=3, frequency_penalty=0.7, logit_bias={5: 2.0}, logprobs=2)


def submitted(engine: Engine, **options: Any) -> list[Any]:
    """Submit a family of samples, a short prompt and one that begins as the first does."""
    return [
        engine.submit(prompt_of(40), PARAMS, num_samples=3, **options),
        engine.submit(prompt_of(9), PARAMS, **options),
        engine.submit(prompt_of(40)[:20], PARAMS, **options),
    ]


def texts(requests: list[Any]) -> list[str]:
    return [completion.text for request in requests for completion in request.completions]


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Checkpoints) -> list[Any]:
    engine = build(checkpoint("llama"))
    requests = submitted(engine)
    engine.run()
    return requests


def assert_equal(got: list[Any], want: list[Any], engine: Engine) -> None:
    assert outputs(got) == outputs(want)
    assert texts(got) == texts(want)
    found, right = (
        [completion for request in requests for completion in request.completions] for requests in (got, want)
    )
    for completion, wanted in zip(found, right, strict=True):
        assert completion.finish_reason == wanted.finish_reason
        assert [l.logprob for l in completion.logprobs] == pytest.approx([l.logprob for l in wanted.logprobs], abs=1e-3)
    gc.collect()
    engine.step()
    assert idle(engine)


CALLS = (1, 2, 5, 12, 30, 80, 200)
"""The calls of a place that are interrupted: ever fewer, so that a restart that makes many calls ends, too."""
LONG, BEAMS = replace(PARAMS, max_tokens=24), SamplingParams(max_tokens=16, num_beams=3)


def asked(engine: Engine, **options: Any) -> list[Any]:
    """Submit a family of samples, a short prompt and a beam search, which go on for some steps after all interrupts."""
    samples = engine.submit(prompt_of(40), LONG, num_samples=3, **options)
    search = engine.submit(prompt_of(33), BEAMS, num_samples=2, **options)
    return [samples, search, engine.submit(prompt_of(9), LONG, **options)]


def interrupting(real: Callable[..., Any], place: str, calls: Counter[str]) -> Callable[..., Any]:
    """Return a function some calls of which are interrupted: by turns before they begin and after they have ended."""

    def call(*args: Any, **options: Any) -> Any:
        calls[place] += 1
        turn = CALLS.index(calls[place]) if calls[place] in CALLS else -1
        if turn % 2 == 0:
            raise KeyboardInterrupt
        result = real(*args, **options)
        if turn > 0:
            raise KeyboardInterrupt
        return result

    return call


@pytest.mark.parametrize("drafts", [False, True])
def test_a_step_interrupted_anywhere_loses_no_tokens(
    drafts: bool, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples and beams, with drafts, or some of them preempted. Each listener hears each piece once."""
    plain = build(checkpoint("llama"))
    want = asked(plain)
    plain.run()
    drafter = draft_model(checkpoint("llama"), num_tokens=2) if drafts else None
    engine = build(checkpoint("llama"), num_frames=7, drafter=drafter)
    places: list[tuple[Any, str]] = [
        (engine, "_restart"),
        (engine.cache, "commit"),
        (engine.cache, "reorder"),
        (engine.decoder, "forward"),
        *((engine.delivery, place) for place in ("report", "take", "read", "finish_search")),
        (engine.meter, "measure"),
        *((engine.scheduler, place) for place in ("fork", "follow")),
        (TextStream, "push"),
        (drafter, "propose") if drafter else (engine.scheduler, "preempt"),
    ]
    calls, heard = Counter[str](), dict[Completion, str]()
    for owner, place in places:
        monkeypatch.setattr(owner, place, interrupting(getattr(owner, place), place, calls))

    def hear(completion: Completion, text: str) -> None:
        heard[completion] = heard.get(completion, "") + text

    got = asked(engine, on_text=hear)
    while engine.has_work:
        with contextlib.suppress(KeyboardInterrupt):
            engine.step()
    monkeypatch.undo()
    assert calls.keys() == {place for _, place in places}
    assert [heard[completion] for request in got for completion in request.completions] == texts(want)
    assert_equal(got, want, engine)
    if drafter is not None:
        assert is_empty(drafter)


@pytest.mark.parametrize("step", [0, 1], ids=["prefill", "decode"])
def test_an_interrupt_at_some_instructions_of_a_step_loses_nothing(
    step: int, undisturbed: list[Any], checkpoint: Checkpoints
) -> None:
    def begun() -> tuple[Engine, list[Any]]:
        engine = build(checkpoint("llama"), num_frames=60)
        requests = submitted(engine)
        for _ in range(step):
            engine.step()
        return engine, requests

    total = count_instructions(begun()[0].step)
    for at in range(total // 4, total + 1, total // 3):
        engine, requests = begun()
        interrupt_and_compare(engine, requests, undisturbed, at)


def interrupt_and_compare(engine: Engine, requests: list[Any], undisturbed: list[Any], at: int) -> None:
    where = interrupted(at, engine.step)
    try:
        engine.run()
        assert_equal(requests, undisturbed, engine)
    except BaseException as error:
        raise AssertionError(f"after an interrupt at {where}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_an_interrupt_at_any_instruction_of_a_step_loses_nothing(
    part: int, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step in which the prompt of a family of two samples ends: it forks, delivers and finishes one of them."""
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")  # the checks of level 3 are most of the instructions, and only read

    def begun() -> tuple[Engine, list[Any]]:
        engine = build(checkpoint("llama"), num_frames=60)
        params = SamplingParams(max_tokens=2, temperature=1.0, seed=3)
        return engine, [engine.submit(prompt_of(18), params, num_samples=2)]

    whole, undisturbed = begun()
    whole.run()
    total = count_instructions(begun()[0].step)
    for at in range(1 + part, total + 1, 16):  # the parts may run in parallel
        interrupt_and_compare(*begun(), undisturbed, at)


def test_an_engine_goes_on_while_a_traceback_holds_its_handles(
    undisturbed: list[Any], checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(checkpoint("llama"), num_frames=60)
    got, real, kept = submitted(engine), engine.cache.abort, []

    for call in ("abort", "commit"):
        monkeypatch.setattr(engine.cache, call, Mock(side_effect=KeyboardInterrupt))
    try:
        engine.step()
    except KeyboardInterrupt as error:
        kept.append(error)
    monkeypatch.undo()
    assert engine.cache.abort == real
    engine.run()
    assert outputs(got) == outputs(undisturbed)
    assert not idle(engine)  # the traceback holds a plan
    kept.clear()
    assert_equal(got, undisturbed, engine)


def test_the_end_that_a_signal_handler_finds_or_makes_stays(checkpoint: Checkpoints) -> None:
    """A handler cancels at each instruction of another end."""
    request, found = build(checkpoint("llama")).submit([1]), list[tuple[str, str]]()

    class Signal(Interrupter):
        def _step(self, frame: Any, event: str, arg: Any) -> Any:
            if event == "opcode":
                self.count += 1
                if self.count == self.at:
                    completion.end("cancelled")
                    found.append((completion.finish_reason, completion.error))
            return self._step

    total = count_instructions(partial(Completion(request, 0).end, "error", "late"))
    for at in range(1, total + 1):
        completion = Completion(request, 0)
        Signal(at).run(partial(completion.end, "error", "late"))
        assert found.pop() == (completion.finish_reason, completion.error)
        assert (completion.error == "late") == (completion.finish_reason == "error")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tenant": "acme"}, "tenant is 'acme'; a tenant's name is bytes"),
        ({"tenant": None}, "tenant is None"),
        ({"num_samples": 1.5}, "num_samples is 1.5"),
        ({"num_samples": "2"}, "num_samples is '2'"),
        ({"num_samples": True}, "num_samples is True"),
        ({"num_samples": 10**6}, "num_samples is 1000000"),
        ({"on_text": 5}, "on_text is 5; give a function"),
        ({"timeout": "soon"}, "timeout is 'soon'"),
        ({"timeout": 0}, "timeout is 0 s"),
        ({"params": {"max_tokens": 3}}, "give SamplingParams, or None"),
        ({"prompt": [1.7, 2.2]}, "float64; give one row of integers"),
        ({"prompt": ["5"]}, "give one row of integers"),
        ({"prompt": b"hello"}, "the prompt is bytes; give text"),
        ({"prompt": memoryview(b"hello")}, "the prompt is memoryview; give text"),
        ({"prompt": [1, True]}, "the prompt is list; give text"),
        ({"prompt": [1, np.bool_(True)]}, "the prompt is list; give text"),
        ({"prompt": torch.tensor([1.0], requires_grad=True)}, "are not a row of numbers"),
        ({"prompt": torch.empty(2, dtype=torch.int64, device="meta")}, "are not a row of numbers"),
        ({"prompt": [[1], [2]]}, "give one row of integers"),
        ({"prompt": [[1], [2, 3]]}, "are not a row of numbers"),
        ({"prompt": None}, "give one row of integers"),
        ({"prompt": (n for n in (1, 2))}, "give one row of integers"),
        ({"prompt": [2**40]}, "does not fit int32"),
        ({"prompt": [97]}, "token id 97 is outside the vocabulary"),
        ({"prompt": ""}, "the prompt is empty"),
    ],
)
def test_everything_about_a_request_is_checked_when_it_is_submitted(
    options: dict[str, Any], text: str, checkpoint: Checkpoints
) -> None:
    engine = build(checkpoint("llama"))
    with pytest.raises(InvalidRequest, match=text.replace("(", r"\(")):
        engine.submit(**{"prompt": [1, 2], **options})
    assert not engine.has_work


def test_prompts_may_be_rows_of_integers_of_any_library(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"))
    ids = torch.tensor([5, 6, 7])
    requests = [engine.submit(prompt) for prompt in (ids, ids.numpy(), (5, 6, 7), range(5, 8), "w5 w6 w7")]
    assert [request.prompt_ids for request in requests] == [[5, 6, 7]] * 5


@pytest.mark.parametrize(("broken", "step"), [(float("nan"), 0), (float("inf"), 2), (-float("inf"), 2)])
def test_a_request_without_usable_logits_ends_alone(
    broken: float, step: int, undisturbed: list[Any], checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(checkpoint("llama"))
    doomed = engine.submit([7] * 30, SamplingParams(max_tokens=9), num_samples=2)
    got, real = submitted(engine), engine.decoder.forward
    for _ in range(step):
        engine.step()

    def forward(*args: Any, **options: Any) -> Any:
        logits = real(*args, **options).clone()
        logits[: 2 if step else 1] = broken  # it is the oldest: its rows are the first
        return logits

    monkeypatch.setattr(engine.decoder, "forward", forward)
    finished = engine.step()
    monkeypatch.undo()
    assert finished == doomed.completions
    assert [(c.finish_reason, len(c.token_ids)) for c in doomed.completions] == [("error", step)] * 2
    assert "hold NaN, +inf or only -inf" in doomed.completions[0].error
    engine.run()
    if not step:
        assert engine.cache.lookup([7] * 30) == 0  # its KV is not found by others
    assert_equal(got, undisturbed, engine)


def test_no_prompt_finds_what_a_request_computed_that_was_cancelled_meanwhile(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits are not finite, but it has ended as cancelled before they could make it an error."""
    engine = build(checkpoint("llama"))
    request, real = engine.submit([7] * 30), engine.decoder.forward

    def forward(*args: Any, **options: Any) -> Any:
        engine.cancel(request)
        return real(*args, **options) * torch.nan

    monkeypatch.setattr(engine.decoder, "forward", forward)
    engine.step()
    assert request.completions[0].finish_reason == "cancelled"
    assert engine.cache.lookup([7] * 30) == 0
    assert idle(engine)


def test_a_prompt_above_its_tenants_quota_ends_alone(undisturbed: list[Any], checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"))
    engine.cache.set_quota(b"small", hard=1)
    doomed, got = engine.submit(prompt_of(40), tenant=b"small"), submitted(engine)
    engine.run()
    assert doomed.completions[0].finish_reason == "error"
    assert "small" in doomed.completions[0].error
    assert_equal(got, undisturbed, engine)


def test_an_interrupted_cancel_loses_no_other_request(undisturbed: list[Any], checkpoint: Checkpoints) -> None:
    def begun() -> tuple[Engine, Any, list[Any]]:
        engine = build(checkpoint("llama"), num_frames=60)
        doomed = engine.submit(prompt_of(30), PARAMS)
        engine.step()
        return engine, doomed, submitted(engine)

    engine, doomed, _ = begun()
    total = count_instructions(partial(engine.cancel, doomed))
    for at in (total // 3, total // 2):
        engine, doomed, got = begun()
        interrupted(at, partial(engine.cancel, doomed))
        engine.run()
        assert doomed.finished
        assert_equal(got, undisturbed, engine)


def test_a_request_ends_at_its_deadline(undisturbed: list[Any], checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"))
    hasty = engine.submit(prompt_of(30), SamplingParams(max_tokens=200), timeout=1000, num_samples=2)
    got = submitted(engine, timeout=60)
    engine.step()
    hasty.submitted_at -= 1000
    hasty.deadline -= 1000
    engine.run()
    assert [c.finish_reason for c in hasty.completions] == ["error"] * 2
    assert hasty.completions[0].error == "the request was not finished 1000 s after it came"
    assert_equal(got, undisturbed, engine)


def test_load_beyond_the_limit_is_refused(checkpoint: Checkpoints) -> None:
    engine = build(checkpoint("llama"), limits=Limits(max_waiting=2, max_sequences=1))
    requests = [engine.submit(prompt_of(9), PARAMS) for _ in range(2)]
    with pytest.raises(QueueFull, match=r"2 requests wait already and Limits.max_waiting is 2") as why:
        engine.submit(prompt_of(9), PARAMS)
    assert (why.value.waiting, why.value.max_waiting) == (2, 2)
    engine.step()
    engine.scheduler.preempt(engine.scheduler.running[-1])  # it waits, but not for its first step
    requests.append(engine.submit(prompt_of(9), PARAMS))
    engine.run()
    assert all(request.finished for request in requests)
    for wrong in ({"max_waiting": 0}, {"max_sequences": None}, {"prefill_chunk": 2.5}):
        with pytest.raises(InvalidRequest, match=f"Limits.{next(iter(wrong))} is"):
            Limits(**wrong)


@pytest.mark.parametrize("at", [1, 5], ids=["a piece", "the end"])
def test_a_listener_that_raises_stop_iteration_ends_its_own_request(at: int, checkpoint: Checkpoints) -> None:
    """The iterators of Python take a StopIteration for their end."""
    engine = build(checkpoint("llama"))

    def fail(completion: Completion, text: str) -> None:
        if len(completion.token_ids) >= at:
            next(iter(()))

    params = SamplingParams(max_tokens=5, ignore_eos=True)
    failing, other = engine.submit(prompt_of(12), params, on_text=fail), engine.submit(prompt_of(12), params)
    for _ in range(9):
        engine.step()
    assert idle(engine)
    (one,) = failing.completions
    assert len(one.token_ids) == at
    assert one.finish_reason == ("error" if at < 5 else "length")
    assert one.error == "the listener raised StopIteration: " * (at < 5)
    assert len(other.completions[0].token_ids) == 5


@pytest.mark.parametrize("interrupt", [SystemExit, KeyboardInterrupt])
def test_a_listener_that_is_interrupted_at_each_call_is_told_of_its_end_twice(
    interrupt: type[BaseException], checkpoint: Checkpoints
) -> None:
    engine, ends = build(checkpoint("llama")), list[str]()

    def leave(completion: Completion, text: str) -> None:
        ends.append(completion.finish_reason)
        raise interrupt

    params = SamplingParams(max_tokens=3, ignore_eos=True)
    leaving, other = engine.submit(prompt_of(12), params, on_text=leave), engine.submit(prompt_of(12), params)
    finished, raised = list[object](), 0
    for _ in range(12):
        try:
            finished += engine.step()
        except interrupt:
            raised += 1
    assert idle(engine)
    assert finished == leaving.completions + other.completions
    assert ends == ["", "", "length", "length"]
    assert raised == len(ends)
    assert [len(one.token_ids) for one in leaving.completions + other.completions] == [3, 3]


@pytest.mark.parametrize("each", [30, pytest.param(5000, marks=pytest.mark.slow)])
def test_threads_submit_cancel_and_step(each: int, checkpoint: Checkpoints) -> None:
    """Four threads submit and cancel, and step when they can; none of their requests is lost."""
    engine, lock = build(checkpoint("llama"), num_frames=400), threading.Lock()
    requests: list[Any] = []
    problems: list[BaseException] = []

    def work(number: int) -> None:
        dice, mine = random.Random(number), []
        try:
            for n in range(each):
                params = SamplingParams(max_tokens=dice.randint(1, 3))
                mine.append(engine.submit(prompt_of(dice.randint(1, 20)), params, num_samples=dice.choice((1, 1, 2))))
                if dice.random() < 0.2:
                    engine.cancel(dice.choice(mine))
                if n % 20 == 0:
                    try:
                        engine.step()
                    except ConcurrentUse:
                        continue
            with lock:
                requests.extend(mine)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        try:
            engine.step()
        except ConcurrentUse:
            time.sleep(0)
    for thread in threads:
        thread.join()
    assert problems == []
    engine.run()
    assert len(requests) == 4 * each
    assert all(request.finished for request in requests)
    reasons = {c.finish_reason for r in requests for c in r.completions}
    assert reasons <= {"length", "cancelled"}
    assert idle(engine)


def test_a_step_waits_while_another_thread_cancels(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cancel` gives frames back in its own thread, slowly here; the steps of others begin meanwhile and never fail."""
    engine, took_in, begun = build(checkpoint("llama")), Engine._take_in_now, threading.Event()

    def take_in_slowly(self: Engine) -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            time.sleep(0.05)
        took_in(self)

    monkeypatch.setattr(Engine, "_take_in_now", take_in_slowly)
    doomed, kept = (engine.submit(prompt_of(9), SamplingParams(max_tokens=3)) for _ in range(2))
    engine.step()
    thread = threading.Thread(target=engine.cancel, args=(doomed,))
    thread.start()
    assert begun.wait(60)
    engine.run()
    thread.join()
    engine.run()
    assert doomed.completions[0].finish_reason == "cancelled"
    assert len(kept.completions[0].token_ids) == 3
    assert idle(engine)


def test_a_step_takes_in_the_requests_that_waited_when_it_began(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that submits faster than a step takes in kept the step from its end."""
    engine = build(checkpoint("llama"))
    begin, begun = engine.delivery.begin, list[Any]()

    def submit_another(completion: Any) -> Any:
        begun.append(completion)
        assert len(begun) < 9, "the step takes in what came after its beginning"
        engine.submit(prompt_of(3))
        return begin(completion)

    monkeypatch.setattr(engine.delivery, "begin", submit_another)
    engine.submit(prompt_of(3))
    engine.step()
    assert engine.stats().waiting == len(begun) == 1


def test_a_cancel_waits_for_no_step(checkpoint: Checkpoints) -> None:
    engine, returned = build(checkpoint("llama")), []

    def cancel_elsewhere(*_: Any) -> None:
        thread = threading.Thread(target=engine.cancel, args=(doomed,))
        thread.start()
        thread.join(60)
        returned.append(not thread.is_alive())

    doomed = engine.submit(prompt_of(9))
    engine.submit(prompt_of(9), SamplingParams(max_tokens=2), on_text=cancel_elsewhere)
    engine.run()
    assert returned
    assert all(returned)
    assert doomed.completions[0].finish_reason == "cancelled"
    assert idle(engine)
