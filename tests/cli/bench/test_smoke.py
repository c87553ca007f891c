"""Each benchmark runs once in its smallest form: its rows have the fields of bench/README.md, and they can be drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedkv.bench import clock, plots
from pagedkv.bench.attention import cells, pool
from pagedkv.bench.attention import runner as attention
from pagedkv.bench.bandwidth import ceilings, delta, subjects
from pagedkv.bench.bandwidth import runner as bandwidth
from pagedkv.bench.fragmentation import cells as fragmentation_cells
from pagedkv.bench.fragmentation import runner as fragmentation
from pagedkv.bench.generate import models
from pagedkv.bench.generate import runner as generate
from pagedkv.bench.hints import runner as hints
from pagedkv.bench.manager import scaling
from pagedkv.bench.record import Row
from pagedkv.bench.states import runner as states
from pagedkv.bench.tiers import first_token, speed
from tests.cli.conftest import Command

CELL = cells.Cell(batch=2, context=64, heads=4, kv_heads=2, head_dim=32)
ONE: dict[str, Any] = {"batch": 1, "new": 8}
SHAPES = [{}, {"kv": "int8"}, {"kind": "prefill", **ONE}, {"kind": "write", **ONE}, {"kind": "call", "batch": 1}]
SMALL: tuple[tuple[Any, str, Any], ...] = (
    (pool, "POOL_BYTES", 1 << 20), (bandwidth, "POOL_BYTES", 32 << 20), (ceilings, "WINDOW", 8 << 20),
    (clock, "bare_read", lambda: lambda: 10.0), (clock, "SECONDS_EACH", 0.1), (attention, "CALLS", 2),
    (subjects, "LINEAR", {"norm_linear": 64}), (subjects, "WIDE", 64), (subjects, "INTEGER_ROWS", 64),
    (subjects, "COLD", 1 << 16), (delta, "LAYERS", 1), (delta, "HEADS", 16),
    (generate, "OVERHEADS", (1, 4)), (generate, "STEPS", 3), (generate, "TOKENS", 2),
    (fragmentation, "CELLS", [replace(cell, quick=12 if cell.workload == "sharegpt" else 4)
                              for cell in fragmentation_cells.CELLS]),
)  # fmt: skip


def _transformers(report: Callable[[Row], None], folder: Path) -> None:
    runner = pytest.importorskip("pagedkv.bench.transformers.runner")
    values = {"LAYERS": 1, "SLOW_LAYERS": 1, "STEPS": 4, "PROMPTS": {(1, 32): 2}, "BATCH": (2, 32)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (values | {"memory": lambda *_: 1.0}).items():
            patch.setattr(runner, name, value)
        runner.measure([(1, 64)], 2, report)


RUNS: dict[str, tuple[Callable[[Callable[[Row], None], Path], object], set[tuple[str, str]]]] = {
    "manager": (
        lambda report, _: scaling.measure(1, report, (scaling.Point(scaling.FREE, 1000),)),
        {("step of 64 sequences, 1,000 frames, free", "pagedkv")},
    ),
    "attention": (
        lambda report, _: attention.measure(
            [replace(CELL, **shape) for shape in SHAPES], attention.Asked(("cpu", "numba"), 2), report),
        {("decode", "ceiling"), ("decode", "sdpa"), ("write", "numba"), ("call", "direct")},
    ),
    "fragmentation": (
        lambda report, _: fragmentation.measure(
            report, is_quick=True, only=["sharegpt", "window", "beams-2", "samples-2"]),
        {("useful", name) for name in fragmentation_cells.MAIN} | {("saved", "pagedkv"), ("waste", "pagedkv")},
    ),
    "states": (
        lambda report, _: states.measure(report, is_quick=True, only=["chat"], rules=["vLLM", "every"]),
        {("chat", "vLLM 0.33, blocks of 528"), ("chat", "every 128")},
    ),
    "hints": (
        lambda report, _: hints.measure(report, is_quick=True),
        {("agents", "LRU"), ("agents", "optimum"), ("agents", "pagedkv")},
    ),
    "bandwidth": (
        lambda report, _: bandwidth.measure(report, bandwidth.Asked(
            is_quick=True, cells=(replace(CELL, batch=1),), threads=(1,), kernels=("cpu",), turns=2)),
        {(case, "pagedkv") for case in ("decode", "write_kv", "copy_frames", "linear", "delta")}
        | {("ceiling", "memory")},
    ),
    "generate": (
        lambda report, _: generate.measure([(1, 32)], 2, report, models.TINY),
        {("decode", "pagedkv"), ("overhead", "pagedkv"), ("prefill", "pagedkv")},
    ),
    "tiers": (
        lambda report, folder: [*map(report, [
            *speed.rows(folder, 2, sizes=(16_384,), moved=1 << 20),
            *first_token.rows(folder, 2, context=200, config=models.TINY)])],
        {("first token", name) for name in ("computed", "pagedkv, pool", "pagedkv, disk")},
    ),
    "transformers": (_transformers, {("decode", name) for name in ("StaticCache", "pages", "pages int8")}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pools and windows of memory be small, so that a run takes a second."""
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")
    for module, name, value in SMALL:
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "transformers" else ()) for n in RUNS])
def test_rows_of_a_run_have_one_form_and_a_picture(name: str, tmp_path: Path) -> None:
    rows: list[Row] = []
    run, wanted = RUNS[name]
    run(rows.append, tmp_path)
    for row in rows:
        assert list(row)[: list(row).index("unit")][-1] == "variant", "the variant stands last, after the axes"
        if row["median"] is None:
            assert row["why_not"]
        elif "turns" in row:
            assert 0 <= row["clean"] <= len(row["turns"]) >= len([turn for turn in row["turns"] if turn]) > 0
            low, high = sorted((row["best"], row["worst"]))
            assert low * 0.999 <= row["median"] <= high * 1.001
        if "reserved" in row:
            parts = row["median"] + sum(row[part] for part in fragmentation.PARTS[1:])
            assert parts == pytest.approx(100), "every byte of the memory has one use"
    json.dumps(rows)
    assert wanted <= {(row["case"], row["variant"]) for row in rows if row["median"]}
    assert plots.charts(name, rows)


