"""The processes in which peers of benchmarks run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pagedkv.bench.worker_process import WorkerProcess


def test_a_relative_path_counts_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    echo = "import json; print(json.dumps({'said': json.loads(input())}), flush=True)"
    worker = WorkerProcess("a worker", [os.path.join("here", "python"), "-c", echo], {}, Path("/"))
    assert worker.ask({"a": 1}) == {"said": {"a": 1}}
    worker.end(10)
