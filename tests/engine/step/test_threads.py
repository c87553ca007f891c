"""Threads: one thread steps, and others submit, cancel and ask for figures at any moment. None makes another fail."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from tests.engine.conftest import Checkpoints, prompt_of
from tests.engine.step.test_engine import build, idle


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
