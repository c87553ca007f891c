"""The watch of a rank ends its process for a silent rank, a lost store or a told end, and for nothing else."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagedkv.distributed import watch
from pagedkv.distributed.watch import Watch

DEADLINE_S = 1.0


class Kept:
    """A store in this process, in place of torch's."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.is_gone = False
        self.answers = threading.Event()
        self.answers.set()

    def _look(self) -> None:
        self.answers.wait()
        if self.is_gone:
            raise RuntimeError("connection reset\nby peer")

    def add(self, key: str, amount: int) -> int:
        self._look()
        self.values[key] = self.values.get(key, 0) + amount
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        self._look()
        return all(key in self.values for key in keys)

    def get(self, key: str) -> Any:
        return self.values[key]

    def set(self, key: str, value: str) -> None:
        self.values[key] = value


class Process:
    """The watch of a rank, and the end that it brought."""

    def __init__(self, store: Kept, rank: int, ends: list[int]) -> None:
        self.ends = ends
        self.watch = Watch(lambda: store, rank, 2, DEADLINE_S)
        self.watch.start()

    def wait(self, seconds: float = 5.0) -> int | None:
        end = time.monotonic() + seconds
        while not self.ends and time.monotonic() < end:
            time.sleep(0.01)
        return self.ends[0] if self.ends else None


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Process]]:
    """Return a function that begins a watch over a store, and records the end of its process."""
    processes: list[Process] = []

    def start(store: Kept, rank: int = 0) -> Process:
        ends: list[int] = []

        monkeypatch.setattr(os, "_exit", ends.append)
        processes.append(Process(store, rank, ends))
        return processes[-1]

    yield start
    for process in processes:
        process.watch.stop()


def beats(store: Kept, rank: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        store.add(f"beat/{rank}", 1)
        time.sleep(0.05)


@pytest.mark.slow
def test_a_rank_that_falls_silent_ends_the_others_with_one_line(
    begin: Callable[..., Process], capfd: pytest.CaptureFixture[str]
) -> None:
    store = Kept()
    process = begin(store)
    beats(store, 1, 2 * DEADLINE_S)
    assert not process.ends
    assert process.wait() == watch.LOST
    said = capfd.readouterr().err
    assert said.startswith("pagedkv: error: rank 1 gave no sign for ")
    assert said.count("\n") == 1


@pytest.mark.slow
def test_a_rank_that_has_not_come_yet_has_more_time(begin: Callable[..., Process]) -> None:
    assert begin(Kept()).wait(2 * DEADLINE_S) is None


def test_a_rank_beats_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that stops before its second beat has come, so the others wait one deadline for it, not JOINING."""
    monkeypatch.setattr(watch, "BEAT_S", 60.0)
    store = Kept()
    rank = Watch(lambda: store, 1, 2, deadline=240.0)
    rank.start()
    end = time.monotonic() + 20
    while rank._answered_at is None and time.monotonic() < end:
        time.sleep(0.01)
    rank.stop()
    assert rank._answered_at is not None
    assert store.values["beat/1"] == 1


def test_a_store_that_never_answers_ends_the_process_when_others_would_have_come(
    begin: Callable[..., Process], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host was stopped between the connection and the first answer, and torch waits for it without end."""
    monkeypatch.setattr(watch, "JOINING", 2)
    store = Kept()
    store.answers.clear()
    began = time.monotonic()
    assert begin(store, rank=1).wait(10 * DEADLINE_S) == watch.LOST
    assert time.monotonic() - began > 2 * DEADLINE_S
    assert "the store through which the ranks meet gave no answer for 2 s" in capfd.readouterr().err
    store.answers.set()


def test_a_lost_store_ends_the_process(begin: Callable[..., Process], capfd: pytest.CaptureFixture[str]) -> None:
    store = Kept()
    process = begin(store, rank=1)
    store.is_gone = True
    assert process.wait() == watch.LOST
    assert "the store through which the ranks meet is gone (connection reset); all ranks" in capfd.readouterr().err


@pytest.mark.slow
def test_a_store_that_gives_no_answer_ends_the_process(
    begin: Callable[..., Process], capfd: pytest.CaptureFixture[str]
) -> None:
    store = Kept()
    process = begin(store, rank=1)
    beats(store, 0, DEADLINE_S / 2)
    store.answers.clear()
    assert process.wait() == watch.LOST
    store.answers.set()
    said = capfd.readouterr().err
    assert "the store through which the ranks meet gave no answer for " in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("said", [True, False])
def test_an_end_that_another_rank_tells_is_said_once(
    said: bool, begin: Callable[..., Process], capfd: pytest.CaptureFixture[str]
) -> None:
    store = Kept()
    process = begin(store, rank=1)
    watch.tell_end(store, "rank 0: the prompt is empty", 2, said=said)
    assert process.wait() == 2
    assert store.values[watch.LEFT] == 1
    assert capfd.readouterr().err == ("" if said else "pagedkv: error: rank 0: the prompt is empty\n")


@pytest.mark.slow
def test_a_process_that_was_stopped_itself_blames_nobody(
    begin: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, late = Kept(), [0.0]
    clock = time.monotonic
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock() + late[0])
    process = begin(store)
    beats(store, 1, DEADLINE_S / 2)
    late[0] = 100.0
    beats(store, 1, 2 * DEADLINE_S)
    assert not process.ends


@pytest.mark.slow
def test_a_watch_leaves_the_end_to_a_thread_that_has_claimed_it(begin: Callable[..., Process]) -> None:
    store = Kept()
    process = begin(store)
    process.watch.claim()
    beats(store, 1, DEADLINE_S / 2)
    assert process.wait(2 * DEADLINE_S) is None


@pytest.mark.slow
def test_a_thread_waits_for_the_end_that_the_watch_has_begun(begin: Callable[..., Process]) -> None:
    store = Kept()
    process = begin(store)
    beats(store, 1, DEADLINE_S / 2)
    assert process.wait() == watch.LOST
    waiting = threading.Thread(target=process.watch.claim, daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()


@pytest.mark.slow
def test_a_watch_that_was_stopped_ends_nothing(begin: Callable[..., Process]) -> None:
    store = Kept()
    process = begin(store)
    beats(store, 1, DEADLINE_S / 2)
    process.watch.stop()
    assert process.wait(2 * DEADLINE_S) is None
