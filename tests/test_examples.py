"""The scripts of examples/: each runs in a process of its own, prints something to check, and is short.

A script inside another program is at most half as long as the prototype that it replaces, and runs if the program is
installed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 60
HOSTS = {"transformers_cache": ("transformers", 191)}  # the program that a script runs in, and the most lines


def test_there_is_an_example_of_each_way_in() -> None:
    names = {path.stem for path in EXAMPLES}
    assert names == {
        "own_engine_manager",
        "own_engine_cache",
        "own_page_tables",
        "foreign_tensors",
        "prefix_and_forks",
        "replay_trace",
        "transformers_cache",
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= HOSTS.get(path.stem, ("", MAX_LINES))[1]
    assert f"Run: python examples/{path.name}" in text
    assert "assert " in text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_its_claims_hold(path: Path, tmp_path: Path) -> None:
    """Run in another folder, without arguments or an install. The assertions are in the example."""
    host, _ = HOSTS.get(path.stem, ("torch", 0))
    if importlib.util.find_spec(host) is None:
        pytest.skip(f"{host} is not installed")
    debug = "0" if path.stem == "replay_trace" else "3"  # a proof after each of its thousands of commits takes minutes
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PAGEDKV_DEBUG": debug}
    command = [sys.executable, str(path)]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    assert 1 <= len(run.stdout.splitlines()) <= 20
    assert run.stderr == ""
