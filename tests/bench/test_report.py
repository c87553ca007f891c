"""The page of newest figures shows rows of today's code alone, and is the one that the command writes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pagedkv.bench import report

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/speed.md"


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)


def row(**changed: Any) -> dict[str, Any]:
    plain = {
        "bench": "manager", "case": "a step", "variant": "pagedkv", "unit": "us", "median": 2.0, "machine": "Zen 9",
        "commit": "new", "when": "2026-11-30T10:00:00Z", "command": "pagedkv bench manager",
    }  # fmt: skip
    return plain | changed


def test_the_newest_current_row_of_a_cell_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "is_current", lambda bench, commit: commit != "old")
    rows = [
        row(median=1.0, when="2026-11-29T10:00:00Z"),
        row(),
        row(median=3.0, commit="old", when="2026-12-01T10:00:00Z"),
        row(variant="lists of Python", median=8.0, clean=0),
        row(case="a fork", median=None),
        row(bench="of a GPU"),
    ]
    text = report.page(report.newest(rows))
    assert "| a step | 2 us |  | lists of Python 8 us (disturbed) |" in text
    assert len(re.findall(r"^\| a ", text, re.M)) == 1
    assert "## Zen 9" in text


def test_a_row_of_changed_or_uncommitted_files_is_not_current(monkeypatch: pytest.MonkeyPatch) -> None:
    if git("rev-parse", "HEAD").returncode:
        pytest.skip("this is no checkout")
    head = git("rev-parse", "HEAD").stdout.strip()
    first = git("log", "--format=%H", "--diff-filter=A", "--", "CHANGELOG.md").stdout.split()[-1]
    monkeypatch.setattr(report, "MEASURED", {"manager": ("CHANGELOG.md",)})
    report.is_current.cache_clear()
    assert not report.is_current("manager", f"{head}-dirty")
    assert not report.is_current("manager", first)
    report.is_current.cache_clear()


def test_without_a_current_row_the_page_says_what_to_run() -> None:
    assert "`pagedkv bench all` measures it" in report.page([])


def test_the_page_is_what_the_command_writes(tmp_path: Path) -> None:
    commits = set(re.findall(r"^\| `.*` \| ([0-9a-f]{10}) \|", PAGE.read_text(), re.M))
    if any(git("cat-file", "-e", f"{commit}^{{commit}}").returncode for commit in commits):
        pytest.skip("this is no checkout with its history")
    report.write(tmp_path / "page.md")
    written = (tmp_path / "page.md").read_text()
    assert written == PAGE.read_text(), "a measured file changed: write the page anew with `pagedkv bench report`"
