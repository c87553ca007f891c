"""`pagedkv bench bandwidth`: rows, a picture, axes, and words for what is not measured."""

from __future__ import annotations

import json

import pytest

from pagedkv.bench import clock
from pagedkv.bench.attention import pool
from pagedkv.bench.attention.cells import Cell
from pagedkv.bench.bandwidth import ceilings, device, runner, subjects, words

FAST = ("--quick", "--turns", 1, "--threads", 1, "--kernels", "cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(pool, "POOL_BYTES", 8 << 20)
    monkeypatch.setattr(runner, "POOL_BYTES", 16 << 20)
    monkeypatch.setattr(ceilings, "WINDOW", 4 << 20)
    monkeypatch.setattr(runner, "grid", lambda *, is_quick: [Cell(batch=1, context=256), Cell(batch=1, kv="int8")])
    monkeypatch.setattr(subjects, "BASE", Cell(context=64))
    monkeypatch.setattr(subjects, "LINEAR", dict.fromkeys(subjects.LINEAR, 256))
    monkeypatch.setattr(subjects, "INTEGER_ROWS", 128)
    monkeypatch.setattr(subjects, "COLD", 1 << 20)
    monkeypatch.setattr(runner, "_noted", set())


def test_a_run_has_rows_of_every_case_a_picture_and_words(command, tmp_path):
    options = (*FAST, "--json", "--record", tmp_path / "r", "--plot", tmp_path / "b.svg")
    status, out, err = command("bench", "bandwidth", *options)
    assert status == 0, err
    rows = json.loads(out)
    assert [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()] == rows
    assert {row["case"] for row in rows} == {*runner.CASES, "state"} - {"swap"}
    for row in rows:
        assert {"machine", "commit", "versions", "when", "command"} <= set(row)
        assert 0 < row["worst"] <= row["median"] <= row["best"]
        if row["case"] != "state":
            counted = [turn for turn in row["turns"] if turn is not None]
            assert len(counted) == len(row["ratios"]) >= 1
            assert row["efficiency"] > 0
    assert "not measured: swap: host and device are one memory here; --device cuda" in err
    picture = (tmp_path / "b.svg").read_text()
    assert "Roofline" in picture
    assert "random 4 KiB" in picture
    text = words.text(rows)
    assert text.startswith("On 1 thread this machine reads ")
    assert "| decode attention | 1 × 256 | pagedkv |" in text


def test_an_axis_makes_a_grid_of_its_own_and_the_table_says_the_states(command, tmp_path):
    axes = ("--context", 64, "--batch", 1, "--batch", 2, "--kv", "int8")
    status, out, err = command("bench", "bandwidth", *FAST, *axes, "--record", tmp_path / "r")
    assert status == 0, err
    rows = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    cells = [(row["batch"], row["context"], row["kv"]) for row in rows if row["case"] == "decode"]
    assert cells == [(1, 64, "int8"), (2, 64, "int8")]
    assert "The read ceiling had 1 state" in out or "The read ceiling had 2 states" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--case", "tear"], "there is no such case; there are ceiling, decode"),
        (["--device", "tpu"], "bandwidth is measured on cpu and on cuda"),
        (["--device", "cuda"], "torch sees no GPU here"),
    ],
)
def test_a_wrong_option_is_one_line(command, options, words, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, _, err = command("bench", "bandwidth", *options, "--record", tmp_path / "r")
    assert (status, words in err) == (2, True), err


def test_a_gpu_has_its_ceilings_and_swaps(command, tmp_path, monkeypatch):
    """On a machine without a GPU the device is the CPU."""
    stand_in = device.measured("cpu", 64 << 10, 4 << 10)
    monkeypatch.setattr(device, "measured", lambda: stand_in)
    monkeypatch.setattr(device, "timer", clock.on_this_cpu)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setattr("pagedkv.bench.record.results", lambda: tmp_path)
    options = ("--device", "cuda", "--quick", "--json", "--plot", tmp_path / "g.svg")
    status, out, err = command("bench", "bandwidth", *options)
    assert status == 0, err
    kept = [path.name for path in tmp_path.glob("*.jsonl")]
    assert kept == ["gpu-bandwidth.jsonl"], "a table of the CPU's rows must not show a GPU's"
    found = {(row["case"], row.get("direction", ""), row["device"]) for row in json.loads(out)}
    assert found >= {("ceiling", "", "a GPU"), ("swap", "to the host", "a GPU"), ("swap", "to the device", "a GPU")}
    assert "a GPU" in (tmp_path / "g.svg").read_text()
