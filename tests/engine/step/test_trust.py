"""Trust: no interrupt, no bad request and no second thread loses a token, leaks a frame or stops the other requests."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pagedkv.engine.checkpoint.tokenizer import TextStream
from pagedkv.engine.requests.limits import Limits
from pagedkv.engine.requests.request import Completion
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step import outcome
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import ConcurrentUse, InvalidRequest, QueueFull
from tests.engine.conftest import prompt_of
from tests.engine.step.test_engine import build, idle, outputs
from tests.interrupts import Interrupter, count_instructions

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine.conftest import Checkpoint

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


@pytest.fixture
def undisturbed(checkpoint: Callable[[str], Checkpoint]) -> list[Any]:
    engine = build(checkpoint("llama"))
    requests = submitted(engine)
    engine.run()
    return requests


def assert_equal(got: list[Any], want: list[Any], engine: Engine) -> None:
    assert outputs(got) == outputs(want)
    assert texts(got) == texts(want)
    assert [c.finish_reason for r in got for c in r.completions] == [
        c.finish_reason for r in want for c in r.completions
    ]
    for completion, wanted in (
        (c, d) for r, q in zip(got, want, strict=True) for c, d in zip(r.completions, q.completions, strict=True)
    ):
        assert len(completion.logprobs) == len(wanted.logprobs)
        assert [l.logprob for l in completion.logprobs] == pytest.approx([l.logprob for l in wanted.logprobs], abs=1e-3)
    gc.collect()
    engine.step()
    assert idle(engine)


# -- interrupts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["measure", "report", "take", "read", "_restart", "fork", "push", "forward"])
def test_a_step_interrupted_anywhere_loses_no_tokens(
    place: str, undisturbed: list[Any], checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some calls of `place` raise before they do anything (`push` and `forward`: after they have done their work)."""
    engine = build(checkpoint("llama"), num_frames=13)
    owners: dict[str, Any] = {
        "measure": engine.meter,
        **dict.fromkeys(("report", "take", "read"), engine.delivery),
        "_restart": engine,
        "fork": engine.scheduler,
        "push": TextStream,
        "forward": engine.decoder,
    }
    owner, error = owners[place], RuntimeError if place == "forward" else KeyboardInterrupt
    real, dice, interrupts = getattr(owner, place), random.Random(1), 0

    def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal interrupts
        if dice.random() < (0.5 if place == "_restart" else 0.2):
            interrupts += 1
            if place in ("push", "forward"):
                real(*args, **options)
            raise error
        return real(*args, **options)

    monkeypatch.setattr(owner, place, interrupted)
    if place == "_restart":
        monkeypatch.setattr(engine.meter, "measure", after(engine.meter.measure, dice))
    got = submitted(engine)
    while engine.has_work:
        with contextlib.suppress(error):
            engine.step()
    assert interrupts >= 1
    monkeypatch.undo()
    assert_equal(got, undisturbed, engine)


def after(real: Callable[..., None], dice: random.Random) -> Callable[..., None]:
    """Return a function that sometimes raises after it has done its work."""

    def call(*args: Any) -> None:
        real(*args)
        if dice.random() < 0.3:
            raise KeyboardInterrupt

    return call


