"""The state of memory: readings, the states that they show, and turns in which it changed."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch

from pagedkv.bench import clock, memory_state
from pagedkv.bench.fragmentation.runs import copy_speeds
from pagedkv.cli.bench.run import caption


def slow_states(rates: list[float]) -> list[tuple[float, float]]:
    """The definition: every cut is tried."""
    logs = sorted(map(torch.tensor(rates, dtype=torch.float64).log().tolist().__getitem__, range(len(rates))))
    best = None
    for cut in range(1, len(logs)):
        parts = logs[:cut], logs[cut:]
        spread = sum(len(part) * statistics.pvariance(part) for part in parts)
        if best is None or spread < best[0] - 1e-12:
            best = spread, parts
    if best and min(map(len, best[1])) >= max(3, memory_state.SHARE * len(logs)):
        slow, fast = (float(torch.tensor(statistics.median_low(part)).exp()) for part in best[1])
        if fast / slow >= memory_state.STATES:
            return [(slow, len(best[1][0]) / len(logs)), (fast, len(best[1][1]) / len(logs))]
    return [(float(torch.tensor(statistics.median_low(logs)).exp()), 1.0)]


@pytest.mark.parametrize("seed", range(12))
def test_states_are_those_that_a_search_of_all_cuts_finds(seed):
    lots = random.Random(seed)
    rates = [lots.choice((45.0, 45.0 * (1 + seed / 10))) * lots.gauss(1, 0.04) for _ in range(lots.randint(1, 60))]
    for ours, theirs in zip(memory_state.states(rates), slow_states(rates), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_fast_and_a_slow_state_are_two_and_noise_is_one():
    lots = random.Random(0)
    two = [speed * lots.gauss(1, 0.03) for speed in [45.0] * 70 + [80.0] * 30]
    (slow, share), (fast, rest) = memory_state.states(two)
    assert (slow, fast, share, rest) == pytest.approx((45, 80, 0.7, 0.3), rel=0.02)
    assert len(memory_state.states([45 * lots.gauss(1, 0.05) for _ in range(200)])) == 1
    for count in (*range(1, 40), 99):
        assert memory_state.states([45.0] * count + [80.0]) == (pytest.approx((45.0, 1.0)),), "one odd reading"
    for count in range(2, 30):
        assert memory_state.states([45.0] * count + [80.0] * 2) == (pytest.approx((45.0, 1.0)),), "two odd readings"


def test_a_reading_is_the_best_of_several_and_no_reading_shows_no_state():
    assert memory_state.bare_read()() > 0.1, "GB/s"
    assert memory_state.states([]) == memory_state.states([math.nan] * 3) == ()
    assert memory_state.states([math.nan, 20.0]) == (pytest.approx((20.0, 1.0)),)


@pytest.mark.parametrize(("before", "after", "is_steady"), [(20, 24.9, True), (20, 25, False), (25, 20, False)])
def test_memory_is_steady_if_two_readings_differ_by_less_than_a_quarter(before, after, is_steady):
    assert memory_state.is_steady(before, after) is is_steady
    assert memory_state.is_steady(math.nan, after)
    assert memory_state.is_steady(before, math.nan)


@pytest.fixture
def scripted(monkeypatch):
    """Let memory have scripted speeds, and the clock be steady."""

    def script(*speeds: float) -> None:
        readings = iter(speeds)
        monkeypatch.setattr(clock, "bare_read", lambda: lambda: next(readings))
        monkeypatch.setattr(clock, "spin", lambda: 1.0)
        monkeypatch.setattr(clock, "PAUSE", 0.0)

    return script


def test_a_turn_in_which_memory_changes_its_state_counts_for_no_variant(scripted):
    changes = [41.0, *[80.0] * 4]  # a reading that differs is repeated
    scripted(80.0, *[40.0] * 4, 41.0, *changes, 79.0, 80.0, 81.0)  # the first turn is a warm-up
    turns = clock.Turns("ab", 6)
    for number, order in enumerate(turns):
        for name in order:
            turns.add(name, float(number), is_clean=True)
    timings = turns.timings()
    assert timings["a"].turns == timings["b"].turns == (1.0, 2.0, None, 4.0, 5.0, 6.0)
    assert timings["a"].clean == 5
    (slow, few), (fast, most) = timings["a"].memory
    assert (slow, few, fast, most) == pytest.approx((41, 3 / 7, 80, 4 / 7), rel=0.01)


def test_a_reading_that_is_disturbed_itself_is_no_change(scripted):
    scripted(40.0, 40.0, 20.0, 41.0, 40.0)
    turns = clock.Turns("a", 3, warm_up=0)
    for _ in turns:
        turns.add("a", 1.0, is_clean=True)
    assert turns.timings()["a"].turns == (1.0, 1.0, 1.0)


def test_a_change_after_the_last_turn_of_a_run_is_seen_and_turns_that_were_not_ended_count(scripted):
    scripted(40.0, 40.0, 40.0, *[80.0] * 4)
    turns = clock.Turns("a", 2)
    for _ in turns:
        turns.add("a", 1.0, is_clean=True)
    assert turns.timings()["a"].turns == (1.0, None)
    scripted(40.0, 40.0)
    broken = clock.Turns("a", 2)
    for _ in broken:
        broken.add("a", 1.0, is_clean=True)
        if len(broken.taken["a"]) == 2:
            break
    assert broken.timings()["a"].turns == (1.0,)


def test_variants_that_memory_does_not_bound_or_that_are_bracketed_by_reads_are_not_read_for(scripted):
    scripted()  # a reading would raise
    assert clock.in_turn({}, 3) == {}
    timings = clock.in_turn({"a": lambda: lambda: None}, 3, reads_memory=False)
    assert timings["a"].memory == ()
    assert "memory" not in timings["a"].fields(float)


def test_the_states_of_memory_are_in_the_rows_and_below_the_table(scripted):
    scripted(*[40.0] * 5, *[80.0] * 9)
    rows = copy_speeds(8)
    assert all([speed for speed, _ in row["memory"]] == pytest.approx([40, 80]) for row in rows)
    about = {"machine": "a machine", "commit": "a commit"}
    words = "memory in two states: 40 and 80 GB/s"
    assert caption([row | about for row in rows]) == f"medians; a machine; a commit; {words}"
    one, two = {"memory": [[40.0, 1.0]]}, {"memory": [[40.0, 0.5], [80.0, 0.5]]}
    assert memory_state.of_rows([one, {}]) == "memory in one state: 40 GB/s"
    assert memory_state.of_rows([*[one] * 9, two]) == "memory in one state: 40 GB/s", "a twentieth is no state"
    assert memory_state.of_rows([one, two]) == words
    assert caption([about]) == "medians; a machine; a commit", "an older row does not say"
