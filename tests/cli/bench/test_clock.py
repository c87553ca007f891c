"""The rules by which a repetition counts: switches to other processes, a slow clock, and the fields of a row."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time

import pytest

from pagedkv.bench import clock


def test_a_switch_disturbs_a_short_repetition_and_not_a_long_one(monkeypatch):
    readings = iter([0, 1, 0, 1])
    times = iter([0.0, 0.05, 0.0, 0.2])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(clock, "not_of_others", lambda: float("nan"))
    assert clock.watched(lambda: "made", lambda: next(readings)) == ("made", 0.05, False)
    assert clock.watched(lambda: "made", lambda: next(readings)) == ("made", 0.2, True)


@pytest.mark.parametrize(("others", "is_clean"), [(0.04, True), (0.06, False), (float("nan"), False)])
def test_of_a_long_repetition_the_time_of_others_counts_and_not_their_switches(monkeypatch, others, is_clean):
    """A kernel thread that looks in often takes little: 50 switches in a second."""
    readings, times = iter([0, 50]), iter([0.0, 1.0])
    ours = iter([7.0, 7.0 + os.cpu_count() - others])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(clock, "not_of_others", lambda: next(ours))
    assert clock.watched(lambda: "made", lambda: next(readings)) == ("made", 1.0, is_clean)


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="there is no /proc")
def test_the_work_of_a_process_below_is_ours_and_that_of_another_is_not():
    """Other tests may take most of the processors, so that the busy processes get little of them: then once more."""
    assert any(_of_a_process_gone() > _of_a_process_below() + 0.3 for _ in range(6))


BUSY = [sys.executable, "-c", "import os; os.fork(); print(end='.', flush=True)\nwhile True: pass"]


def _of_others() -> float:
    """Return the CPU seconds of others in a second."""
    before, began = clock.not_of_others(), time.monotonic()
    time.sleep(1)
    return os.cpu_count() * (time.monotonic() - began) - (clock.not_of_others() - before)


def _of_a_process_below() -> float:
    with subprocess.Popen(BUSY, start_new_session=True, stdout=subprocess.PIPE) as below:
        assert below.stdout.read(2) == b".."  # both are busy
        try:
            return _of_others()
        finally:
            os.killpg(below.pid, signal.SIGKILL)


def _of_a_process_gone() -> float:
    started = f"import subprocess; print(subprocess.Popen({BUSY!r}, start_new_session=True).pid)"
    with subprocess.Popen([sys.executable, "-c", started], stdout=subprocess.PIPE) as gone:
        line = gone.stdout.readline()  # the busy ones have inherited the pipe, and may write first
        pid = int(line.strip(b".\n"))
        try:
            assert line.strip(b"0123456789\n") + gone.stdout.read(2 - line.count(b".")) == b".."
            gone.wait()  # the busy processes are no longer below this one
            return _of_others()
        finally:
            os.killpg(pid, signal.SIGKILL)


@pytest.mark.parametrize(("num_clean", "switches", "is_clean"), [(12, 9, True), (11, 9, False), (0, 0, True)])
def test_calls_are_clean_if_half_of_them_are_or_all_together(num_clean, switches, is_clean):
    taken = [(1.0 + number, number < num_clean) for number in range(24)]
    counts = iter([0, switches])
    seconds, found = clock.together(lambda: taken, lambda: next(counts))
    assert found is is_clean
    assert seconds == statistics.median(seconds for seconds, ok in taken if ok or not num_clean)


def test_a_turn_with_a_slow_clock_counts_for_no_variant(monkeypatch):
    spins = iter([9.0, 1.0, 1.1, 1.4, 1.0])  # of the warm-up, which does not count, then of four turns
    monkeypatch.setattr(clock, "spin", lambda: next(spins))
    turns = clock.Turns("ab", 4, reads_memory=False)
    for number, order in enumerate(turns):
        for name in order:
            turns.add(name, number * (1.0 if name == "a" else 10.0), is_clean=(name, number) != ("b", 1))
    timings = turns.timings()
    assert timings["a"].turns == (1.0, 2.0, None, 4.0)
    assert timings["b"].turns == (None, 20.0, None, 40.0)
    assert clock.ratios(timings["b"], timings["a"], lambda b, a: b / a) == [10.0, 10.0]


def test_a_row_keeps_each_turn_as_its_figure_and_null_for_a_disturbed_one():
    timing = clock.settled([(0.1, True), (0.4, True), (9.0, False), (0.2, True)])
    assert timing.fields(lambda seconds: 1 / seconds) == {
        "median": 5.0, "best": 10.0, "worst": 2.5, "turns": [10.0, 2.5, None, 5.0], "clean": 3,
    }  # fmt: skip
    disturbed = clock.settled([(0.1, False), (0.4, True), (0.3, False), (0.2, False)])
    assert disturbed.fields(lambda seconds: seconds) == {
        "median": 0.25, "best": 0.1, "worst": 0.4, "turns": [0.1, 0.4, 0.3, 0.2], "clean": 0,
    }  # fmt: skip


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="there is no /proc")
def test_the_switches_of_a_process_below_are_counted():
    """Two processes share one core, so each is switched from: one of them is our child's child."""
    core = min(os.sched_getaffinity(0))
    busy = f"import os; os.sched_setaffinity(0, [{core}]); os.fork()\nwhile True: pass"
    before = clock.switches_below()
    with subprocess.Popen([sys.executable, "-c", busy], start_new_session=True) as process:
        deadline = time.monotonic() + 30
        while (found := clock.switches_below()) < before + 10 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    assert found >= before + 10
