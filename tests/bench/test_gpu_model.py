"""The model of a scheduler: cases computed by hand, the figures of a review by hand, the page that shows the table.

The review counted and simulated the kernels of 24 November 2026 before they were changed; its counts must give its
predictions.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pagedkv.bench.gpu import attention
from pagedkv.bench.gpu.model import counts, predict, scheduler, table
from pagedkv.bench.gpu.model.predict import Count
from pagedkv.errors import InvalidRequest
from tests.kernels.triton.compiled import counted

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/gpu-predictions.md"
BASE = attention.BASE


def test_each_instruction_takes_its_pipe_for_the_cycles_that_its_lanes_ask() -> None:
    code = [
        "FMUL R1, R2, R3",
        "IADD3 R4, P0, R5, R6, RZ",
        "IMAD.WIDE R8, R5, R6, R10",
        "MUFU.EX2 R7, R8",
        "HMMA.16816.F32.BF16 R12, R4, R8, R12",
        "LDSM.16.MT88.4 R20, [R1]",
        "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]",
        "LDS.64 R2, [R1]",
        "SHFL.IDX PT, R1, R2, R3, R4",
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0",
        "UIADD3 UR4, UR5, UR6, URZ",
        "BAR.SYNC.DEFER_BLOCKING 0x0",
    ]
    found = scheduler.pipe_cycles(code)
    assert found == {
        "issue": 12, "alu": 2, "fma": 1 + 2, "xu": 8, "tensor": 6 + 64, "lsu": 16 + 16 + 8 + 4, "uniform": 2
    }  # fmt: skip


@pytest.mark.parametrize(
    ("code", "warps", "cycles"),
    [
        ([f"FMUL R{i}, R200, R201" for i in range(100)], 1, 100),  # one a cycle
        ([f"FMUL R{i}, R200, R201" for i in range(100)], 3, 300),  # issue is shared
        ([f"LOP3 R{i}, R200, R201, R202" for i in range(100)], 1, 200),  # 16 lanes
        ([f"MUFU.EX2 R{i}, R200" for i in range(20)], 2, 320),  # 4 lanes
        (["FADD R1, R1, R2"] * 20, 1, 100),  # each waits for the one before
        (["FADD R1, R1, R2"] * 20, 5, 100),  # five warps hide a latency of five
        (["FADD R1, R1, R2"] * 20, 10, 200),
        (["LDS R1, [R2]", "FADD R2, R1, R3"], 1, 24 + 5),  # the address of the next load
        (["HMMA.16816.F32.BF16 R12, R4, R8, R12"] * 4, 1, 4 * 33),  # sums that depend on one another
        ([f"HMMA.16816.F32.BF16 R{i}, R4, R8, R{i}" for i in range(16, 96, 4)], 2, 2 * 20 * 6),
    ],
)
def test_cycles_of_a_tile_are_those_counted_by_hand(code: list[str], warps: int, cycles: int) -> None:
    assert scheduler.cycles(code, warps) == pytest.approx(cycles, rel=0.03)


def test_products_of_a_warpgroup_run_beside_other_work_until_their_wait() -> None:
    products = [f"HGMMA.64x64x16.F32.BF16 R{24 + 32 * i}, gdesc[UR8], R24, gsb0" for i in range(4)]  # 128 cycles
    sums = [f"FMUL R{i}, R200, R201" for i in range(100)]
    wait = ["WARPGROUP.DEPBAR.LE gsb0, 0x0"]
    assert scheduler.cycles([*products, *wait, *sums], 1) == pytest.approx(4 * 32 + 30 + 100, abs=5)
    assert scheduler.cycles([*products, *sums, *wait], 1) == pytest.approx(4 * 32 + 30, abs=5)
    alone = scheduler.cycles([*products, *wait, *sums], 2)
    assert alone == pytest.approx(2 * 4 * 32, rel=0.05), "one warp's sums run under the other's products"


def test_warps_of_a_program_meet_at_its_barriers_and_others_do_not() -> None:
    slow = [f"LOP3 R{i}, R200, R201, R202" for i in range(50)]
    code = [*slow, "BAR.SYNC.DEFER_BLOCKING 0x0", *["FADD R1, R1, R2"] * 20, "BAR.SYNC.DEFER_BLOCKING 0x0"]
    apart, together = scheduler.cycles(code, 2, together=1), scheduler.cycles(code, 2, together=2)
    assert apart == pytest.approx(2 * 50 * 2 + 40, abs=30), "one warp's chain runs under the other's logic"
    assert together == pytest.approx(2 * 50 * 2 + 100 + 40, abs=30)


COUNT = Count(
    backend="cuda", kind="decode", kv="bfloat16", instructions=400, pipes={"issue": 400, "lsu": 500}, cycles=1755.0,
    registers=200, spills=0, rows=16, keys=16, tile_warps=1, warps=4, ctas=2, in_flight=131072, entry=1000, loads=4,
    at_once=16,
)  # fmt: skip


def test_a_prediction_is_the_sum_that_the_page_explains() -> None:
    """32 x 4k: 1,048,576 keys of 512 bytes; a tile takes 1 us of two warps; 256 units of 66 fit 264 CTAs uncut."""
    assert predict.cut_of(COUNT, BASE, predict.H200) == predict.Cut(busiest=64, pieces=1, shared=0)
    found = predict.predict(COUNT, BASE)
    memory = 536_870_912 / 4.4e6
    fixed = 1.2 + (1000 * 5 / 1755 + 4 * 0.55) + 0.5
    assert found.us == pytest.approx(memory + fixed)
    assert found.of_ceiling == pytest.approx(memory / (memory + fixed))
    assert found.limit == "memory"
    slow = predict.predict(replace(COUNT, cycles=4 * 1755.0, pipes={"issue": 3000, "alu": 3400}), BASE)
    even = 1_048_576 / 16 / 528 * 4 / 2
    assert slow.us == pytest.approx(max(even, 64 * 4.0) + fixed)
    assert slow.limit == "alu"
    assert predict.predict(replace(COUNT, cycles=4 * 1755.0), BASE).limit == "latency"
    thin = predict.predict(replace(COUNT, in_flight=4096), BASE)
    assert thin.us == pytest.approx(536_870_912 / (4096 * 132) * 1.2 + fixed)
    assert thin.limit == "bytes in flight"
    short = predict.predict(COUNT, replace(BASE, batch=1, context=1024))
    assert short.limit == "start and end"
    assert short.us == pytest.approx(1.2 + 1000 * 5 / 1755 + 2.2 + 1.0 + 1.0 + 0.6), "16 pieces: one round"


def test_scales_are_read_and_count_as_no_keys() -> None:
    found = predict.predict(replace(COUNT, kv="fp8_e4m3", cycles=10.0), replace(BASE, kv="fp8_e4m3"))
    pairs, fixed = 1_048_576, 1.2 + 1000 * 5 / 1755 + 2.2 + 0.5
    assert found.us == pytest.approx(pairs * (256 + 8) / 4.4e6 + fixed)
    assert found.of_ceiling == pytest.approx(pairs * 256 / 4.4e6 / found.us)


def test_prefill_is_the_operations_of_a_tile_over_its_cycles() -> None:
    count = replace(COUNT, kind="prefill", rows=128, keys=64, tile_warps=8, warps=8, ctas=1, cycles=2048.0)
    cell = replace(BASE, kind="prefill", batch=1, new=8192, context=8192)
    found = predict.predict(count, cell)
    rate = 4 * 128 * 64 * 128 / 2048 * 132 * 1.755e9
    assert found.tflops == pytest.approx(rate / 1e12)
    assert found.us == pytest.approx(4 * 32 * 128 * (8192 * 8193 / 2) / rate * 1e6)
    assert found.of_ceiling is None


def test_the_library_copies_the_keys_and_multiplies_at_a_published_rate() -> None:
    prompt, chunk = (predict.library(cell) for cell in (attention.PROMPT, attention.CHUNK))
    copied = 2 * 8192 * 8 * 2 * 128 * 2
    assert prompt.us == pytest.approx(4 * 32 * 128 * (8192 * 8193 / 2) / 580e6 + copied / 4.4e6)
    assert chunk.us == pytest.approx(4 * 32 * 128 * (2048 * 30720 + 2048 * 2049 / 2) / 580e6 + 4 * copied / 4.4e6)
    assert table.predicted(attention.PROMPT, "library") == prompt
    triton = [table.predicted(cell, "triton") for cell in (attention.PROMPT, attention.CHUNK)]
    assert triton[0]
    assert triton[1]
    assert prompt.us < triton[0].us, "the order of registry.PREFILL_RANKS"
    assert chunk.us < triton[1].us, "the order of registry.PREFILL_RANKS"


@pytest.mark.parametrize(
    ("units", "ctas", "overhead", "expected"),
    [
        ([64] * 256, 264, 2, (64, 1, 0)),  # 66 fits a share of 64 by the rule of 17/16
        ([16] * 8, 264, 2, (1, 16, 8)),  # a share is one step
        ([64] * 8, 264, 2, (2, 32, 8)),
        ([10, 2], 3, 0, (4, 3, 1)),
        ([64], 33, 0, (2, 32, 1)),
    ],
)
def test_the_partition_is_cut_as_the_kernels_cut_it(units: Any, ctas: int, overhead: int, expected: Any) -> None:
    assert predict.cut(units, ctas, overhead) == expected


REVIEWED = replace(COUNT, cycles=2723.0, entry=965, at_once=4)
NARROW = replace(REVIEWED, kv="fp8_e4m3", cycles=3058.0, pipes={"issue": 1231, "alu": 2 * 1136 // 2})


@pytest.mark.parametrize(
    ("cell", "least", "most"),
    [
        (attention.BASE, 128, 137),
        (attention.LONG, 1074 / 4.4 / 0.97, 1074 / 4.4 / 0.95),
        (attention.MIDDLE, 38, 41),
        (attention.ONE_LONG, 40, 44),
        (attention.ONE, 9, 12),
        (attention.ONE_4K, 12, 17),
    ],
    ids=str,
)
def test_the_counts_of_the_review_give_its_predictions_in_microseconds(cell: Any, least: float, most: float) -> None:
    assert least <= predict.predict(REVIEWED, cell).us <= most


def test_the_counts_of_the_review_give_its_speed_up_by_fp8_and_its_limit() -> None:
    found = predict.predict(NARROW, attention.FP8)
    assert 1.05 <= predict.predict(REVIEWED, BASE).us / found.us <= 1.3
    assert found.limit in ("issue", "latency", "alu")


def test_the_kept_counts_are_of_kernels_that_keep_their_promises_of_shape() -> None:
    for count in counts.load():
        assert count.spills <= (16 if count.backend == "triton" else 0), "the budgets of tests/kernels"
        assert count.registers <= 255
        assert count.in_flight >= 42_000 or count.kind == "prefill" or count.kv == "int4", count
        assert max(count.pipes.values()) * count.warps_of_scheduler <= count.cycles * 1.001, "no pipe is overbooked"
    assert {(c.backend, c.kv) for c in counts.load() if c.kind == "decode"} == {
        (backend, kv) for backend in table.COUNTED for kv in counts.KVS
    }


def test_a_merge_copies_as_many_pieces_as_the_stages_hold() -> None:
    kept = [count for count in counts.load() if count.backend == "cuda"]
    assert [count.at_once for count in kept] == [
        counts.pieces_at_once(counts.cuda_kernel(count.kv, count.kind)) for count in kept
    ]
    assert {count.kv: count.at_once for count in kept if count.kind == "decode"} == {
        "bfloat16": 32, "fp8_e4m3": 34, "int8": 34, "int4": 29
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="NVRTC is called through CuPy")
@pytest.mark.parametrize("kv", ["bfloat16", "fp8_e4m3"])
def test_counting_again_finds_what_is_kept(kv: str) -> None:
    is_what_is_kept(asdict(counts.cuda(kv, "decode")))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_counting_the_triton_kernels_again_finds_what_is_kept() -> None:
    kernels = [("bfloat16", "decode"), ("fp8_e4m3", "decode"), ("int8", "decode"), ("bfloat16", "prefill")]
    for found in counted([(kv, kind, counts.DIM, counts.ARCH) for kv, kind in kernels]):
        is_what_is_kept(found)


def is_what_is_kept(found: dict[str, Any]) -> None:
    kept = counts.count_of(found["backend"], found["kind"], found["kv"])
    assert kept
    remedy = "the kernel has changed: python -m pagedkv.bench.gpu.model --count, then --markdown the page"
    assert found["instructions"] == pytest.approx(kept.instructions, rel=0.1), remedy
    assert found["cycles"] == pytest.approx(kept.cycles, rel=0.1), remedy


def test_the_tables_of_the_page_are_made_from_the_counts_and_the_measured_rows() -> None:
    text = PAGE.read_text()
    remedy = f"python -m pagedkv.bench.gpu.model --markdown {PAGE.relative_to(ROOT)}"
    assert table.page(text, table.read(table.kept())) == text, remedy
    for backend in table.BACKENDS:
        assert text.count(f"<!-- predicted {backend} -->\n| cell") == 1
    for backend in table.COUNTED:
        assert text.count(f"<!-- counted {backend} -->\n| kernel") == 1


def test_the_newest_row_of_an_h200_stands_beside_its_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "kept", list)  # no rows of bench/results
    row = {"case": str(BASE), "who": "cuda", "us": 131.2, "of_ceiling": 0.931, "gpu": "NVIDIA H200", "when": "2026-12"}
    rows = [row, row | {"us": 150.0, "when": "2026-11"}, row | {"us": 999.0, "gpu": "NVIDIA A100", "when": "2027"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in [*rows, row | {"who": "triton", "us": None}]))
    table.main(["--rows", str(file)])
    printed = capsys.readouterr().out.splitlines()
    beside = [line for line in printed if line.startswith("cuda  ") and " 32 × 4k" in line and "bfloat16" in line]
    assert len(beside) == 1
    assert beside[0].endswith("131 µs, 0.931")
    assert sum(line.endswith(table.NOT_YET) for line in printed) >= len(printed) - 1
    assert not any("999" in line for line in printed)


def test_a_cell_that_was_not_counted_has_no_prediction() -> None:
    assert table.predicted(BASE, "cuda")
    assert table.predicted(attention.RAGGED, "cuda")
    for other in (attention.LARGE_PAGES, attention.DRAFTS, replace(BASE, head_dim=64), replace(BASE, kv="fp8_e5m2")):
        assert table.predicted(other, "cuda") is None
    assert table.predicted(BASE, "library") is None


def test_a_loop_without_products_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no loop of this code multiplies matrices"):
        counts.main_loop([])


def test_the_benchmark_prints_each_figure_beside_its_prediction() -> None:
    row = {"case": str(BASE), "cell": BASE.__dict__, "who": "cuda", "us": 131.2, "GB_per_s": 4092.0, "of_ceiling": 0.93}
    found = table.predicted(BASE, "cuda")
    assert found
    line = attention.row_line(row)
    assert line.endswith(f"predicted {found.us:.1f} us, {found.of_ceiling:.3f}, {found.limit}")
    drafts = replace(BASE, new=8)
    other = row | {"case": str(drafts), "cell": drafts.__dict__}
    assert attention.row_line(other).endswith("of the ceiling"), "a cell without a prediction"
    refused = row | {"who": "triton", "us": None, "why_not": "no card"}
    lines = attention.screen_lines([row, refused, other], ["triton", "cuda"])
    assert lines == [
        f"= 32 x 4,096  block 16: cuda 131.2 us, 0.93 ({found.us:.0f} us, {found.of_ceiling:.2f}: {found.limit})",
        "= 32 x 4,096, 8 rows  block 16: cuda 131.2 us, 0.93",
    ]


def test_promises_are_judged_by_the_prediction_of_their_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, triton = table.predicted(BASE, "cuda"), table.predicted(BASE, "triton")
    assert cuda
    assert triton
    fast = attention.Must(BASE, "us", cuda.us + 1, by="cuda")
    slow = attention.Must(BASE, "of_ceiling", (triton.of_ceiling or 0) + 0.01)
    unknown = attention.Must(attention.DRAFTS, "ratio", 1.15, BASE)
    ratio = attention.Must(attention.RAGGED, "ratio", 9.0, BASE, by="cuda")
    monkeypatch.setattr(attention, "MUSTS", (fast, slow, unknown, ratio))
    rows = table.promises().splitlines()[2:]
    assert len(rows) == 3
    assert rows[0] == f"| cuda | 32 × 4k bfloat16: {cuda.us + 1:.3g} µs | {cuda.us:.3g} | hold |"
    assert rows[1].endswith("| be missed |")
    assert "32 × 4k bfloat16 ragged: 9 of the time of 32 × 4k bfloat16" in rows[2]
