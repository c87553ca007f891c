"""Compiled functions are never those of other sources, and need no folder beside the sources, nor any folder at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagedkv import machine_code
from pagedkv.machine_code import MOST_FOLDERS, _folder_for

ROOT = Path(__file__).parents[1]
PLACE = """
import numba
from pathlib import Path
from pagedkv.machine_code import MachineCode
MACHINE_CODE = MachineCode(Path(__file__).parent, numba, "")
njit = MACHINE_CODE.keep(numba.njit, {options})
"""
CALLED = "from pkg.place import njit\n@njit\ndef answer():\n    return {}\n"
CALLER = "from pkg.a.x import answer\nfrom pkg.place import njit\n@njit\ndef ask():\n    return answer()\n"
ASK = "from pkg.b.y import ask\nprint(ask())"


def package_in(folder: Path, place: str) -> None:
    """Write a package in which pkg/b/y.py calls a function of pkg/a/x.py."""
    for name, source in (("pkg/place.py", place), ("pkg/a/x.py", CALLED.format(1)), ("pkg/b/y.py", CALLER)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)
        (folder / name).with_name("__init__.py").touch()


def output_of(folder: Path, program: str, **env: str) -> str:
    """Run `program` in `folder`, with machine code in folder/cache, and return its output."""
    inherited = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    usual = {"PYTHONPATH": str(ROOT), "PAGEDKV_CACHE_DIR": str(folder / "cache")}
    usual["PYTHONDONTWRITEBYTECODE"] = "1"  # Python knows no change of a file within a second that keeps its size
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=folder, env=inherited | usual | env, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("options", ["", "forceinline=True"], ids=["called", "inlined"])
def test_a_function_called_from_another_file_is_never_an_old_one(tmp_path: Path, options: str) -> None:
    """Numba alone keeps the old one: it knows the file of the caller."""
    package_in(tmp_path, PLACE.format(options=options))
    assert output_of(tmp_path, ASK) == "1"
    (tmp_path / "pkg/a/x.py").write_text(CALLED.format(2))
    assert output_of(tmp_path, ASK) == "2"


RECORDED = """
from numba.core import event
with event.install_recorder("numba:compile") as compiled:
    from pkg.b.y import ask
    ask()
