"""`pagedkv bench`: the printed table and the kept rows; a figure is claimed only if it was measured."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json

import pytest

from pagedkv.bench.manager import peers, runner, scaling
from pagedkv.cli.app import main

STAND_IN = {
    "engine/sequence.py": """
class Sequence:
    def __init__(self, ids): self.ids, self.num_cached_tokens = list(ids), 0
    def __len__(self): return len(self.ids)
    def append_token(self, token): self.ids.append(token)
""",
    "engine/block_manager.py": """
class BlockManager:
    def __init__(self, num_blocks, block_size): print("peers may talk")
    def can_allocate(self, sequence): return 0
    def allocate(self, sequence, cached): pass
    def deallocate(self, sequence): pass
    def hash_blocks(self, sequence): pass
    def can_append(self, sequence): return True
    def may_append(self, sequence): pass
""",
    "__init__.py": "raise ImportError('wants a GPU')",
}
"""A stand-in for the modules of nano-vllm: its manager does nothing."""


@pytest.fixture(scope="module")
def quick():
    """Measure only two cases, whose state is built quickly."""
    cases = tuple(case for case in runner.CASES if case.name.startswith(("decode step, 256", "fork")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "CASES", cases)
        yield cases


@pytest.fixture(scope="module")
def rows(quick, tmp_path_factory):
    """The rows that --json prints after three rounds, with a stand-in for nano-vllm."""
    tmp_path, printed = tmp_path_factory.mktemp("rows"), io.StringIO()
    for name, source in STAND_IN.items():
        path = tmp_path / "nanovllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(SystemExit) as end:
            main(["bench", "manager", "--json", "--rounds", "3", "--record", str(tmp_path / "rows.jsonl")])
    assert end.value.code == 0
    found = json.loads(printed.getvalue())
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == found
    return found


def test_a_row_has_a_figure_of_ours_for_each_case_with_machine_and_commit(rows, quick):
    ours = [row for row in rows if row["who"] == "pagedkv"]
    assert [row["case"] for row in ours] == [case.name for case in quick]
    for row in ours:
        assert 0 < row["best"] <= row["median"]
        assert row["runs"] == 3 * runner.COUNTED
        assert row["limit"] > 0
        assert len(row["turns"]) == 3
        assert {"bench", "machine", "commit", "versions", "when", "command"} <= set(row)


def test_the_first_runs_of_a_turn_do_not_count():
    case = runner.Case("a case", "us", None, 1, lambda: lambda: 0.0, skipped=2)
    figure = runner.Figure("a manager", case.name, case.unit)
    figure.add({"seconds": [9.0, 9.0, 1e-6, 2e-6, 3e-6]}, case)
    figure.settle()
    assert (figure.median, figure.runs) == (pytest.approx(2.0), 3)


def test_a_peer_that_is_there_is_measured_in_the_same_run(rows):
    (row,) = (row for row in rows if row["who"].startswith("nano-vllm"))
    assert row["case"] == "decode step, 256 sequences"
    assert row["median"] > 0
    assert row["runs"] == 3 * runner.COUNTED
    assert row["version"] == "from source"


def test_lists_of_python_are_a_peer_that_every_machine_has(rows):
    (row,) = (row for row in rows if row["who"] == peers.LISTS)
    assert row["median"] > 0
    assert row["version"].startswith("Python 3.")


def test_lists_take_a_block_for_each_16_tokens_and_give_them_back():
    """A pool that holds just the blocks of all sequences at their longest: one block more would fail."""
    run = peers.Lists().decode(8, 8 * (peers.GROWTH // peers.BLOCK + 1))
    assert all(run() > 0 for _ in range(3 * peers.GROWTH))


@pytest.mark.parametrize(("peer", "module"), [("vLLM", "vllm"), ("SGLang", "sglang")])
def test_the_absence_of_a_peer_is_reported(rows, peer, module):
    if importlib.util.find_spec(module):
        pytest.skip(f"{module} is installed")
    (row,) = (row for row in rows if row["who"].startswith(peer))
    assert row["median"] is None
    assert f"No module named '{module}'" in row["why_not"]


def test_the_table_shows_figures_limits_and_absent_peers(command, quick, tmp_path):
    status, out, _ = command("bench", "manager", "--rounds", 1, "--record", tmp_path / "rows.jsonl")
    assert status == 0
    for word in ("decode step, 256 sequences", "30", "vLLM KVCacheManager", "No module named"):
        assert word in out


def test_a_case_is_measured_alone_and_an_unknown_one_is_answered_with_the_cases(command, quick, tmp_path):
    options = ("--quick", "--case", "fork", "--json", "--record", tmp_path / "rows.jsonl")
    status, out, _ = command("bench", "manager", *options)
    assert (status, {row["case"] for row in json.loads(out)}) == (0, {"fork 4,096 pages"})
    status, _, err = command("bench", "manager", "--case", "forks", "--record", tmp_path / "rows.jsonl")
    assert status == 2
    assert "the cases are: decode step, 256 sequences" in err


def test_a_python_that_cannot_be_started_is_named(command, quick, tmp_path):
    status, _, err = command("bench", "manager", "--peers-python", tmp_path / "python")
    assert status == 2
    assert "--peers-python" in err


@pytest.mark.many_steps
def test_a_plot_shows_a_step_against_pool_size_and_context_length(command, tmp_path, monkeypatch):
    small = tuple(point for point in scaling.POINTS if point.size <= 1024)
    monkeypatch.setattr(scaling.measure, "__defaults__", (small,))
    picture = tmp_path / "scaling.svg"
    options = ("--scaling", "--rounds", 2, "--record", tmp_path / "rows.jsonl")
    status, out, _ = command("bench", "manager", *options, "--plot", picture)
    assert status == 0
    assert "from the cheapest to the dearest" in out
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [len(row["turns"]) for row in rows] == [2] * len(small)
    text = picture.read_text()
    assert "<title" in text
    assert "frames in the pool" in text
    status, _, err = command("bench", "manager", *options, "--plot", tmp_path / "plot.docx")
    assert status == 2
    assert "name a file that ends in .svg" in err


def test_bench_alone_lists_its_runners(command):
    status, out, _ = command("bench")
    assert status == 0
    assert "manager" in out
    assert command("bench", "manager", "--rounds", "0").status == 2
