"""`pagedkv bench`: what is printed and kept, and that nothing is claimed that was not measured."""

from __future__ import annotations

import json

import pytest

from pagedkv.bench import manager, record


@pytest.fixture
def quick(monkeypatch):
    """Cases that take no time to set up."""
    cases = tuple(case for case in manager.CASES if case.name.startswith(("decode step, 256", "fork")))
    monkeypatch.setattr(manager, "CASES", cases)
    return cases


def test_json_is_a_list_of_figures_with_machine_and_commit(command, quick, tmp_path):
    status, out, _ = command("bench", "manager", "--json", "--rounds", 3, "--record", tmp_path / "rows.jsonl")
    assert status == 0
    rows = json.loads(out)
    ours = [row for row in rows if row["who"] == "pagedkv" and row["case"] in {case.name for case in quick}]
    assert len(ours) == len(quick)
    for row in ours:
        assert 0 < row["best"] <= row["median"]
        assert row["rounds"] == 3
        assert row["limit"] > 0
        assert {"machine", "commit", "versions", "when"} <= set(row)
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == rows


def test_rows_name_a_commit_and_whether_files_differ_from_it():
    assert record.results() is not None
    assert len(record.commit().removesuffix("-dirty")) >= 7
    assert record.provenance()["versions"]["numpy"]


def test_an_installed_package_keeps_rows_only_where_it_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(record, "HERE", tmp_path)
    assert record.results() is None
    assert record.commit().startswith("pagedkv ")
    record.append([{"a": 1}], None)
    assert "--record" in capsys.readouterr().err


def test_bench_alone_lists_its_runners(command):
    status, out, _ = command("bench")
    assert status == 0
    assert "manager" in out
    assert command("bench", "manager", "--rounds", "0").status == 2