@pytest.mark.parametrize("step", [0, 1, 3], ids=["prefill", "decode", "later"])
def test_an_interrupt_at_some_instructions_of_a_step_loses_nothing(
    step: int, undisturbed: list[Any], checkpoint: Callable[[str], Checkpoint]
) -> None:
    def begun() -> tuple[Engine, list[Any]]:
        engine = build(checkpoint("llama"), num_frames=60)
        requests = submitted(engine)
        for _ in range(step):
            engine.step()
        return engine, requests

    total = count_instructions(begun()[0].step)
    for at in range(1, total + 1, total // 4):
        engine, requests = begun()
        interrupt_and_compare(engine, requests, undisturbed, at)


def interrupt_and_compare(engine: Engine, requests: list[Any], undisturbed: list[Any], at: int) -> None:
    where = "no instruction"
    try:
        Interrupter(at).run(engine.step)
    except KeyboardInterrupt as why:
        where = str(why)
    try:
        engine.run()
        assert_equal(requests, undisturbed, engine)
    except BaseException as error:
        raise AssertionError(f"after an interrupt at {where}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_an_interrupt_at_any_instruction_of_a_step_loses_nothing(
    part: int, checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
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
    undisturbed: list[Any], checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(checkpoint("llama"), num_frames=60)
    got, real, kept = submitted(engine), engine.cache.abort, []

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.cache, "abort", fail)
    monkeypatch.setattr(engine.cache, "commit", fail)
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


def test_the_end_that_a_signal_handler_finds_or_makes_stays(checkpoint: Callable[[str], Checkpoint]) -> None:
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


def test_the_cache_recovers_until_no_handle_is_lost_and_no_longer(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, recovered = build(checkpoint("llama")), list[int]()
    submitted(engine)
    engine.step()
    real = engine.cache.recover
    monkeypatch.setattr(engine.cache, "recover", lambda: (recovered.append(1), real())[1])
    monkeypatch.setattr(engine.cache, "commit", lambda *_: next(iter(())))
    with pytest.raises(StopIteration):
        engine.step()
    monkeypatch.delattr(engine.cache, "commit")
    gc.collect()
    engine.step()
    engine.step()
    assert len(recovered) == 1
    engine.run()
    assert idle(engine)


# -- one request -------------------------------------------------------------------------------------------------------


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
        ({"prompt": [10**6]}, "token id 1000000 is outside the vocabulary"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
    ],
)
def test_everything_about_a_request_is_checked_when_it_is_submitted(
    options: dict[str, Any], text: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    engine = build(checkpoint("llama"))
    with pytest.raises(InvalidRequest, match=text.replace("(", r"\(")):
        engine.submit(**{"prompt": [1, 2], **options})
    assert not engine.has_work


def test_prompts_may_be_rows_of_integers_of_any_library(checkpoint: Callable[[str], Checkpoint]) -> None:
    engine = build(checkpoint("llama"))
    ids = torch.tensor([5, 6, 7])
    requests = [engine.submit(prompt) for prompt in (ids, ids.numpy(), (5, 6, 7), range(5, 8), "w5 w6 w7")]
    assert [request.prompt_ids for request in requests] == [[5, 6, 7]] * 5


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("step", [0, 2])
def test_a_request_without_usable_logits_ends_alone(
    broken: float,
    step: int,
    undisturbed: list[Any],
    checkpoint: Callable[[str], Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
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
        space = engine.cache.open([7] * 30)
        assert len(space) == 0  # its KV is not found by others
        space.release()
    assert_equal(got, undisturbed, engine)


def test_a_listener_that_raises_ends_its_own_request(
    undisturbed: list[Any], checkpoint: Callable[[str], Checkpoint]
) -> None:
    engine = build(checkpoint("llama"))
    heard: dict[int, str] = {}

    def fail(completion: Completion, text: str) -> None:
        if len(completion.token_ids) == 2:
            raise RuntimeError("no such terminal")

    def listen(completion: Completion, text: str) -> None:
        heard[id(completion)] = heard.get(id(completion), "") + text

    failing = engine.submit(prompt_of(12), SamplingParams(max_tokens=5), num_samples=2, on_text=fail)
    got = submitted(engine, on_text=listen)
    engine.run()
    ends = [(c.finish_reason, c.error) for c in failing.completions]
    assert ends == [("error", "the listener raised RuntimeError: no such terminal")] * 2
    assert heard == {id(c): c.text for r in got for c in r.completions}
    assert_equal(got, undisturbed, engine)


def test_a_listener_hears_each_piece_once_although_steps_are_interrupted(
    undisturbed: list[Any], checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, dice = build(checkpoint("llama"), num_frames=60), random.Random(2)
    heard: dict[int, list[str]] = {}
    got = submitted(engine, on_text=lambda completion, text: heard.setdefault(id(completion), []).append(text))
    monkeypatch.setattr(engine.meter, "measure", after(engine.meter.measure, dice))
    monkeypatch.setattr(outcome._Outcome, "deliver", after(outcome._Outcome.deliver, dice))
    while engine.has_work:
        with contextlib.suppress(KeyboardInterrupt):
            engine.step()
    monkeypatch.undo()
    assert ["".join(heard[id(c)]) for r in got for c in r.completions] == texts(undisturbed)
    assert_equal(got, undisturbed, engine)


def test_no_prompt_finds_what_a_request_computed_that_was_cancelled_meanwhile(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
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
    space = engine.cache.open([7] * 30)
    assert len(space) == 0
    space.release()
    assert idle(engine)


def test_a_prompt_above_its_tenants_quota_ends_alone(
    undisturbed: list[Any], checkpoint: Callable[[str], Checkpoint]
) -> None:
    engine = build(checkpoint("llama"))
    engine.cache.set_quota(b"small", hard=1)
    doomed, got = engine.submit(prompt_of(40), tenant=b"small"), submitted(engine)
    engine.run()
    assert doomed.completions[0].finish_reason == "error"
    assert "small" in doomed.completions[0].error
    assert_equal(got, undisturbed, engine)


def test_an_interrupted_cancel_loses_no_other_request(
    undisturbed: list[Any], checkpoint: Callable[[str], Checkpoint]
) -> None:
    def begun() -> tuple[Engine, Any, list[Any]]:
        engine = build(checkpoint("llama"), num_frames=60)
        doomed = engine.submit(prompt_of(30), PARAMS)
        engine.step()
        return engine, doomed, submitted(engine)

    engine, doomed, _ = begun()
    total = count_instructions(lambda: engine.cancel(doomed))
    for at in range(1, total + 1, total // 4):
        engine, doomed, got = begun()
        with contextlib.suppress(KeyboardInterrupt):
            Interrupter(at).run(lambda engine=engine, doomed=doomed: engine.cancel(doomed))
        engine.run()
        assert doomed.finished
        assert_equal(got, undisturbed, engine)


def test_a_request_ends_at_its_deadline(undisturbed: list[Any], checkpoint: Callable[[str], Checkpoint]) -> None:
    engine = build(checkpoint("llama"))
    hasty = engine.submit(prompt_of(30), SamplingParams(max_tokens=200), timeout=0.05, num_samples=2)
    got = submitted(engine, timeout=60)
    engine.step()
    time.sleep(0.06)
    engine.run()
    assert [c.finish_reason for c in hasty.completions] == ["error"] * 2
    assert hasty.completions[0].error == "the request was not finished 0.05 s after it came"
    assert_equal(got, undisturbed, engine)


def test_load_beyond_the_limit_is_refused(checkpoint: Callable[[str], Checkpoint]) -> None:
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


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_submit_no_more_than_may_wait(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, refused = build(checkpoint("llama"), limits=Limits(max_waiting=3)), list[QueueFull]()
    real = engine._check_queue

    def check_slowly() -> None:
        real()
        time.sleep(0.005)

    def submit() -> None:
        try:
            engine.submit(prompt_of(9), PARAMS)
        except QueueFull as error:
            refused.append(error)

    monkeypatch.setattr(engine, "_check_queue", check_slowly)
    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 5
    engine.run()
    assert idle(engine)


@pytest.mark.parametrize("each", [60, pytest.param(5000, marks=pytest.mark.slow)])
def test_threads_submit_cancel_and_step(each: int, checkpoint: Callable[[str], Checkpoint]) -> None:
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
    assert not engine._requests
