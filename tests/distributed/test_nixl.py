"""The example of NIXL, over shared memory and over TCP: the answer of two processes is that of one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="no NIXL: pip install --no-deps nixl nixl-cu13")
@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_the_pages_of_a_prompt_go_from_one_process_to_another(transports: str, tmp_path: Path) -> None:
    environment = {**os.environ, "UCX_TLS": transports, "NIXL_LOG_LEVEL": "WARN", "PAGEDKV_DEBUG": "3"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(ROOT / "examples/nixl_pages.py")]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "tokens that came from the prefill process: 480" in run.stdout
