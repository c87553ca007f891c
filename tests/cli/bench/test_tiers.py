"""`pagedkv bench tiers`: rows of each part from a small run, their charts, and wrong options."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from pagedkv.bench import clock, compare
from pagedkv.bench.generate import models
from pagedkv.bench.generate import runner as generate
from pagedkv.bench.generate.models import CONFIG, TINY
from pagedkv.bench.report import readme
from pagedkv.bench.tiers import beside, first_token, plot, runner, speed, words
from pagedkv.errors import InvalidRequest


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of the three parts from a small run, with the provenance that the runner adds."""
    folder = tmp_path_factory.mktemp("tiers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDKV_DEBUG", "0")
        patch.setattr(beside, "FRAME", 16_384)  # steps of this model take a millisecond
        patch.setattr(beside, "STEPS", 32)
        patch.setattr(generate, "STEPS", 32)
        patch.setattr(clock, "spin", lambda: 1.0)
        found = [
            *speed.rows(folder, 3, sizes=(16_384,), moved=1 << 20),
            *first_token.rows(folder, 3, context=200, config=TINY),
            *beside.rows(3, shape=(2, 32), config=TINY),
        ]
    about = {"machine": "here", "when": "now", "commit": "c", "command": "pagedkv bench tiers"}
    return [{"bench": "tiers"} | row | about for row in found]


@pytest.mark.parametrize(("case", "share"), [("first token", "of_computing"), ("decode beside transfers", "of_alone")])
def test_the_manual_calls_a_promise_missed_that_was_not_kept(rows, case, share):
    for change, is_missed in ((1, True), (-1, False)):
        told = words.text([row | {share: row["must"] + change} for row in of(rows, case) if row.get("must")])
        assert ("**missed**" in told) is is_missed


def of(rows, case):
    return [row for row in rows if row["case"] == case]


def test_the_table_of_transfers_is_in_the_order_of_sizes():
    """The rows of a second run follow those of a first one."""
    row = {"case": "transfer", "tier": "gloo", "variant": "pagedkv", "median": 1.0, "of_bare": 0.9, "must": None}
    row |= {"clean": 5, "machine": "a machine", "command": "a command", "commit": "c", "when": "2026-11-26"}
    told = words.text([row | {"frame": size << 10} for size in (64, 1024, 256)])
    assert [line.split("|")[2].strip() for line in told.splitlines() if "gloo" in line] == ["64", "256", "1,024"]


def test_a_tier_has_a_row_for_each_way_and_size_beside_the_bare_transfer(rows):
    bare = {"host": "memcpy, one thread", "disk": "direct I/O, 2 threads"}
    for way in ("store", "load"):
        assert {(row["tier"], row["variant"]) for row in of(rows, way)} == {
            ("host", "pagedkv"), ("host", "pagedkv, not verified"), ("disk", "pagedkv"), *bare.items(),
        }  # fmt: skip
    for row in (*of(rows, "store"), *of(rows, "load")):
        assert row["worst"] <= row["median"] <= row["best"]
        assert ("of_bare" in row) == row["variant"].startswith("pagedkv")


def test_threads_of_a_disk_that_switch_among_themselves_disturb_no_turn(monkeypatch):
    monkeypatch.setattr(clock, "watched", lambda run: (run(), 0.0, False))  # a switch in each call
    seconds, is_clean = clock.on_this_cpu(speed.unswitched(lambda: lambda: time.sleep(0.01))())
    assert is_clean
    assert seconds >= 0.01
    assert clock.on_this_cpu(lambda: None) == (0.0, False)


def test_a_first_token_has_a_row_for_each_place(rows):
    places = of(rows, "first token")
    assert [row["variant"] for row in places] == ["computed", "pagedkv, pool", "pagedkv, host", "pagedkv, disk"]
    assert [row.get("must") for row in places] == [None, None, 0.1, 0.3]


def test_steps_have_a_row_for_each_limit(rows):
    steps = of(rows, "decode beside transfers")
    assert [row["variant"] for row in steps] == ["no transfers", "pagedkv, 2 GB/s", "pagedkv, no limit"]
    assert all(row["moved_gb_s"] > 0 for row in steps[1:])


def test_the_traffic_that_transfers_take_is_a_share_of_the_read_in_the_same_turn(monkeypatch):
    """The machine is twice as fast in the third of three turns: the share stays, that of two medians would not."""
    timing = clock.Timing(2.0, 2.0, 3, 3, (2.0, 2.0, 2.0))
    traffic = [beside.Traffic(1e9, 10e9), beside.Traffic(4e9, 40e9), beside.Traffic(2e9, 40e9)]
    row = beside._beside("pagedkv, 2 GB/s", timing, timing, traffic)
    assert row["taken_percent"] == pytest.approx(20.0)
    assert (row["of_alone"], row["must"]) == (1.0, pytest.approx(1.25))


