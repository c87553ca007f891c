"""numba's cache follows the sources of a function and of the functions that it calls, in the folder and below."""

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


def output_of(folder: Path, program: str) -> str:
    """Run `program` in `folder`, with numba's cache beside the sources, and return its output."""
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
    assert output_of(tmp_path, program) == "1"
    (tmp_path / "called.py").write_text(CALLED.format(2))
    assert output_of(tmp_path, program) == after  # once numba alone prints 2, machine_code.py can be removed


INLINED = "import numba\n@numba.njit(cache=True, forceinline=True)\ndef answer():\n    return {}\n"
ASKING = "import numba\nfrom pkg.a.x import answer\n@numba.njit(cache=True)\ndef ask():\n    return answer()\n"
UNRELATED = "import numba\n@numba.njit(cache=True)\ndef twice(n):\n    return 2 * n\n"
ASK = "from pkg.b.y import ask\nfrom pkg.c.z import twice\nprint(ask(), twice(4))"
FORGET_BELOW = "from pathlib import Path\nfrom pagedkv.machine_code import forget_stale\nforget_stale(Path('pkg'))\n"


def package_in(folder: Path) -> None:
    """Write a package in which pkg/b/y.py inlines a function of pkg/a/x.py, and pkg/c/z.py uses neither."""
    for name, source in (("a/x.py", INLINED.format(1)), ("b/y.py", ASKING), ("c/z.py", UNRELATED)):
        (folder / "pkg" / name).parent.mkdir(parents=True)
        (folder / "pkg" / name).write_text(source)
        (folder / "pkg" / name).with_name("__init__.py").touch()
    (folder / "pkg" / "__init__.py").touch()


@pytest.mark.parametrize(
    ("before_import", "after"), [("", "1 8"), (FORGET_BELOW, "2 8")], ids=["numba alone", "forget"]
)
def test_a_function_inlined_from_another_sub_folder_is_never_an_old_one(
    tmp_path: Path, before_import: str, after: str
) -> None:
    package_in(tmp_path)
    assert output_of(tmp_path, before_import + ASK) == "1 8"
    (tmp_path / "pkg/a/x.py").write_text(INLINED.format(2))
    assert output_of(tmp_path, before_import + ASK) == after


def test_code_of_every_sub_folder_is_deleted_when_one_source_changes(tmp_path: Path) -> None:
    package_in(tmp_path)
    output_of(tmp_path, FORGET_BELOW + ASK)
    folders = [tmp_path / "pkg" / name / "__pycache__" for name in ("a", "b", "c")]
    assert all(list(folder.glob("*.nb[ic]")) for folder in folders[1:])
    forget_stale(tmp_path / "pkg")
    assert all(list(folder.glob("*.nb[ic]")) for folder in folders[1:])  # no source has changed
    (tmp_path / "pkg/a/x.py").write_text(INLINED.format(2))
    forget_stale(tmp_path / "pkg")
    assert not any(list(folder.glob("*.nb[ic]")) for folder in folders)
    assert (tmp_path / "pkg/__pycache__" / STAMP).exists()


def test_a_new_source_in_a_sub_folder_makes_the_code_stale(tmp_path: Path) -> None:
    package_in(tmp_path)
    forget_stale(tmp_path / "pkg")
    (tmp_path / "pkg/b/__pycache__").mkdir()
    compiled = tmp_path / "pkg/b/__pycache__/y.ask-1.nbi"
    compiled.write_text("compiled")
    (tmp_path / "pkg/c/new.py").write_text("x = 1")
    forget_stale(tmp_path / "pkg")
    assert not compiled.exists()


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


def test_text_that_moves_to_the_next_file_makes_the_code_stale(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "b.py").write_text("z = 3\n")
    forget_stale(tmp_path)
    compiled = tmp_path / "__pycache__" / "a.f-1.nbi"
    compiled.write_text("compiled")
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("y = 2\nz = 3\n")
    forget_stale(tmp_path)
    assert not compiled.exists()
