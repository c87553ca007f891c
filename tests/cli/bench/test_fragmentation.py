"""`pagedkv bench fragmentation`: our promises on the quick run, rows of every kind, a trace, and wrong options."""

from __future__ import annotations

import json
import random

import pytest

from pagedkv.bench.fragmentation import cells, runner, runs
from pagedkv.bench.fragmentation.arenas import KIB, MIB


@pytest.mark.many_steps
def test_the_quick_run_keeps_the_promises(command, tmp_path, monkeypatch):
    some = tuple(cells.blocks_of(size) for size in (1, 8, 16))
    monkeypatch.setattr(runner, "CELLS", (cells.Cell("sharegpt", some, 100),))
    kept = tmp_path / "rows.jsonl"
    options = ("--workload", "sharegpt")
    assert command("bench", "fragmentation", "--quick", *options, "--record", kept).status == 0
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    judged = {(row["case"], row["variant"]): row for row in rows if row["must"] is not None}
    assert len(judged) == 3
    for (case, _), row in judged.items():
        assert row["median"] >= row["must"] if case == "useful" else row["median"] < row["must"]
    useful = {row["variant"]: row for row in rows if row["case"] == "useful"}
    sequences = {size: useful[cells.blocks_of(size)]["sequences"] for size in (1, 16)}
    assert sequences[16] > 0.95 * sequences[1]
    for row in useful.values():
        parts = sum(row[part] for part in ("reserved", "internal", "rounded", "free"))
        assert row["median"] + parts == pytest.approx(100)
        assert all(sum(moment[1:5]) == pytest.approx(100, abs=0.1) for moment in row["over_time"])


@pytest.mark.many_steps
def test_a_run_has_rows_of_every_kind_and_a_picture(command, tmp_path, monkeypatch):
    chosen = next(cell for cell in cells.CELLS if cell.workload == "beams-2")
    monkeypatch.setattr(runner, "CELLS", (chosen,))
    monkeypatch.setattr(runs, "BYTES", 4 * MIB)
    monkeypatch.setattr(runs, "PIECES", (4 * KIB, 4 * MIB))
    picture = tmp_path / "f.svg"
    result = command("bench", "fragmentation", "--quick", "--json", "--record", tmp_path / "r", "--plot", picture)
    rows = json.loads(result.out)
    assert {row["case"] for row in rows} == {"useful", "waste", "saved", "copies", "resize", "memcpy"}
    assert all(row["machine"] and row["commit"] and row["bench"] == "fragmentation" for row in rows)
    assert 25 < next(row["median"] for row in rows if row["case"] == "saved") < 50
    assert "paper 37.56" in picture.read_text()


@pytest.mark.many_steps
def test_a_trace_of_long_prompts_wastes_almost_nothing(command, tmp_path):
    lots, trace = random.Random(0), tmp_path / "trace.jsonl"
    lines = [{"input_length": lots.randint(4000, 60_000), "output_length": lots.randint(5, 30)} for _ in range(80)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--trace", trace, "--workload", "mooncake", "--allocator", "pagedkv")
    out = json.loads(command("bench", "fragmentation", *options, "--json", "--record", tmp_path / "r").out)
    waste = next(row for row in out if row["case"] == "waste")
    assert 0 < waste["median"] < waste["must"] == 0.1


def test_a_wrong_workload_or_trace_is_one_line(command, tmp_path):
    options = ("bench", "fragmentation", "--record", tmp_path / "r")
    status, _, err = command(*options, "--workload", "mooncake")
    assert (status, "--trace FILE gives it" in err) == (2, True)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_length": 5, "output_length": 5}\n{"input_length": 0, "output_length": 5}\n')
    status, _, err = command(*options, "--trace", trace, "--workload", "mooncake")
    assert (status, "line 2: not a request" in err) == (2, True)
    status, _, err = command(*options, "--trace", tmp_path / "none", "--workload", "mooncake")
    assert (status, "cannot be read" in err) == (2, True)
    status, _, err = command(*options, "--workload", "window", "--allocator", "tear")
    words = "no allocator of these workloads is named by --allocator tear; there are reserve the maximum, "
    assert (status, words in err) == (2, True)