print(*sorted({record.data["dispatcher"].__name__ for _, record in compiled.buffer}))
"""


def test_a_second_process_compiles_nothing_and_the_first_writes_nothing_beside_the_sources(tmp_path: Path) -> None:
    package_in(tmp_path, PLACE.format(options=""))
    before = {*(tmp_path / "pkg").rglob("*")}
    assert output_of(tmp_path, RECORDED) == "answer ask"
    assert output_of(tmp_path, RECORDED) == ""
    assert {*(tmp_path / "pkg").rglob("*")} == before
    [folder] = (tmp_path / "cache/machine-code").iterdir()
    assert len(list(folder.rglob("*.nbi"))) == 2


def test_comments_docstrings_and_modules_that_are_not_imported_compile_nothing_again(tmp_path: Path) -> None:
    package_in(tmp_path, PLACE.format(options=""))
    assert output_of(tmp_path, RECORDED) == "answer ask"
    called, caller = tmp_path / "pkg/a/x.py", tmp_path / "pkg/b/y.py"
    called.write_text(
        '"""Text."""\n# a comment\n' + CALLED.replace("():\n", "():\n    '''Text.'''\n").format("1  # one")
    )
    (tmp_path / "pkg/b/z.py").write_text("from pkg.b import y\n")
    assert output_of(tmp_path, RECORDED) == ""
    caller.write_text(CALLER.replace("answer()", "answer() + 1"))
    assert output_of(tmp_path, RECORDED) == "ask"
    called.write_text(CALLED.format(2))
    assert output_of(tmp_path, RECORDED) == "answer ask"
    assert output_of(tmp_path, ASK) == "3"


HARDENED = """
import tempfile
tempfile.tempdir = "/dev/null/tmp"
import pagedkv.core, pagedkv.core.compiled as c
from pagedkv.core.prefix.index import root_parent
assert c.MACHINE_CODE.folder is None
print(root_parent(3), c.compiled(lambda x: x + 1)(4))
"""


def test_without_any_folder_functions_are_compiled_in_memory(tmp_path: Path) -> None:
    """A container with a read-only root file system and no home."""
    nowhere = {"PAGEDKV_CACHE_DIR": "/dev/null/cache", "NUMBA_CACHE_DIR": "/dev/null/numba", "HOME": "/nonexistent"}
    assert output_of(tmp_path, HARDENED, **nowhere) == "-5 5"


def test_code_of_a_read_only_image_is_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("x = 1")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "image"))
    monkeypatch.setattr(machine_code.tempfile, "tempdir", str(tmp_path))
    warm = _folder_for(tmp_path / "src")
    assert warm.parent == tmp_path / "image/machine-code"
    (warm / "a").mkdir()
    (warm / "a/a.f-1.nbi").write_text("compiled")
    can_write = machine_code._can_write
    monkeypatch.setattr(machine_code, "_can_write", lambda place: "image" not in place.parts and can_write(place))
    copied = _folder_for(tmp_path / "src")
    assert copied.parent.name.startswith("pagedkv-")
    assert (copied / "a/a.f-1.nbi").read_text() == "compiled"
    (copied / "a/a.f-1.nbi").write_text("newer")
    assert _folder_for(tmp_path / "src") == copied
    assert (copied / "a/a.f-1.nbi").read_text() == "newer"


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="permissions of POSIX")
def test_code_is_loaded_from_no_folder_that_others_can_write(tmp_path: Path) -> None:
    place = tmp_path / "base" / "core-1"
    assert machine_code._can_write(place)
    assert place.stat().st_mode & 0o777 == 0o700
    for mode in (0o702, 0o720):
        place.chmod(mode)
        assert not machine_code._can_write(place)
    place.chmod(0o700)
    for mode in (0o777, 0o770):
        place.parent.chmod(mode)
        assert not machine_code._can_write(place)
    if os.getuid() == 0:
        place.parent.chmod(0o1777)  # as /tmp: others cannot replace what is ours
        assert machine_code._can_write(place)
        os.chown(place.parent, 12345, -1)  # whose owner may
        assert not machine_code._can_write(place)
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "mine/link").symlink_to(target)
    assert not machine_code._can_write(tmp_path / "mine/link")


def test_code_is_copied_from_no_folder_that_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "open"))
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "mine"))
    planted = tmp_path / "open" / f"src-{machine_code._digest(tmp_path / 'src')[:16]}"
    planted.mkdir(parents=True)
    (planted / "a").mkdir()
    (planted / "a/a.nbi").write_text("planted")
    (planted / "digests.json").write_text(json.dumps(machine_code._digests(tmp_path / "src", "")))
    planted.chmod(0o777)
    place = _folder_for(tmp_path / "src")
    assert place.parent == tmp_path / "mine/machine-code"
    assert [path.name for path in place.iterdir()] == ["digests.json"]


def test_folders_of_older_sources_go_when_they_are_many_and_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "src").mkdir()
    folders: list[Path] = []
    for version in range(MOST_FOLDERS + 4):
        (tmp_path / "src/a.py").write_text(f"x = {version}")
        folders.append(_folder_for(tmp_path / "src") or tmp_path)
        age = time.time() - 10_000 + version
        os.utime(folders[-1], (age, age))
    assert len(set(folders)) == MOST_FOLDERS + 4
    assert [folder.exists() for folder in folders] == [False] * 3 + [True] * (MOST_FOLDERS + 1)
    for text in ("y = 1", "z = 1"):
        (tmp_path / "src/b.py").write_text(text)
        assert _folder_for(tmp_path / "src") not in folders


def test_text_that_moves_to_the_next_file_is_another_source(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "b.py").write_text("z = 3\n")
    before = machine_code._digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("y = 2\nz = 3\n")
    assert machine_code._digest(tmp_path) != before
