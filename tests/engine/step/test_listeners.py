"""Listeners: one that fails or is interrupted costs other requests no token, and the caller of `step` no end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pagedkv.engine.sampling.params import SamplingParams
from tests.engine.conftest import prompt_of
from tests.engine.step.test_engine import build, idle

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedkv.engine.requests.request import Completion
    from tests.engine.conftest import Checkpoint


@pytest.mark.parametrize("at", [1, 5], ids=["a piece", "the end"])
def test_a_listener_that_raises_stop_iteration_ends_its_own_request(
    at: int, checkpoint: Callable[[str], Checkpoint]
) -> None:
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
    assert len(other.completions[0].token_ids) == 5


def test_an_interrupted_listener_costs_no_caller_an_end(checkpoint: Callable[[str], Checkpoint]) -> None:
    """Three completions end in a step, and the listener of the second is interrupted at its end."""
    engine, interrupts = build(checkpoint("llama")), iter([KeyboardInterrupt])

    def listen(completion: Completion, text: str) -> None:
        if completion.finish_reason and completion.index == 1:
            for interrupt in interrupts:
                raise interrupt

    request = engine.submit(prompt_of(9), SamplingParams(max_tokens=2), num_samples=3, on_text=listen)
    assert engine.step() == []
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.step() == request.completions
    assert engine.step() == []
    assert idle(engine)


@pytest.mark.parametrize("interrupt", [SystemExit, KeyboardInterrupt])
def test_a_listener_that_is_interrupted_at_each_call_is_told_of_its_end_twice(
    interrupt: type[BaseException], checkpoint: Callable[[str], Checkpoint]
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
