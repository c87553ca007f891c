"""The mover: nothing that its owner does, and no interrupt of it, stops the threads."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

import pagedkv.tiers.mover
from pagedkv.tiers.mover import Mover, Task
from tests.interrupts import count_instructions, interrupted


def _task(
    pages: int, ran: list[int] | None = None, gate: threading.Event | None = None, *, urgent: bool,
    cancelled: bool = False,
) -> Task:  # fmt: skip
    def run() -> None:
        if gate is not None:
            gate.wait(300)
        if ran is not None:
            ran.append(pages)

    return Task(run, pages, pages, urgent, lambda: cancelled)


@pytest.mark.parametrize(
    ("tasks", "order"),
    [
        ([(2, False, False), (4, False, False), (8, True, False), (16, True, False)], [8, 16, 2, 4]),
        ([(2, True, False), (4, True, True), (8, True, False), (16, True, True)], [4, 16, 2, 8]),
    ],
    ids=["loads before stores", "cancelled before others"],
)
def test_tasks_run_in_their_order_and_are_counted_until_they_end(
    tasks: list[tuple[int, bool, bool]], order: list[int]
) -> None:
    mover, gate, ran = Mover("test", 1), threading.Event(), list[int]()
    mover.put(_task(1, ran, gate, urgent=False))
    while not mover._running:
        time.sleep(0.001)
    for pages, urgent, cancelled in tasks:
        mover.put(_task(pages, ran, urgent=urgent, cancelled=cancelled))
    assert mover.num_pages == 31
    assert not mover.drain(0.01)
    gate.set()
    assert mover.drain(300)
    assert (ran, mover.num_pages) == ([1, *order], 0)
    assert mover.close(300)


@pytest.mark.parametrize("call", ["put", "drain"])
def test_an_interrupted_owner_stops_no_thread(call: str) -> None:
    """At each instruction of a call: the pages that were queued are counted and moved, and the next task runs."""

    def work() -> None:
        if call == "put":
            mover.put(_task(3, ran, urgent=True))
        else:
            mover.drain(300)

    mover, ran = Mover("test", 2), list[int]()
    for at in range(1, count_instructions(work) + 1):
        interrupted(at, work)
        for is_next in (False, True):
            if is_next:
                mover.put(_task(5, ran, urgent=False))
            deadline = time.monotonic() + 60
            while mover.num_pages:
                assert time.monotonic() < deadline, f"instruction {at}"
        assert ran.pop() == 5
    assert mover.close(300)


@pytest.mark.parametrize("finish", [True, False])
def test_a_close_runs_what_was_queued_or_drops_it(finish: bool) -> None:
    mover, gate, ran = Mover("test", 1), threading.Event(), list[int]()
    mover.put(_task(1, ran, gate, urgent=False))
    while not mover._running:
        time.sleep(0.001)
    mover.put(_task(2, ran, urgent=False))
    assert not mover.close(0.01, finish=finish)  # the first task hangs, so the second one is dropped
    gate.set()
    assert mover.close(300)
    assert ran == [1]
    mover = Mover("test", 1)
    for pages in range(1, 50):
        mover.put(_task(pages, ran, urgent=True))
    assert mover.close(300)
    assert ran == [1, *range(1, 50)]


@pytest.mark.parametrize(
    ("late", "cancelled", "begins"),
    [
        (0.0, (), [0, 10, 20, 30]),
        (4.0, (), [0, 14, 20, 30]),
        (25.0, (), [0, 35, 35, 45]),
        (0.0, (1, 2), [0, 10, 10, 10]),  # a cancelled task uses nothing of the limit
    ],
)
def test_a_task_that_ends_late_is_made_up_for_up_to_the_time_of_one(
    monkeypatch: pytest.MonkeyPatch, late: float, cancelled: tuple[int, ...], begins: list[int]
) -> None:
    """Four tasks of 10 s each, queued at once, of which the first ends `late`."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    mover, begun = Mover("test", 0, 1.0), list[int]()
    monkeypatch.setattr(pagedkv.tiers.mover, "time", clock)
    for number in range(4):
        task = Task(lambda: None, 1, 10, False, lambda number=number: number in cancelled, 100.0)  # type: ignore[misc]
        mover._wait_for_limit(task)
        begun.append(round(clock.now - 100))
        clock.now += 10 + late if number == 0 else 0
    assert begun == begins
