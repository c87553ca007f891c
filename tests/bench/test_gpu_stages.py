"""The stages of `make gpu` over tiny cells on the CPU, by the reference: what they find, and how they refuse."""

from __future__ import annotations

import json
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv import KernelUnavailable, paged_attention
from pagedkv.bench.gpu import attention, host, peers, pool, prefill, race, sass, stream
from pagedkv.kernels.cuda import compiler

TINY = replace(attention.BASE, batch=3, context=50, heads=4, kv_heads=2, head_dim=64, dtype="bfloat16")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pools small and put them on the CPU; run a captured step again at each replay."""

    def captured(step: Any) -> tuple[Any, torch.Tensor]:
        result = step().clone()
        return types.SimpleNamespace(replay=lambda: result.copy_(step())), result

    def in_turn(variants: dict[Any, list[Any]], repetitions: int) -> tuple[dict[Any, float], dict[Any, str]]:
        refused = {}
        for name, steps in variants.items():
            try:
                steps[0]()
            except (KernelUnavailable, RuntimeError) as why:
                refused[name] = str(why)
        return {name: 100.0 for name in variants if name not in refused}, refused

    monkeypatch.setattr(pool, "ROTATED_BYTES", 1 << 17)
    monkeypatch.setattr(race, "captured", captured)
    monkeypatch.setattr(attention, "in_turn", in_turn)
    small = type("Small", (pool.GpuPool,), {"__init__": lambda self, cell: pool.GpuPool.__init__(self, cell, "cpu")})
    for module in (attention, host, peers, prefill, race):
        monkeypatch.setattr(module, "GpuPool", small)
        monkeypatch.setattr(module, "require_gpu", lambda: None)
        monkeypatch.setattr(module, "provenance", lambda: {"gpu": "NVIDIA H200"})
    for call in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, call, lambda: None)


def test_race_finds_a_bit_that_moves_and_an_error_and_names_a_refusal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[str] = []

    def called(q: Any, layer: Any, batch: Any, *, backend: str) -> torch.Tensor:
        calls.append(backend)
        if backend == "library":
            raise KernelUnavailable("decode", {"library": ["has no card"]})
        out = paged_attention(q, layer, batch, backend="reference")
        if backend == "flips" and calls.count(backend) == 8:
            out.view(torch.int16)[0, 0, 3] ^= 1
        return out + 0.5 if backend == "shifts" else out

    monkeypatch.setattr(race, "paged_attention", called)
    monkeypatch.setattr(race, "CELLS", (replace(TINY, kv="fp8_e4m3", lengths="zipf", new=3),))
    options = ["--rounds", "8", "--out", str(tmp_path), "--backends"]
    asked = ("cuda library", "cuda flips", "shifts", "library")
    assert [race.main([*options, *names.split()]) for names in asked] == [0, 1, 1, 1]
    rows = [json.loads(line) for line in (tmp_path / "gpu-race.jsonl").read_text().splitlines()]
    assert {row["good"] for row in rows if row["backend"] in ("cuda", "library")} == {True}
    assert [row["moved"] + row["beside"] for row in rows if row["backend"] == "flips"] == [1, 0]
    assert all(row["error"] > 1 for row in rows if row["backend"] == "shifts")


def test_prefill_measures_the_library_without_flash_attention_3_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(prefill.library, "_flash_attention_3", lambda: "loaded")
    monkeypatch.setattr(prefill, "ours", lambda *_: [lambda: found.append(prefill.library._flash_attention_3())])
    (step,) = prefill.OTHERS["library by cuDNN"](pool.GpuPool(TINY, "cpu"))
    step()
    assert [*found, prefill.library._flash_attention_3()] == [None, "loaded"]


def test_each_measurement_runs_and_names_what_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(prefill, "BASE", replace(TINY, batch=1))
    monkeypatch.setattr(prefill, "SHAPES", ((20, 50), (33, 33)))
    monkeypatch.setattr(prefill, "SQUARE", 8)
    assert prefill.main(["--backends", "reference", "cuda", "--out", str(tmp_path)]) == 0
    assert prefill.main(["--backends", "cuda"]) == 1, "nothing of ours was measured"
    monkeypatch.setattr(host, "ONE", TINY)
    monkeypatch.setattr(host, "served", lambda: ["reference", "cuda"])
    monkeypatch.setattr(host, "host_us", lambda call: (call(), 5.0)[1])
    assert host.main([]) == 0
    monkeypatch.setattr(attention, "BASE", TINY)
    monkeypatch.setattr(attention, "GROUPS", ((TINY, replace(TINY, lengths="zipf"), replace(TINY, new=3)),))
    monkeypatch.setattr(attention, "MUSTS", (attention.Must(TINY, "us", 99, by="reference"),))
    monkeypatch.setattr(attention, "ceiling", lambda pool: [lambda: None])
    attention.main(["--backends", "reference", "cuda", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    for text in ("cuda, paged_attention: KernelUnavailable", "must be <= 99: MISSED"):
        assert text in printed, text
    rows = [json.loads(line) for line in (tmp_path / "gpu-attention.jsonl").read_text().splitlines()]
    judged = [attention.promises(rows, ["reference"], f"NVIDIA {gpu}") for gpu in ("H200", "H100 80GB HBM3", "GH200")]
    assert [len(lines) for lines in judged] == [1, 0, 0], "a promise names the GPU that makes it"


def test_a_peer_that_is_not_here_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "GROUPS", ((TINY, replace(TINY, kv="int8")),))
    monkeypatch.setattr(peers, "LATENTS", ((replace(TINY, kv_heads=1, head_dim=576),),))
    monkeypatch.setattr(peers, "NAMED", tuple((TINY, who, make) for _, who, make in peers.NAMED))
    monkeypatch.setattr(pool, "ROTATED_BYTES", 1 << 20)
    assert peers.main(["--out", str(tmp_path)]) == 1
    rows = [json.loads(line) for line in (tmp_path / "gpu-attention.jsonl").read_text().splitlines()]
    why = {(row["cell"]["kv"], row["who"]): row.get("why_not", "") for row in rows}
    assert why["", "sdpa"] == ""
    assert "int8 with scales per token and head" in why["int8", "fa3"]
    assert {why["", who].endswith("`make gpu-kit` brings it") for who in ("fa3", "flashmla")} == {True}
    assert "flashinfer served no cell" in capsys.readouterr().out


def test_stream_compiles_for_a_gpu_and_compares_thirds_of_the_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    for depth in {depth for depth, *_ in stream.ways(132).values()}:
        kernel = stream.kernel_of(depth)
        monkeypatch.setattr(compiler, "_sources", lambda code=kernel["code"]: {"stream.cuh": code})
        macros = dict(option[2:].split("=") for option in kernel["options"][1:])
        assert " 0 bytes spill" in compiler.compile_cubin("stream", macros, "sm_90").log
    told = torch.tensor([[0, 90], [0, 70], [1, 100], [2, 160]])
    assert stream.cycles_of(told) == {"thirds": 0.5, "cycles_by_sm": {0: 80, 1: 100, 2: 160}}


def test_warps_hide_a_latency_and_share_a_scheduler() -> None:
    found = [sass.cycles(["FADD R1, R1, R2"] * 20, warps) for warps in (1, 5, 10)]
    assert found == pytest.approx([100, 100, 200], rel=0.03)
