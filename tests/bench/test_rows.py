"""Turns that count, rows that are kept and read again, ratios that fell, and pictures that show the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedkv.bench import clock, compare, pictures, plots, record
from pagedkv.bench.clock import Elsewhere, Timing, Turns, in_turn, settled
from pagedkv.errors import InvalidRequest

ROW: dict[str, Any] = {
    "bench": "manager", "case": "a step", "batch": 8, "variant": "pagedkv", "unit": "us", "median": 10.0,
    "turns": [9.0, 10.0, 10.5, 11.0], "clean": 4,
}  # fmt: skip


def times(factor: float, **more: Any) -> dict[str, Any]:
    return ROW | {"median": ROW["median"] * factor, "turns": [turn * factor for turn in ROW["turns"]]} | more


def test_variants_take_turns_and_the_first_turns_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "bare_read", lambda: lambda: 10.0)
    order: list[str] = []

    def step(name: str) -> clock.Step:
        return lambda: lambda: order.append(name) or Elsewhere(1.0 if len(order) < 5 else 0.002, clean=True)

    timings = in_turn({"a": step("a"), "b": step("b")}, 6)
    assert {tuple(order[at : at + 2]) for at in range(0, len(order), 2)} == {("a", "b"), ("b", "a")}
    assert (len(order), timings["a"].seconds, timings["b"].seconds) == (16, 0.002, 0.002)


def test_disturbed_turns_do_not_count_if_enough_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled([(1.0, True)] * 5 + [(9.0, False)] * 6) == Timing(1.0, 1.0, 5, 11, (*[1.0] * 5, *[None] * 6))
    disturbed = settled([(1.0, True)] * 2 + [(9.0, False)] * 7)
    assert (disturbed.seconds, disturbed.clean) == (9.0, 0)
    rates = iter([10.0, 10.0, 10.0, *[20.0] * 8])  # memory changes its state
    monkeypatch.setattr(clock, "bare_read", lambda: lambda: next(rates))
    monkeypatch.setattr(clock, "PAUSE", 0.0)
    turns = Turns(["a"], 5, warm_up=1)
    for order in turns:
        turns.add(order[0], 1.0, is_clean=True)
    assert turns.timings()["a"].turns == (1.0, None, 1.0, 1.0, 1.0)


def test_rows_are_kept_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = ROW | record.provenance()
    record.append([row, {"older": "form"}, row], path, "manager")
    assert record.read(path) == [row, row]
    path.write_text("no row\n")
    with pytest.raises(InvalidRequest, match="line 1 is no row of a benchmark"):
        record.read(path)


@pytest.mark.parametrize(
    ("second", "ratio", "fell"),
    [(times(1.01), 0.99, False), (times(2), 0.5, True), (times(2, clean=0), 0.5, False),
     (times(2, turns=[]), 0.5, False), (times(2, unit="GB/s"), 2.0, False)],
)  # fmt: skip
def test_a_figure_falls_by_more_than_the_noise(second: dict[str, Any], ratio: float, fell: bool) -> None:
    [change] = compare.compared([ROW | {"unit": second["unit"]}], [second], is_relative=False)
    assert change.ratio == pytest.approx(ratio, rel=0.01)
    assert change.has_fallen(0.05) is fell


def test_relative_figures_are_ratios_of_one_run() -> None:
    bound = ROW | {"bench": "generate", "case": "decode", "over_bound": 1.5, "ratios": [1.4, 1.5, 1.6]}
    first = [ROW, times(3, variant=compare.PEER), bound, ROW | {"case": "alone"}]
    second = [times(2), times(6, variant=compare.PEER), bound | {"over_bound": 3.0, "ratios": [2.8, 3.0, 3.2]}]
    changes = compare.compared(first, second, is_relative=True)
    assert [round(change.ratio, 2) for change in changes] == [0.5, 1.0], "a slower machine is no slower program"
    assert [change.has_fallen(0.05) for change in changes] == [True, False]


def test_a_bar_is_the_median_run_and_its_whisker_has_all_runs() -> None:
    [chart] = plots.charts("manager", [times(1), times(3), times(4), times(2, variant="vllm")])
    assert "30 µs (10–40)" in chart.svg
    assert "20 µs<" in chart.svg


def test_the_pictures_of_the_manual_are_those_of_the_rows(tmp_path: Path) -> None:
    pictures.main(tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text() for path in pictures.FOLDER.iterdir()}
