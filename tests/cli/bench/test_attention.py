"""`pagedkv bench attention`: rows name the measured and the refused variants, ratios come from one run, and the grid
has the promised shapes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from pagedkv import paged_attention
from pagedkv.bench import clock
from pagedkv.bench.attention import cells, musts, pool, runner
from pagedkv.bench.attention.cells import Cell
from pagedkv.bench.attention.runner import CEILING, DIRECT, PRODUCT, SDPA, VLLM, Row
from pagedkv.bench.clock import Timing
from pagedkv.cli.bench import attention

TINY = ["--batch", "2", "--context", "64", "--threads", "1", "--repetitions", "3"]


@pytest.fixture(autouse=True)
def _small_pool(monkeypatch):
    monkeypatch.setattr(pool, "POOL_BYTES", 8 << 20)


@pytest.mark.parametrize("kind", ["decode", "prefill", "write", "call"])
def test_a_row_holds_each_variant_or_the_reason(kind, command, tmp_path):
    axes = TINY if kind == "decode" else ["--context", "64", "--threads", "1", "--repetitions", "3"]
    options = ("--json", "--kind", kind, *axes, "--record", tmp_path / "rows.jsonl")
    status, out, err = command("bench", "attention", *options)
    assert status == 0, err
    (row,) = json.loads(out)
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == [row]
    assert {"bench", "machine", "commit", "versions", "when", "command", "isa"} <= set(row)
    bound = {"decode": {CEILING, SDPA}, "prefill": {PRODUCT, SDPA}, "write": {CEILING}, "call": {DIRECT}}[kind]
    ours = {"cpu"} if kind == "call" else {"cpu", "numba", "reference"}
    assert set(row["results"]) | set(row["refused"]) == ours | bound | ({VLLM} if kind != "call" else set())
    assert row["refused"].get(VLLM, "no --vllm-python") == "no --vllm-python"
    assert all(result["us"] > 0 and 0 <= result["clean"] <= result["repetitions"] for result in row["results"].values())


def test_a_product_stands_beside_a_prefill_only_where_torch_has_a_fast_one(monkeypatch):
    cell, seen = Cell(kind="prefill", new=16, context=16, dtype="float16"), []
    monkeypatch.setattr(torch, "mm", lambda a, b, out: seen.append({a.dtype, b.dtype, out.dtype}))
    monkeypatch.setattr(runner, "is_slow_in_torch", lambda dtype: dtype == torch.float16)
    assert "multiplies float16 without oneDNN" in runner.BOUNDS["prefill"](cell, None)
    runner.BOUNDS["prefill"](replace(cell, dtype="bfloat16"), None)()()
    assert seen == [{torch.bfloat16}]


def test_a_python_without_vllm_is_reported(command):
    options = (*TINY, "--kernels", "reference", "--vllm-python", sys.executable, "--record", "/dev/null")
    status, out, _ = command("bench", "attention", "--json", *options)
    assert status == 0
    assert json.loads(out)[0]["refused"][VLLM].startswith("the vLLM worker ended with status 1")


def test_a_plot_is_drawn_where_it_is_told(command, tmp_path):
    options = (*TINY, "--kernels", "reference", "--record", "/dev/null", "--plot", tmp_path / "roof.svg")
    status, _, err = command("bench", "attention", *options)
    assert status == 0, err
    text = (tmp_path / "roof.svg").read_text()
    assert "share of a bare read" in text
    assert "Roofline" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--heads", "32"], "--heads is '32'; give query heads / kv heads"),
        (["--kind", "decod"], "no cell of the grid is of that kind"),
        (["--part", "2"], "--part is '2'; give a part and the number of parts"),
        (["--part", "4/3"], "--part is '4/3', but of 3 parts the last is 3/3"),
        (["--context", "0"], "--context"),
        (["--batch", "0"], "--batch"),
        (["--block-size", "0"], "--block-size"),
        (["--head-dim", "0"], "--head-dim"),
        (["--threads", "0"], "--threads"),
    ],
)
def test_a_wrong_option_is_one_line(options, text, command):
    status, _, err = command("bench", "attention", *options, "--record", "/dev/null")
    assert status == 2
    assert text in err


def test_each_step_reads_other_frames_and_the_lengths_add_up():
    for cell in (
        Cell(batch=3, context=100),
        Cell(batch=5, context=200, lengths="zipf"),
        Cell(batch=2, context=50, kv="int4"),
    ):
        ours = pool.Pool(cell)
        frames = ours.draw()
        assert len(set(frames.tolist())) == len(frames) == sum(ours.pages)
        assert not torch.equal(frames, ours.draw())
        assert sum(cell.lens()) == cell.batch * cell.context
        batch = ours.batch(frames)
        q = torch.randn(cell.batch, 32, 128).bfloat16()
        assert paged_attention(q, ours.layer, batch, backend="reference").isfinite().all()


def test_pools_in_one_region_are_the_same_bytes_each_in_its_own_type():
    region = pool.region_of(max(map(pool.Pool.bytes_of, cells.quick([1]))))
    for cell in (Cell(batch=1, context=100, dtype=dtype, kv=kv) for dtype, kv in cells._TYPES):
        ours = pool.Pool(cell, region)
        assert ours.bytes.data_ptr() == ours.layer.k.data_ptr() == region.data_ptr()
        assert len(ours.bytes) == ours.num_frames * ours.frame_bytes <= len(region)
        q = torch.randn(1, 32, 128).to(torch.bfloat16 if cell.kv else ours.layer.k.dtype)
        assert paged_attention(q, ours.layer, ours.batch(ours.draw()), backend="reference").isfinite().all()


def test_the_parts_of_a_grid_are_its_groups_each_once():
    def choice(part: str) -> list[Cell]:
        return attention.Choice(True, [], {}, [1, 2], part).cells()

    whole, parts = choice("1/1"), [choice(f"{i}/5") for i in range(1, 6)]
    assert sorted(map(str, whole)) == sorted(str(cell) for part in parts for cell in part)
    groups = [{cell.group() for cell in part} for part in parts]
    assert sum(map(len, groups)) == len(set().union(*groups))


def test_pages_in_order_ascend():
    ours = pool.Pool(Cell(batch=1, context=100, pages="in order"))
    frames = ours.draw()
    # the frames may wrap around the end of the pool once
    assert set(frames.diff().tolist()) <= {1, 1 - ours.num_frames}


def test_both_grids_hold_the_promised_shapes():
    quick, full = cells.quick([1, 2]), cells.full([1])
    assert {cell.kind for cell in quick} == {cell.kind for cell in full} == {"decode", "prefill", "write", "call"}
    decodes = [cell for cell in full if cell.kind == "decode"]
    assert {(c.heads, c.kv_heads) for c in decodes} >= {(32, 8), (16, 16), (28, 4), (64, 8), (32, 1)}
    assert {c.block_size for c in decodes} >= {16, 32, 128}
    assert {(c.context, c.batch) for c in decodes} >= {(n, b) for n in (1024, 4096, 16384, 65536) for b in (1, 8, 32)}
    assert {c.kv or c.dtype for c in decodes} == {"bfloat16", "float32", "float16", "fp8_e4m3", "int8", "int4"}
    assert len(set(full)) == len(full)


def rows_of(**seconds):
    base = cells.BASE
    twin = {"cpu": Timing(1e-3, 1e-3, 9, 9), CEILING: Timing(8e-4, 8e-4, 9, 9)}
    return [
        Row(base, {name: Timing(x, x, 9, 9) for name, x in seconds.items()}),
        Row(replace(base, block_size=128), twin),
        Row(replace(base, kv="int8"), {"cpu": Timing(5e-4, 5e-4, 9, 9)}),
    ]


def test_promises_compare_within_a_run_and_name_the_worst():
    found = {promise.text: promise for promise in musts.promises(rows_of(cpu=2e-3, ceiling=1e-3, vllm=6e-3))}
    ceiling = found["bfloat16 decode / ceiling, 1 thr"]
    assert (ceiling.found, ceiling.kept, ceiling.cells) == (0.5, False, 2)
    assert "block 16 " in ceiling.where
    assert found["bfloat16 decode / vLLM"].found == pytest.approx(3.0)
    assert found["int8 decode / ours in bfloat16"].found == pytest.approx(4.0)
    small = found["block 16 / block 128"]
    assert small.found == pytest.approx(0.5)
    assert small.bare == pytest.approx(0.8)  # plain reads of smaller blocks are slower, too
    assert ceiling.bare is None
    assert "bfloat16 prefill / vLLM" not in found  # it was not measured


def test_a_disturbed_cell_is_counted_as_unclean_and_left_out():
    rows = rows_of(cpu=2e-3, ceiling=1e-3, vllm=6e-3)
    rows[0].timings["cpu"] = Timing(2e-3, 1e-3, clean=0, repetitions=9)
    found = {promise.text: promise for promise in musts.promises(rows)}
    ceiling, vllm = found["bfloat16 decode / ceiling, 1 thr"], found["bfloat16 decode / vLLM"]
    assert (ceiling.found, ceiling.kept, ceiling.cells, ceiling.unclean) == (pytest.approx(0.8), True, 1, 1)
    # no other cell is there: the disturbed value is shown, as unclean
    assert (vllm.found, vllm.cells, vllm.unclean) == (pytest.approx(3.0), 0, 1)
    assert found["block 16 / block 128"].cells == 0  # one of its two cells is disturbed


def test_turns_are_interleaved_and_disturbed_repetitions_do_not_count(monkeypatch):
    # two warm-up turns each; then a: disturbed, clean, clean; b: three clean
    warm_up, order = [(7.0, True)] * 2, []
    clock_says = {
        "a": iter([*warm_up, (5.0, False), (0.2, True), (0.4, True)]),
        "b": iter([*warm_up, (0.1, True), (0.2, True), (0.3, True)]),
    }
    steps = {name: lambda name=name: lambda: order.append(name) for name in "ab"}

    def timer(run):
        run()
        return next(clock_says[order[-1]])

    monkeypatch.setattr(clock, "spin", lambda: 1.0)
    timings = clock.in_turn(steps, 3, timer, reads_memory=False)
    turns = ["".join(order[i : i + 2]) for i in range(0, 10, 2)]
    assert set(turns) == {"ab", "ba"}  # no variant always follows the same one
    assert timings["a"] == Timing(seconds=pytest.approx(0.3), best=0.2, clean=2, repetitions=3, turns=(None, 0.2, 0.4))
    assert timings["b"] == Timing(seconds=0.2, best=0.1, clean=3, repetitions=3, turns=(0.1, 0.2, 0.3))


def test_a_ratio_is_of_one_turn_not_of_two_medians():
    slow_then_fast = Timing(4.0, 2.0, 5, 5, (4.0, 4.0, 4.0, 2.0, 2.0))
    half = Timing(1.0, 1.0, 5, 5, (2.0, 2.0, 1.0, 1.0, 1.0))  # the machine became faster during the third turn
    rows = [Row(Cell(), {"cpu": slow_then_fast, CEILING: half})]
    assert rows[0].over("cpu", CEILING) == pytest.approx(0.5)
    assert rows[0].record()["results"]["cpu"]["of_ceiling"] == 0.5
    disturbed = replace(half, turns=(None, None, 1.0, None, None), clean=1)
    # one common turn is too few: the medians are compared
    assert clock.compare(slow_then_fast, disturbed, lambda a, b: b / a) == pytest.approx(0.25)
