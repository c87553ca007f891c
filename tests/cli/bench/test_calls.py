"""The benchmarks of small calls, of gathers and of latents measure each call, and their figures are plausible."""

from __future__ import annotations

import pytest

pytest.importorskip("pagedkv.kernels._cpu", reason="the extension is not built")

from pagedkv.bench.attention import calls, gather, latents


def test_each_call_is_measured_warm_and_cold() -> None:
    rows = calls.measured(repetitions=3)
    assert {(row["what"], row["caches"]) for row in rows} == {
        (name, at) for name in calls.calls() for at in ("warm", "cold")
    }
    assert all(row["best"] > 0 for row in rows)
    warm = {row["what"]: row["best"] for row in rows if row["caches"] == "warm"}
    assert warm["bound attention"] < warm["paged_attention"]
    assert all(warm[name] < 6 * limit for name, limit in calls.LIMITS.items()), "a busy test machine may be slow"


def test_gathers_are_measured_beside_memcpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "N", 64)
    rows = gather.measured(repetitions=3)
    assert [row["what"] for row in rows] == ["gather bfloat16", "gather int8", "gather fp8_e4m3", "gather int4"]
    assert all(0 < row["ratio"] < 10 for row in rows)


def test_latents_are_measured_beside_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents, "N", 256)
    rows = latents.measured(repetitions=3)
    assert [row["what"] for row in rows] == ["latents once", "latents apart", "latents read"]
    assert all(row["gb_s"] > 0 for row in rows)
    assert rows[2]["of_read"] == 1
