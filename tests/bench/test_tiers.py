"""`pagedkv bench tiers`: rows of each part from a small run, their charts, and wrong options."""

from __future__ import annotations

import pytest

from pagedkv.bench.generate.models import TINY
from pagedkv.bench.tiers import beside, first_token, plot, runner, speed
from pagedkv.errors import InvalidRequest


def test_a_tier_has_a_row_for_each_way_and_size_beside_the_bare_transfer(tmp_path):
    rows = list(speed.rows(tmp_path, 2, sizes=(16_384,), moved=1 << 20))
    assert {(row["case"], row["variant"]) for row in rows} == {
        *((way, tier) for way in ("store", "load") for tier in ("host", "host, not verified", "disk")),
        ("store", "memcpy, one thread"), ("store", "direct I/O, 2 threads"), ("load", "direct I/O, 2 threads"),
    }  # fmt: skip
    assert all(row["median"] > 0 and ("ratio" in row) == (row["variant"][:4] in ("host", "disk")) for row in rows)
    assert len(plot.charts(rows)) == 2


def test_a_first_token_has_a_row_for_each_place(tmp_path):
    rows = list(first_token.rows(tmp_path, 1, context=200, config=TINY))
    assert [row["variant"] for row in rows] == ["computed", "pool", "host", "disk"]
    assert [row.get("must") for row in rows] == [None, None, 0.1, 0.3]
    assert len(plot.charts(rows)) == 1


def test_steps_have_a_row_for_each_limit(monkeypatch):
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")
    monkeypatch.setattr(beside, "FRAME", 16_384)  # steps of this model take a millisecond
    rows = list(beside.rows(1, shape=(2, 32), config=TINY))
    assert [row["variant"] for row in rows] == ["no transfers", "2 GB/s", "no limit"]
    assert all(row["moved_gb_s"] > 0 for row in rows[1:])


def test_unknown_parts_and_folders_are_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="speed, first-token, beside"):
        runner.measure(print, is_quick=True, folder=None, only=["seed"])
    with pytest.raises(InvalidRequest, match="is no folder"):
        runner.measure(print, is_quick=True, folder=tmp_path / "no", only=["speed"])
