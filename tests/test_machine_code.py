"""numba's cache follows the sources: of the function, and of those it calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.machine_code import STAMP, forget_stale

CALLED = "import numba\n@numba.njit(cache=True)\ndef answer():\n    return {}\n"
CALLER = (
    "import numba\nfrom called import answer\n@numba.njit(cache=True)\ndef ask():\n    return answer()\nprint(ask())\n"
)
FORGET = (
    "from pathlib import Path\nfrom pagedkv.machine_code import forget_stale\nforget_stale(Path('.'))\nimport caller"
)


def said(folder: Path, program: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"} | {
        "PYTHONPATH": str(Path(__file__).parents[1])
    }
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize(
    ("program", "after"), [("import caller", "1"), (FORGET, "2")], ids=["numba alone", "forget_stale"]
)
def test_a_function_that_is_called_from_another_file_is_never_an_old_one(
    tmp_path: Path, program: str, after: str
) -> None:
    (tmp_path / "called.py").write_text(CALLED.format(1))
    (tmp_path / "caller.py").write_text(CALLER)
    assert said(tmp_path, program) == "1"
    (tmp_path / "called.py").write_text(CALLED.format(2))
    assert said(tmp_path, program) == after  # the day that numba alone says 2, machine_code.py can go


def test_what_is_not_stale_stays(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1")
    forget_stale(tmp_path)
    kept = tmp_path / "__pycache__" / "one.f-1.nbi"
    kept.write_text("compiled")
    forget_stale(tmp_path)
    assert kept.exists()
    (tmp_path / "one.py").write_text("x = 2")
    forget_stale(tmp_path)
    assert not kept.exists()
    assert (tmp_path / "__pycache__" / STAMP).exists()
