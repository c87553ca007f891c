"""The benchmark of small calls measures each call, warm and cold, and its figures are plausible."""

from __future__ import annotations

import pytest

pytest.importorskip("pagedkv.kernels._cpu", reason="the extension is not built")

from pagedkv.bench.attention import calls


def test_each_call_is_measured_warm_and_cold() -> None:
    rows = calls.measured(repetitions=3)
    assert {(row["what"], row["caches"]) for row in rows} == {
        (name, at) for name in calls.calls() for at in ("warm", "cold")
    }
    assert all(row["best"] > 0 for row in rows)
    warm = {row["what"]: row["best"] for row in rows if row["caches"] == "warm"}
    assert warm["bound attention"] < warm["paged_attention"]
    assert all(warm[name] < 6 * limit for name, limit in calls.LIMITS.items()), "a busy test machine may be slow"
