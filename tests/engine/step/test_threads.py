"""Threads: one thread steps, and others submit, cancel and ask for figures at any moment. None makes another fail."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from tests.engine.conftest import Checkpoint, prompt_of
from tests.engine.step.test_engine import build, idle

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_step_waits_while_another_thread_cancels(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cancel` gives frames back in its own thread, slowly here; the steps of others begin meanwhile and never fail."""
    engine, took_in, begun = build(checkpoint("llama")), Engine._take_in_now, threading.Event()

    def take_in_slowly(self: Engine) -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            time.sleep(0.05)
        took_in(self)

    monkeypatch.setattr(Engine, "_take_in_now", take_in_slowly)
    for call in (engine.step, engine.run, lambda: engine.generate([prompt_of(3)], SamplingParams(max_tokens=2))):
        doomed, kept = (engine.submit(prompt_of(9), SamplingParams(max_tokens=3)) for _ in range(2))
        engine.step()
        begun.clear()
        thread = threading.Thread(target=engine.cancel, args=(doomed,))
        thread.start()
        assert begun.wait(10)
        call()
        thread.join()
        engine.run()
        assert doomed.completions[0].finish_reason == "cancelled"
        assert len(kept.completions[0].token_ids) == 3
    assert idle(engine)


def test_a_step_takes_in_the_requests_that_waited_when_it_began(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that submits faster than a step takes in kept the step from its end."""
    engine = build(checkpoint("llama"))
    begin = engine.delivery.begin

    def submit_another(completion: Any) -> Any:
        assert len(engine._requests) < 9, "the step takes in what came after its beginning"
        engine.submit(prompt_of(3))
        return begin(completion)

    monkeypatch.setattr(engine.delivery, "begin", submit_another)
    engine.submit(prompt_of(3))
    engine.step()
    assert len(engine._inbox) == 1


def test_a_cancel_waits_for_no_step(checkpoint: Callable[[str], Checkpoint]) -> None:
    engine, returned = build(checkpoint("llama")), []

    def cancel_elsewhere(*_: Any) -> None:
        thread = threading.Thread(target=engine.cancel, args=(doomed,))
        thread.start()
        thread.join(10)
        returned.append(not thread.is_alive())

    doomed = engine.submit(prompt_of(9))
    engine.submit(prompt_of(9), SamplingParams(max_tokens=2), on_text=cancel_elsewhere)
    engine.run()
    assert returned
    assert all(returned)
    assert doomed.completions[0].finish_reason == "cancelled"
    assert idle(engine)


def test_frames_come_back_at_once_when_no_thread_steps(checkpoint: Callable[[str], Checkpoint]) -> None:
    engine = build(checkpoint("llama"))
    request = engine.submit(prompt_of(9))
    engine.step()
    thread = threading.Thread(target=engine.cancel, args=(request,))
    thread.start()
    thread.join()
    assert engine.cache.stats().spaces == 0


@pytest.mark.parametrize("seconds", [0.5, pytest.param(20, marks=pytest.mark.slow)])
def test_other_threads_never_make_a_step_fail(seconds: float, checkpoint: Callable[[str], Checkpoint]) -> None:
    engine, problems, stop = build(checkpoint("llama")), [], threading.Event()

    def client(number: int) -> None:
        try:
            while not stop.is_set():
                request = engine.submit(prompt_of(3 + number), SamplingParams(max_tokens=20))
                engine.stats()
                engine.cancel(request)
        except BaseException as error:
            problems.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    threads = [threading.Thread(target=client, args=(number,)) for number in range(2)]
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            engine.step()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert problems == []
    engine.run()
    assert idle(engine)
