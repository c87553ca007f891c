"""`pagedkv bench compare`: ratios with intervals, and a status that a noisy machine does not set."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from pagedkv.bench.clock import Timing
from pagedkv.bench.compare import interval
from pagedkv.bench.generate import runner as generate
from pagedkv.bench.vllm import runner as vllm

LOTS = np.random.default_rng(1)


@pytest.fixture(autouse=True)
def _same_noise(monkeypatch):
    """Give a test the same noise, whichever tests ran before it."""
    monkeypatch.setitem(globals(), "LOTS", np.random.default_rng(1))


def turns(median: float, noise: float = 0.02, count: int = 15) -> list[float]:
    found = median * (1 + noise * LOTS.standard_normal(count))
    return [float(turn) for turn in found - np.median(found) + median]


def row(case: str, median: float, who: str = "pagedkv", **more: object) -> dict[str, object]:
    figures = {"bench": "manager", "who": who, "case": case, "unit": "us", "median": median, "turns": turns(median)}
    return figures | {"machine": "here", "when": "now", "commit": "c"} | more


def kept(folder: Path, name: str, rows: list[dict[str, object]]) -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_share_that_fell_beside_a_peer_fell(command, tmp_path):
    """Of a share the larger figure is the better one, of a time the smaller."""
    peer = row("useful", 73.6, "peer", unit="%", turns=[73.6] * 15)
    both = [
        kept(tmp_path, name, [row("useful", ours, unit="%", turns=[ours] * 15), peer])
        for name, ours in (("a", 97.0), ("b", 48.5))
    ]
    status, out, _ = command("bench", "compare", *both, "--relative", "--json")
    (only,) = json.loads(out)
    assert (status, only["fell"]) == (1, True)
    assert only["ratio"] == pytest.approx(0.5)


def test_a_figure_that_fell_by_more_than_the_noise_is_status_1(command, tmp_path):
    first = kept(tmp_path, "a", [row("step", 50.0), row("fork", 10.0)])
    second = kept(tmp_path, "b", [row("step", 100.0), row("fork", 10.1)])
    status, out, _ = command("bench", "compare", first, second, "--json")
    assert status == 1
    worst, other = json.loads(out)
    assert (worst["name"], worst["fell"], other["fell"]) == ("step, pagedkv", True, False)
    assert worst["ratio"] == pytest.approx(0.5)
    assert worst["low"] < 0.5 < worst["high"] < 0.6
    status, out, _ = command("bench", "compare", second, first)
    assert status == 0  # it rose
    assert "rose" in out


def test_a_fall_within_the_noise_is_no_fall(command, tmp_path):
    first = kept(tmp_path, "a", [row("step", 50.0, turns=turns(50.0, 0.2))])
    second = kept(tmp_path, "b", [row("step", 53.0, turns=turns(53.0, 0.2))])
    assert command("bench", "compare", first, second).status == 0


def test_too_few_turns_are_shown_and_not_judged(command, tmp_path):
    first = kept(tmp_path, "a", [row("step", 50.0, turns=[50.0, 50.0])])
    second = kept(tmp_path, "b", [row("step", 500.0, turns=[500.0, 500.0])])
    status, out, _ = command("bench", "compare", first, second)
    assert status == 0
    assert "too few clean turns" in out


def test_relative_figures_survive_a_slower_machine_and_see_a_slower_manager(command, tmp_path):
    """On a machine of half the speed, ours and the peer's take twice as long."""
    first = kept(tmp_path, "a", [row("step", 50.0), row("step", 500.0, "vLLM")])
    slower = [row("step", 100.0, machine="there"), row("step", 1000.0, "vLLM", machine="there")]
    second = kept(tmp_path, "b", slower)
    assert command("bench", "compare", first, second).status == 1
    assert command("bench", "compare", first, second, "--relative").status == 0
    third = kept(tmp_path, "c", [row("step", 200.0, machine="there"), slower[1]])
    assert command("bench", "compare", first, third, "--relative", "--tolerance", 0.3).status == 1


def test_a_relative_figure_is_that_of_its_turns(command, tmp_path):
    """The machine is slow in 8 of 15 turns; the peer lacks two of these, so that its median is that of a fast turn."""
    fast, slow = turns(50.0, count=7), turns(100.0, count=8)
    peer = [*(2 * turn for turn in fast), *(2 * turn for turn in slow[:6]), None, None]
    first = kept(tmp_path, "a", [row("step", 50.0), row("step", 100.0, "lists")])
    both = [row("step", 100.0, turns=[*fast, *slow]), row("step", 100.0, "lists", turns=peer)]
    status, out, _ = command("bench", "compare", first, kept(tmp_path, "b", both), "--relative", "--json")
    (only,) = json.loads(out)
    assert (status, only["ratio"]) == (0, pytest.approx(1.0, abs=0.03))
    assert only["low"] <= only["ratio"] <= only["high"]


