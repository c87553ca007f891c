"""The scripts of examples/ inside vLLM run, and their assertions hold. tests/test_examples.py runs the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.vllm.host.engines import environment

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("vllm_*.py"))


def test_there_are_scripts_to_run() -> None:
    assert [path.stem for path in EXAMPLES] == ["vllm_backend", "vllm_block_pool"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_its_claims_hold(path: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=environment() | {"PYTHONPATH": str(path.parent)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert ": the tokens of transformers" in run.stdout or "the tokens and the hits of BlockPool" in run.stdout
