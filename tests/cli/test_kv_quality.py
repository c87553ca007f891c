"""`pagedkv kv-quality`, and `--kv-dtype auto`: a table of KV kinds on a model, a picture, and the smallest kind."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from pagedkv.engine.checkpoint.demo import DEMO_PROMPT

KINDS = ["full", "fp8_e4m3", "int8", "k8v4", "k5v4"]


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "text").write_text(DEMO_PROMPT)
    return tmp_path / "text"


def test_the_table_has_each_kind_and_the_picture_too(command, text, tmp_path):
    status, out, err = command("kv-quality", "--text", text, "--plot", tmp_path / "kinds.svg")
    assert (status, err) == (0, "")
    heads, *rows = [line.split("  ") for line in out.splitlines()]
    assert [cell.strip() for cell in heads if cell.strip()][-2:] == ["bytes/token", "keys/s"]
    cells = {row[0]: row[1:] for row in ([cell.strip() for cell in line if cell.strip()] for line in rows)}
    assert list(cells) == KINDS
    assert [cells[kind][0] for kind in KINDS] == ["16.00", "8.12", "8.12", "6.12", "4.62"]
    assert cells["full"][1:5] == ["0.0000", "0.0000", "0.0000", "100.0%"]
    assert all(float(cells[kind][-1].replace(",", "")) > 0 for kind in KINDS)
    drawn = ElementTree.fromstring((tmp_path / "kinds.svg").read_text()).itertext()
    assert {"4.62 bits, k5v4", "bound of auto"} <= set(drawn)


def test_auto_says_what_it_takes_and_measures_once(command, text, caplog):
    run = ("generate", "--kv-dtype", "auto:0.05", "--kv-text", text)
    for is_first in (True, False):
        caplog.clear()
        assert command(*run)[:2] == (0, "Mira keeps a red lamp in the cellar.\n")
        assert ("measuring what each KV kind costs" in caplog.text) is is_first
        assert "kv_dtype auto: k5v4, the smallest kind that has a mean KL plus one standard error" in caplog.text
    caplog.clear()
    status, out, err = command(*run, "--json")
    assert (status, json.loads(out)["text"], err, caplog.text) == (0, "Mira keeps a red lamp in the cellar.", "", "")
