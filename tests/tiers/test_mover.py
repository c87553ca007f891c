"""The mover: nothing that its owner does, and no interrupt of it, stops the threads."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest

import pagedkv.tiers.mover
from pagedkv.tiers.mover import Mover, Task
from tests.interrupts import Interrupter, count_instructions


def _task(
    pages: int, ran: list[int] | None = None, gate: threading.Event | None = None, *, urgent: bool,
    cancelled: bool = False,
) -> Task:  # fmt: skip
    def run() -> None:
        if gate is not None:
            gate.wait(20)
        if ran is not None:
            ran.append(pages)

    return Task(run, pages, pages, urgent, lambda: cancelled)


def test_loads_run_before_stores_and_pages_are_counted_until_they_end() -> None:
    mover, gate, ran = Mover("test", 1), threading.Event(), list[int]()
    mover.put(_task(1, ran, gate, urgent=False))
    while not mover._running:
        time.sleep(0.001)
    for pages, urgent in ((2, False), (4, False), (8, True), (16, True)):
        mover.put(_task(pages, ran, urgent=urgent))
    assert mover.num_pages == 31
    assert not mover.drain(0.01)
    gate.set()
    assert mover.drain(20)
    assert (ran, mover.num_pages) == ([1, 8, 16, 2, 4], 0)
    assert mover.close(20)


def test_a_task_that_is_cancelled_keeps_its_owner_waiting_for_no_other() -> None:
    mover, gate, ran = Mover("test", 1), threading.Event(), list[int]()
    mover.put(_task(1, ran, gate, urgent=True))
    while not mover._running:
        time.sleep(0.001)
    for pages, cancelled in ((2, False), (4, True), (8, False), (16, True)):
        mover.put(_task(pages, ran, urgent=True, cancelled=cancelled))
    gate.set()
    assert mover.drain(20)
    assert ran == [1, 4, 16, 2, 8]
    assert mover.close(20)


@pytest.mark.parametrize("call", ["put", "num_pages", "drain"])
def test_an_interrupted_owner_stops_no_thread(call: str) -> None:
    """At each instruction of a call: the next task runs, and the pages that were queued are counted and moved."""

    def work() -> None:
        if call == "put":
            mover.put(_task(3, ran, urgent=True))
        elif call == "num_pages":
            assert mover.num_pages in (0, 5)
        else:
            mover.drain(20)

    mover, ran = Mover("test", 2), list[int]()
    for at in range(1, count_instructions(work) + 1):
        with contextlib.suppress(KeyboardInterrupt):
            Interrupter(at).run(work)
        mover.put(_task(5, ran, urgent=False))
        deadline = time.monotonic() + 20
        while mover.num_pages:
            assert time.monotonic() < deadline, f"instruction {at}"
        assert ran.pop() == 5
    assert mover.close(20)


def test_a_wake_that_an_interrupt_lost_is_made_up_for() -> None:
    mover, ran = Mover("test", 1), list[int]()
    mover._urgent.append(_task(7, ran, urgent=True))  # as `put` leaves it, interrupted before it wakes a thread
    deadline = time.monotonic() + 20
    while mover.num_pages:
        assert time.monotonic() < deadline
    assert ran == [7]
    assert mover.close(20)


@pytest.mark.parametrize("finish", [True, False])
def test_a_close_runs_what_was_queued_or_drops_it(finish: bool) -> None:
    mover, gate, ran = Mover("test", 1), threading.Event(), list[int]()
    mover.put(_task(1, ran, gate, urgent=False))
    while not mover._running:
        time.sleep(0.001)
    mover.put(_task(2, ran, urgent=False))
    assert not mover.close(0.01, finish=finish)  # the first task hangs, so the second one is dropped
    gate.set()
    assert mover.close(20)
    assert ran == [1]
    mover = Mover("test", 1)
    for pages in range(1, 50):
        mover.put(_task(pages, ran, urgent=True))
    assert mover.close(20)
    assert ran == [1, *range(1, 50)]


@pytest.mark.parametrize(("late", "begins"), [(0.0, [0, 10, 20, 30]), (4.0, [0, 14, 20, 30]), (25.0, [0, 35, 35, 45])])
def test_a_task_that_ends_late_is_made_up_for_up_to_the_time_of_one(
    monkeypatch: pytest.MonkeyPatch, late: float, begins: list[int]
) -> None:
    """Four tasks of 10 s each, queued at once, of which the first ends `late`."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    mover, begun = Mover("test", 0, 1.0), list[int]()
    monkeypatch.setattr(pagedkv.tiers.mover, "time", clock)
    for number in range(4):
        mover._wait_for_limit(Task(lambda: None, 1, 10, is_urgent=False, is_cancelled=lambda: False, queued_at=100.0))
        begun.append(round(clock.now - 100))
        clock.now += 10 + late if number == 0 else 0
    assert begun == begins


def test_a_task_that_is_cancelled_uses_nothing_of_the_limit() -> None:
    mover, ran, cancelled = Mover("test", 1, 1000.0), threading.Event(), threading.Event()
    for is_last in (False, False, False, True):  # 10 s each
        is_cancelled = (lambda: False) if is_last else cancelled.is_set
        run = ran.set if is_last else (lambda: None)
        mover.put(Task(run, 1, 10_000, is_urgent=False, is_cancelled=is_cancelled))
    cancelled.set()
    assert ran.wait(9)  # a task that is not cancelled takes 10 s
    mover.close(1)
