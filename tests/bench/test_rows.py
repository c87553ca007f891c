"""Turns that count, rows that are kept and read again, and ratios that fell by more than the noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedkv.bench import clock, compare, memory, record
from pagedkv.bench.clock import Elsewhere, Timing, Turns, in_turn, settled
from pagedkv.errors import InvalidRequest

ROW: dict[str, Any] = {
    "bench": "manager", "case": "a step", "batch": 8, "variant": "pagedkv", "unit": "us", "median": 10.0,
    "turns": [9.0, 10.0, 10.5, 11.0], "clean": 4,
}  # fmt: skip


def elsewhere(seconds: float, *, clean: bool = True) -> clock.Step:
    return lambda: lambda: Elsewhere(seconds, clean)


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "bare_read", lambda: lambda: 10.0)


def test_variants_take_turns_and_the_first_turns_do_not_count() -> None:
    order: list[str] = []

    def step(name: str) -> clock.Step:
        return lambda: lambda: order.append(name) or Elsewhere(1.0 if len(order) < 5 else 0.002, clean=True)

    timings = in_turn({"a": step("a"), "b": step("b")}, 6)
    turns = [frozenset(order[at : at + 2]) for at in range(0, len(order), 2)]
    assert turns == [frozenset("ab")] * 8
    assert {tuple(order[at : at + 2]) for at in range(0, len(order), 2)} == {("a", "b"), ("b", "a")}
    assert timings["a"].seconds == timings["b"].seconds == 0.002
    assert timings["a"].memory == (10.0, 10.0)


def test_a_median_is_over_clean_turns_if_enough_are_clean() -> None:
    assert settled([(1.0, True)] * 5 + [(9.0, False)] * 6) == Timing(1.0, 1.0, 5, 11, (*[1.0] * 5, *[None] * 6))
    disturbed = settled([(1.0, True)] * 2 + [(9.0, False)] * 7)
    assert (disturbed.seconds, disturbed.clean) == (9.0, 0)
    ratio = clock.compare(settled([(2.0, True), (8.0, True)]), settled([(1.0, True), (4.0, True)]), lambda a, b: a / b)
    assert ratio == 2.0, "turn by turn"


def test_a_turn_in_which_memory_changed_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([10.0, 10.0, 10.0, 20.0, 20.0, 20.0, 20.0, 20.0, 20.0, 20.0, 20.0])
    monkeypatch.setattr(clock, "bare_read", lambda: lambda: next(rates))
    monkeypatch.setattr(clock, "PAUSE", 0.0)
    turns = Turns(["a"], 5, warm_up=1)
    for order in turns:
        turns.add(order[0], 1.0, is_clean=True)
    assert turns.timings()["a"].turns == (1.0, None, 1.0, 1.0, 1.0)
    assert not memory.is_steady(10.0, 20.0)
    assert memory.is_steady(10.0, float("nan"))
    assert memory.available() > 0


def test_rows_are_kept_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = ROW | record.provenance()
    record.append([row, {"older": "form"}], path, "manager")
    record.append([row], path, "manager")
    assert record.read(path) == [row, row]
    assert record.axes_of(row) == {"batch": 8}
    assert record.shallow(row | {"must": 3}, 7) == {"layers": 7} | row | {"must": None}
    path.write_text("no row\n")
    with pytest.raises(InvalidRequest, match="line 1 is no row of a benchmark"):
        record.read(path)
    with pytest.raises(InvalidRequest, match="--record FILE names another file"):
        record.append([row], tmp_path, "manager")


def times(factor: float) -> dict[str, Any]:
    return ROW | {"median": ROW["median"] * factor, "turns": [turn * factor for turn in ROW["turns"]]}


@pytest.mark.parametrize(
    ("second", "ratio", "fell"),
    [(times(1.01), 0.99, False), (times(2), 0.5, True), (times(0.5), 2.0, False),
     (times(2) | {"clean": 0}, 0.5, False), (times(2) | {"turns": []}, 0.5, False),
     (times(2) | {"unit": "GB/s"}, 2.0, False)],
)  # fmt: skip
def test_a_figure_falls_by_more_than_the_noise(second: dict[str, Any], ratio: float, fell: bool) -> None:
    first = ROW | {"unit": second["unit"]}
    [change] = compare.compared([first], [second], is_relative=False)
    assert change.ratio == pytest.approx(ratio, rel=0.01)
    assert change.has_fallen(0.05) is fell


def test_relative_figures_are_ratios_of_one_run() -> None:
    peer = times(3) | {"variant": compare.PEER}
    bound = ROW | {"bench": "generate", "case": "decode", "over_bound": 1.5, "ratios": [1.4, 1.5, 1.6]}
    first = [ROW, peer, bound, ROW | {"case": "alone"}]
    second = [times(2), times(6) | {"variant": compare.PEER}, bound | {"over_bound": 3.0, "ratios": [2.8, 3.0, 3.2]}]
    changes = compare.compared(first, second, is_relative=True)
    assert [round(change.ratio, 2) for change in changes] == [0.5, 1.0], "a slower machine is no slower program"
    assert [change.has_fallen(0.05) for change in changes] == [True, False]