def test_rows_of_tiers_are_reported_compared_and_drawn(rows, command, tmp_path):
    kept = tmp_path / "tiers.jsonl"
    kept.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    status, _, err = command("bench", "report", "--results", tmp_path, "--out", tmp_path / "r.html")
    assert status == 0, err
    text = (tmp_path / "r.html").read_text()
    assert text.count('<tr class="ours">') == 11
    assert re.search(r'<p class="big">[\d.]+ %</p>', text)  # the headline
    assert len(plot.charts(rows)) == 4
    for options in ((), ("--relative",)):
        status, out, err = command("bench", "compare", kept, kept, "--json", *options)
        assert status == 0, err
        assert len([change for change in json.loads(out) if change["ratio"] == 1]) == 11


def test_the_page_of_the_manual_is_filled_from_the_rows(rows, command, tmp_path, monkeypatch):
    pages = {"README.md": "", "docs/how-to/tiers.md": "head\n", "docs/explanation/bandwidth.md": ""}
    for name, head in pages.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{head}{readme.BEGIN}\nnone yet\n{readme.END}\ntail\n")
    (tmp_path / "bench/results").mkdir(parents=True)
    (tmp_path / "bench/results/tiers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    texts = {path.relative_to(tmp_path).as_posix(): text for path, text in readme.written(tmp_path).items()}
    page = texts["docs/how-to/tiers.md"]
    assert page.startswith("head\n")
    assert page.endswith("tail\n")
    assert "A prompt of 200 tokens has its first token after" in page
    assert page.count("\n| ") == 3 + 1 + 4 + 3
    assert texts["docs/img/bench/tiers.svg"].startswith("<svg")
    assert "**" in texts["README.md"]


def test_a_first_token_that_takes_longer_is_worse(rows):
    slower = [row | ({"of_computing": 2 * row["of_computing"]} if "of_computing" in row else {}) for row in rows]
    slower = [row | ({"of_alone": 2 * row["of_alone"]} if "of_alone" in row else {}) for row in slower]
    ratios = {change.name: change.ratio for change in compare.compared(rows, slower, is_relative=True)}
    fell = {name for name, ratio in ratios.items() if ratio == pytest.approx(0.5)}
    assert len(fell) == 5
    assert all(name.startswith(("first token", "decode beside")) for name in fell)


def test_sizes_and_contexts_are_axes(command, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(runner.speed, "rows", lambda *given: asked.append(given) or iter(()))
    monkeypatch.setattr(runner.first_token, "rows", lambda *given: asked.append(given) or iter(()))
    options = ("--frame", 64, "--frame", 4, "--context", 512, "--record", tmp_path / "rows")
    status, _, err = command("bench", "tiers", "--part", "speed", "--part", "first-token", *options)
    assert status == 0, err
    assert asked == [(None, 15, (65_536, 4096)), (None, 7, 512, CONFIG)]


def test_a_quick_run_has_the_model_of_quick_runs(command, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(runner, "quick_config", lambda: TINY)
    monkeypatch.setattr(runner.first_token, "rows", lambda *given: asked.append(given[-1]) or iter(()))
    monkeypatch.setattr(runner.beside, "rows", lambda turns, config: asked.append(config) or iter(()))
    parts = ("--part", "beside", "--part", "first-token", "--record", tmp_path / "rows")
    for options, config in ((("--quick",), TINY), ((), CONFIG)):
        asked.clear()
        assert command("bench", "tiers", *parts, *options).status == 0
        assert asked == [config, config]


def test_rows_of_a_shallow_model_say_so_and_promise_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")
    monkeypatch.setattr(models, "SHALLOW", TINY)
    monkeypatch.setattr(beside, "FRAME", 16_384)
    found = [
        *first_token.rows(tmp_path, 1, context=64, config=TINY),
        *beside.rows(1, shape=(2, 32), config=TINY),
    ]
    assert {row["case"] for row in found} == {"first token", "decode beside transfers"}
    assert all((row["layers"], row["must"]) == (2, None) for row in found)


@pytest.mark.parametrize("frame", [3, 2**18 + 1])
def test_a_frame_that_is_no_run_of_pages_or_larger_than_what_is_moved_is_one_line(frame, command, tmp_path):
    status, _, err = command("bench", "tiers", "--frame", frame, "--record", tmp_path / "rows")
    assert (status, err.count("\n"), "--frame" in err) == (2, 1, True)


def test_unknown_parts_and_folders_are_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="speed, first-token, beside"):
        runner.Asked(parts=("seed",))
    with pytest.raises(InvalidRequest, match="is no folder"):
        runner.Asked(folder=tmp_path / "no")
    with pytest.raises(InvalidRequest, match="no file can be written to /proc: .*; --folder DIR names a folder"):
        runner.Asked(folder=Path("/proc"))