def test_rows_are_kept_printed_and_drawn(command: Command, tmp_path: Path) -> None:
    kept, picture = tmp_path / "rows.jsonl", tmp_path / "manager.svg"
    options = ("--rounds", 1, "--case", "get and free", "--record", kept)
    rows = json.loads(command("bench", "manager", *options, "--json", "--plot", picture).out)
    assert [json.loads(line) for line in kept.read_text().splitlines()] == rows
    assert {"machine", "commit", "versions", "when", "command"} <= set(rows[0])
    assert {"pagedkv", "lists of Python", "vLLM KVCacheManager"} <= {row["variant"] for row in rows}
    assert "Get and free a block, by 1,000: less is better" in picture.read_text()
    assert "get and free a block" in command("bench", "manager", *options).out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("manager", "--case", "nothing"), "no case is named by --case nothing; the cases are: decode step"),
        (("attention", "--heads", "32/5"), "--heads is '32/5'; give query heads / kv heads, such as 32/8"),
        (("attention", "--dtype", "int3"), "--dtype is 'int3'; give one of float32, bfloat16, float16"),
        (("fragmentation", "--trace", "/none"), "--trace /none cannot be read: No such file"),
        (("states", "--rule", "TGI"), "no rule is named by --rule TGI; there are: vLLM 0.33, blocks of 528; vLLM"),
        (("generate", "--shape", "8"), "--shape is '8'; give sequences x tokens of context, such as 8x2048"),
        (("manager", "--record", "/nowhere/rows"), "--record is /nowhere/rows, and there is no folder /nowhere"),
        (("manager", "--plot", "x.png"), "--plot is x.png; charts are SVG: give a name that ends in .svg"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(command: Command, argv: tuple[str, ...], words: str) -> None:
    status, out, err = command("bench", *argv)
    assert status == 2
    assert not out
    assert words in " ".join(err.split())
