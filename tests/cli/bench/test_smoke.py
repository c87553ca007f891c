"""Each benchmark runs once in its smallest form: its rows have the fields of bench/README.md, and they can be drawn."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedkv.bench import clock, plots
from pagedkv.bench.attention import cells, pool
from pagedkv.bench.attention import runner as attention_runner
from pagedkv.bench.bandwidth import ceilings, subjects
from pagedkv.bench.bandwidth import runner as bandwidth_runner
from pagedkv.bench.fragmentation import cells as fragmentation_cells
from pagedkv.bench.fragmentation import runner as fragmentation_runner
from pagedkv.bench.generate import models
from pagedkv.bench.generate import runner as generate_runner
from pagedkv.bench.manager import scaling
from pagedkv.bench.record import Row, axes_of
from pagedkv.bench.tiers import first_token, speed
from tests.cli.conftest import Command

PROVENANCE = {"machine", "commit", "versions", "when", "command"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pools and windows of memory be small, so that a run takes a second."""
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")
    monkeypatch.setattr(pool, "POOL_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidth_runner, "POOL_BYTES", 32 << 20)
    monkeypatch.setattr(ceilings, "WINDOW", 8 << 20)
    monkeypatch.setattr(clock, "bare_read", lambda: lambda: 10.0)
    monkeypatch.setattr(clock, "SECONDS_EACH", 0.1)


def check(name: str, rows: list[Row]) -> None:
    """Check the format of the rows of a run, and that at least one chart can be made of them."""
    assert rows
    for row in rows:
        assert list(row)[: list(row).index("unit")][-1] == "variant", "the variant stands last, after the axes"
        assert axes_of(row).keys().isdisjoint({"case", "variant"})
        if row["median"] is None:
            assert row["why_not"]
            continue
        if "turns" in row:
            counted = [turn for turn in row["turns"] if turn is not None]
            assert counted
            assert 0 <= row["clean"] <= len(row["turns"])
            low, high = sorted((row["best"], row["worst"]))
            assert low * 0.999 <= row["median"] <= high * 1.001
        assert row.get("must") is None or row["must"] > 0
    json.dumps(rows)
    assert plots.charts(name, rows)


def test_manager(command: Command, tmp_path: Path) -> None:
    kept, picture = tmp_path / "rows.jsonl", tmp_path / "manager.svg"
    options = ["--rounds", 2, "--case", "get and free", "--record", kept, "--json"]
    if importlib.util.find_spec("matplotlib"):
        options += ["--plot", picture]
    rows = json.loads(command("bench", "manager", *options).out)
    check("manager", rows)
    assert {"pagedkv", "lists of Python", "vLLM KVCacheManager"} <= {row["variant"] for row in rows}
    assert [json.loads(line) for line in kept.read_text().splitlines()] == rows
    assert set(rows[0]) >= PROVENANCE
    assert rows[0]["bench"] == "manager"
    assert "--plot" not in options or "<svg" in picture.read_text()
    told = command("bench", "manager", "--rounds", 1, "--case", "get and free", "--record", kept)
    assert "get and free a block" in told.out
    assert "not measured: SGLang RadixCache" in told.out


def test_manager_against_size() -> None:
    points = (scaling.Point(scaling.FREE, 1000), scaling.Point(scaling.CONTEXT, 16))
    rows: list[Row] = []
    scaling.measure(1, rows.append, points)
    check("manager", rows)


def test_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_runner, "CALLS", 2)
    small = cells.Cell(batch=2, context=64, heads=4, kv_heads=2, head_dim=32)
    one: dict[str, Any] = {"batch": 1, "new": 8}
    shapes = [{}, {"kv": "int8"}, {"kind": "prefill", **one}, {"kind": "write", **one}, {"kind": "call", "batch": 1}]
    asked = attention_runner.Asked(("cpu", "numba", "none"), 2)
    rows: list[Row] = []
    attention_runner.measure([replace(small, **shape) for shape in shapes], asked, rows.append)
    check("attention", rows)
    found = {(row["case"], row["variant"]) for row in rows if row["median"]}
    assert {
        ("decode", "ceiling"),
        ("decode", "sdpa"),
        ("write", "numba"),
        ("call", "direct"),
        ("call", "cpu, functional"),
    } <= found
    assert {row["why_not"] for row in rows if row["variant"] == "none"} == {"there is no kernel 'none'"}