def test_a_bound_is_a_peer_too(command, tmp_path):
    def rows(share: float, over: float, clean: int = 15) -> list[dict[str, object]]:
        cell = {"kind": "decode", "batch": 1, "context": 64, "block_size": 16, "threads": 1, "dtype": "bfloat16"}
        cell |= {"kv": "", "heads": 4, "kv_heads": 2, "head_dim": 64, "lengths": "uniform", "pages": "permuted"}
        about = {"machine": "here", "when": "now"}
        ceiling = turns(80.0)
        ours = {"us": 80 / share, "of_ceiling": share, "clean": clean, "turns": [turn / share for turn in ceiling]}
        results = {"cpu": ours, "ceiling": {"us": 80.0, "of_ceiling": 1.0, "clean": 15, "turns": ceiling}}
        step = {"case": "decode", "batch": 1, "context": 64, "variant": "pagedkv", "unit": "ms", "median": 9.0}
        step |= {"over_bound": over, "ratios": turns(over)}
        return [{"bench": "attention", "cell": cell, "results": results} | about, {"bench": "generate"} | step | about]

    good = kept(tmp_path, "good", rows(0.9, 1.1))
    status, out, _ = command("bench", "compare", good, kept(tmp_path, "bad", rows(0.45, 2.2)), "--relative", "--json")
    assert status == 1
    assert [change["ratio"] for change in json.loads(out)] == [pytest.approx(0.5, abs=0.02)] * 2
    assert command("bench", "compare", good, good, "--relative").status == 0
    disturbed = kept(tmp_path, "disturbed", rows(0.45, 1.1, clean=0))
    assert command("bench", "compare", good, disturbed, "--relative").status == 0
    attention, step = rows(0.45, 1.1)
    other = kept(tmp_path, "other", [attention | {"isa": "avx2"}, step])  # other kernels: only the step is compared
    status, out, _ = command("bench", "compare", good, other, "--relative", "--json")
    assert (status, [change["bench"] for change in json.loads(out)]) == (0, ["generate"])


def test_files_without_a_common_cell_are_one_line(command, tmp_path):
    first, second = kept(tmp_path, "a", [row("step", 50.0)]), kept(tmp_path, "b", [row("fork", 50.0)])
    status, _, err = command("bench", "compare", first, second)
    assert status == 2
    assert "compare runs of the same benchmark" in err
    assert command("bench", "compare", first, tmp_path / "none").status == 2


def test_an_interval_holds_the_true_ratio_about_95_times_of_100():
    hits = 0
    for _ in range(200):
        before, after = (tuple(100 + 5 * LOTS.standard_normal(25)) for _ in range(2))
        low, high = interval(before, after, LOTS)
        hits += low <= 1 <= high
    assert 180 <= hits <= 200


def test_a_figure_that_is_counted_is_judged_without_turns(command, tmp_path):
    """Of memory that holds tokens more is better, of frames that are wasted less; a copy is timed and has turns."""
    about = {"bench": "fragmentation", "workload": "sharegpt", "variant": "pagedkv", "machine": "here", "when": "now"}

    def kept_with(useful: float, waste: float) -> Path:
        rows = [{"case": "useful", "unit": "%", "median": useful}, {"case": "waste", "unit": "% of mapped frames"}]
        rows[1]["median"] = waste
        cells = [{"case": row.pop("case")} | about | row for row in rows]
        return kept(tmp_path, f"{useful} {waste}", cells)

    good = kept_with(96.0, 2.0)
    status, out, _ = command("bench", "compare", good, good)
    assert (status, "0 of 2 ratios fell" in out) == (0, True)
    assert command("bench", "compare", good, kept_with(80.0, 2.0)).status == 1
    assert command("bench", "compare", good, kept_with(96.0, 4.0)).status == 1
    assert command("bench", "compare", kept_with(80.0, 4.0), good).status == 0


def test_rows_of_models_in_turns_are_judged(command, tmp_path):
    """Rows of generate, transformers and vllm keep each turn, so that two runs of one machine can be compared."""
    # It imports triton, which tests/kernels/triton must be the first to do.
    from pagedkv.bench.transformers import runner as transformers

    timing, host = (Timing(x, x, 5, 5, (x,) * 5) for x in (2.0, 4.0))
    found: list[dict[str, object]] = []
    generate._report_times(found.append, "decode", (1, 64), {"pagedkv": (timing, [1.0] * 5)}, 1.0, "gb_per_s")
    transformers.report_times(
        found.append, "decode", (1, 64), {"pages": timing, "DynamicCache": host}, lambda s: 1 / s, "tokens/s"
    )
    vllm._report("decode", (1, 64), "ms a step", {"vLLM": host, "pagedkv": timing}, found.append, None)
    names = ["generate", *["transformers"] * 2, *["vllm"] * 2]
    rows = [
        {"bench": name} | one | {"machine": "here", "when": "now", "commit": "c"}
        for name, one in zip(names, found, strict=True)
    ]
    same = kept(tmp_path, "same", rows)
    status, out, _ = command("bench", "compare", same, same)
    assert (status, "0 of 3 ratios fell" in out) == (0, True)
    status, out, _ = command("bench", "compare", same, same, "--relative")
    assert (status, "0 of 4 ratios fell" in out) == (0, True)


@pytest.mark.parametrize("isa", ["avx512_bf16", "avx2"])
def test_the_committed_baseline_has_ratios_of_the_manager_and_of_attention(command, isa):
    baseline = Path(__file__).parents[3] / f"bench/results/baseline-{isa}.jsonl"
    lines = map(json.loads, baseline.read_text().splitlines())
    assert {line["isa"] for line in lines if line["bench"] == "attention"} == {isa}
    status, out, _ = command("bench", "compare", baseline, baseline, "--relative", "--json")
    assert status == 0
    judged = [change for change in json.loads(out) if change["low"] is not None]
    assert {change["bench"] for change in judged} == {"manager", "attention"}
    assert all(change["ratio"] == 1 for change in judged)


@pytest.mark.parametrize("kind", ["device", "pipe", "large"])
def test_only_regular_files_of_a_size_are_compared(kind, command, tmp_path):
    path, good = tmp_path / "a", kept(tmp_path, "b", [row("step", 50.0)])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**40)  # a hole
    done = command("bench", "compare", path, good)
    assert done.status == 2
    assert f"{path} cannot be read" in done.err
