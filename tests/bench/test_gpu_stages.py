"""The stages of `make gpu` over tiny cells on the CPU: what they print, what they find, and how they refuse.

A stand-in takes the place of CUDA graphs and streams. The kernels are the reference, with seeded faults.
"""

from __future__ import annotations

import json
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv import KernelUnavailable, paged_attention
from pagedkv.bench.gpu import attention, host, pool, prefill, race, sass

TINY = replace(attention.BASE, batch=3, context=50, heads=4, kv_heads=2, head_dim=64, dtype="bfloat16")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pools small and put them on the CPU; run a captured step again at each replay."""

    def captured(step: Any) -> tuple[Any, torch.Tensor]:
        result = step().clone()
        return types.SimpleNamespace(replay=lambda: result.copy_(step())), result

    def in_turn(variants: dict[Any, list[Any]], repetitions: int) -> tuple[dict[Any, float], dict[Any, str]]:
        times, refused = {}, {}
        for name, steps in variants.items():
            try:
                steps[0]()
                times[name] = 100.0
            except (KernelUnavailable, RuntimeError) as why:
                refused[name] = str(why)
        return times, refused

    class Pool(pool.GpuPool):
        def __init__(self, cell: Any) -> None:
            super().__init__(cell, "cpu")

    monkeypatch.setattr(pool, "ROTATED_BYTES", 1 << 17)
    monkeypatch.setattr(race, "captured", captured)
    monkeypatch.setattr(attention, "in_turn", in_turn)
    for module in (attention, host, prefill, race):
        monkeypatch.setattr(module, "GpuPool", Pool)
        monkeypatch.setattr(module, "require_gpu", lambda: None)
        monkeypatch.setattr(module, "provenance", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"gpu-{name}.jsonl").read_text().splitlines()]


def test_race_finds_a_bit_that_moves_and_an_error_and_names_a_refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calls: dict[str, int] = {}

    def called(q: Any, layer: Any, batch: Any, *, backend: str) -> torch.Tensor:
        calls[backend] = calls.get(backend, 0) + 1
        if backend == "library":
            raise KernelUnavailable("decode", {"library": ["has no card"]})
        out = paged_attention(q, layer, batch, backend="reference")
        if backend == "flips" and calls[backend] == 8:
            out.view(torch.int16)[0, 0, 3] ^= 1
        return out + 0.5 if backend == "shifts" else out

    monkeypatch.setattr(race, "paged_attention", called)
    monkeypatch.setattr(race, "CELLS", (replace(TINY, kv="fp8_e4m3", lengths="zipf", new=3),))
    options = ["--rounds", "8", "--out", str(tmp_path), "--backends"]
    assert race.main([*options, "cuda", "library"]) == 0
    assert race.main([*options, "cuda", "flips"]) == 1
    assert race.main([*options, "cuda", "shifts"]) == 1
    assert race.main([*options, "library"]) == 1, "a check that ran nothing did not pass"
    rows = rows_of(tmp_path, "race")
    assert {row["good"] for row in rows if row["backend"] in ("cuda", "library")} == {True}
    assert [row["moved"] + row["beside"] for row in rows if row["backend"] == "flips"] == [1, 0]
    assert all(row["error"] > 1 for row in rows if row["backend"] == "shifts")
    assert "ok   library" in capsys.readouterr().out


def test_each_measurement_runs_and_names_what_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(prefill, "BASE", replace(TINY, batch=1))
    monkeypatch.setattr(prefill, "SHAPES", ((20, 50), (33, 33)))
    monkeypatch.setattr(prefill, "SQUARE", 8)
    assert prefill.main(["--backends", "reference", "cuda", "--out", str(tmp_path)]) == 0
    assert prefill.main(["--backends", "cuda"]) == 1, "nothing of ours was measured"
    (ours, *_) = (row for row in rows_of(tmp_path, "prefill") if row["who"] == "reference")
    assert ours["TFLOP_per_s"] == round(4 * 4 * 64 * sum(range(31, 51)) / 100 / 1e6, 1), "row i sees 31 + i keys"

    monkeypatch.setattr(host, "ONE", TINY)
    monkeypatch.setattr(host, "served", lambda: ["reference", "cuda"])
    monkeypatch.setattr(host, "host_us", lambda call: (call(), 5.0)[1])
    assert host.main([]) == 0

    monkeypatch.setattr(attention, "BASE", TINY)
    monkeypatch.setattr(attention, "GROUPS", ((TINY, replace(TINY, lengths="zipf"), replace(TINY, new=3)),))
    monkeypatch.setattr(attention, "MUSTS", (attention.Must(TINY, "us", 99, by="reference"),))
    monkeypatch.setattr(attention, "ceiling", lambda pool: [lambda: None])
    attention.main(["--backends", "reference", "cuda", "--out", str(tmp_path)])
    rows = rows_of(tmp_path, "attention")
    assert {row["who"] for row in rows if row["us"]} == {"ceiling", "reference", "reference split", "sdpa"}
    assert all(row["why_not"] for row in rows if not row["us"])

    printed = capsys.readouterr().out
    for text in (
        "cuda: ",
        "gather 100.0 us",
        "= reference: attend, bound 5.0 us",
        "cuda, paged_attention: KernelUnavailable",
        "reference 100.0 us, 1.00",
        "  sdpa: ValueError: it has no ragged batches",
        "us 100, must be <= 99: MISSED",
    ):
        assert text in printed, text


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
    assert sass.cycles(code, warps) == pytest.approx(cycles, rel=0.03)