def test_fragmentation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragmentation_runner, "CELLS", [
        replace(cell, quick=12) if cell.workload == "sharegpt" else
        replace(cell, quick=4) for cell in fragmentation_cells.CELLS
    ])  # fmt: skip
    rows: list[Row] = []
    workloads = ["sharegpt", "window", "beams-2", "samples-2"]
    fragmentation_runner.measure(rows.append, is_quick=True, only=workloads)
    check("fragmentation", rows)
    useful = [row for row in rows if row["case"] == "useful"]
    assert set(fragmentation_cells.MAIN) <= {row["variant"] for row in useful}
    for row in useful:
        parts = row["median"] + sum(row[part] for part in fragmentation_runner.PARTS[1:])
        assert parts == pytest.approx(100), "every byte of the memory has one use"
        assert row["finished"]


def test_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "LINEAR", {"norm_linear": 64})
    monkeypatch.setattr(subjects, "WIDE", 64)
    monkeypatch.setattr(subjects, "INTEGER_ROWS", 64)
    monkeypatch.setattr(subjects, "COLD", 1 << 16)
    cell = cells.Cell(batch=1, context=64, heads=4, kv_heads=2, head_dim=32)
    rows: list[Row] = []
    asked = bandwidth_runner.Asked(is_quick=True, cells=(cell,), threads=(1,), kernels=("cpu",), turns=2)
    bandwidth_runner.measure(rows.append, asked)
    check("bandwidth", rows)
    assert {row["case"] for row in rows} >= {*bandwidth_runner.CASES, "state"} - {"gather_kv"}


def test_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    has_transformers = importlib.util.find_spec("transformers")
    monkeypatch.setattr(generate_runner, "OVERHEADS", (1, 4))
    monkeypatch.setattr(generate_runner, "STEPS", 3)
    monkeypatch.setattr(generate_runner, "TOKENS", 2)
    rows: list[Row] = []
    generate_runner.measure([(1, 32)], 2, rows.append, models.TINY)
    check("generate", rows)
    decode = {row["variant"] for row in rows if row["case"] == "decode"}
    assert decode >= ({"pagedkv", "StaticCache", "DynamicCache"} if has_transformers else {"pagedkv"})
    assert all(row["over_bound"] > 0 for row in rows if row["case"] == "decode" and row["median"])


@pytest.mark.slow
def test_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from pagedkv.bench.transformers import runner

    for name, value in {"LAYERS": 1, "SLOW_LAYERS": 1, "STEPS": 4, "PROMPTS": {(1, 32): 2}, "BATCH": (2, 32)}.items():
        monkeypatch.setattr(runner, name, value)
    monkeypatch.setattr(runner, "memory", lambda variant, shape: 1.0)
    rows: list[Row] = []
    runner.measure([(1, 64)], 2, rows.append)
    check("transformers", rows)
    assert {"DynamicCache", "StaticCache", "pages", "pages int8"} <= {row["variant"] for row in rows}


def test_tiers(tmp_path: Path) -> None:
    rows = [
        *speed.rows(tmp_path, 2, sizes=(16_384,), moved=1 << 20),
        *first_token.rows(tmp_path, 2, context=200, config=models.TINY),
    ]
    check("tiers", rows)
    assert [row["variant"] for row in rows if row["case"] == "first token"] == [
        "computed", "pagedkv, pool", "pagedkv, host", "pagedkv, disk"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("manager", "--case", "nothing"), "no case is named by --case nothing; the cases are: decode step"),
        (("attention", "--heads", "32/5"), "--heads is '32/5'; give query heads / kv heads, such as 32/8"),
        (("attention", "--kind", "x"), "--kind x: there is no such kind; there are decode, prefill, write, call"),
        (("fragmentation", "--workload", "x"), "--workload x: there is no such workload; there are sharegpt"),
        (("bandwidth", "--case", "x"), "--case x: there is no such case; there are ceiling"),
        (("generate", "--shape", "8"), "--shape is '8'; give sequences x tokens of context, such as 8x2048"),
        (("tiers", "--part", "x"), "--part x: there is no such part; there are speed"),
        (("all", "--only", "x"), "--only x: there is no such benchmark; there are manager"),
        (("manager", "--record", "/nowhere/rows"), "--record is /nowhere/rows, and there is no folder /nowhere"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(command: Command, argv: tuple[str, ...], words: str) -> None:
    status, out, err = command("bench", *argv)
    assert status == 2
    assert not out
    assert words in " ".join(err.split())


def test_a_picture_without_matplotlib_is_refused_first(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedkv.cli.bench import run

    monkeypatch.setattr(run, "find_spec", lambda name: None)
    assert "install pagedkv[plot]" in command("bench", "manager", "--plot", "x.svg").err
