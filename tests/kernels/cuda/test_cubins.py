"""Compiled kernels on disk: their names, and folders that are damaged, shared, read-only or filled by a build."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from pagedkv.kernels.cuda import compiler
from pagedkv.kernels.cuda.compiler import cubin_for

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
MACROS = {"Q_KIND": 0, "HEAD_DIM_V": 64}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cubins"


@pytest.fixture
def recorder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Stand in for NVRTC; return its compilations."""
    from cupy.cuda import nvrtc

    calls: list[tuple[str, str]] = []

    def compile_cubin(kernel: str, macros: dict[str, int], arch: str) -> compiler._Compiled:
        calls.append((kernel, arch))
        return compiler._Compiled(f"{kernel} {arch} {sorted(macros.items())}".encode() * 100, "")

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    monkeypatch.setattr(nvrtc, "getVersion", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "getSupportedArchs", lambda: (80, 86, 89, 90, 100, 120))
    return calls


def test_a_compiled_kernel_is_found_again(recorder: list[Any], folder: Path) -> None:
    first = cubin_for("merge_states", MACROS, "sm_90")
    assert cubin_for("merge_states", dict(reversed(MACROS.items())), "sm_90") == first
    assert recorder == [("merge_states", "sm_90")]
    assert [path.name[:19] for path in folder.iterdir()] == ["merge_states-sm_90-"]


def test_every_change_of_the_code_changes_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("merge_states", MACROS, "sm_90", (13, 0))
    other = (("write_kv", 0), (MACROS | {"HEAD_DIM_V": 80}, 1), ("sm_80", 2), ((13, 1), 3))
    names = [compiler._key(*asked), *(compiler._key(*asked[:at], x, *asked[at + 1 :]) for x, at in other)]
    texts = dict(compiler._sources())
    for file in texts:  # included files count too
        monkeypatch.setattr(compiler, "_sources", lambda file=file: texts | {file: texts[file] + " "})
        names.append(compiler._key(*asked))
    monkeypatch.undo()
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "-G"))
    names.append(compiler._key(*asked))
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("damage", ["cut", "empty", "a bit", "another file's"])
def test_a_damaged_file_is_compiled_again(damage: str, recorder: list[Any], folder: Path) -> None:
    right = cubin_for("merge_states", MACROS, "sm_90")
    file = next(folder.iterdir())
    content = file.read_bytes()
    flipped = bytes([*content[:-1], content[-1] ^ 1])
    file.write_bytes({"cut": content[:-7], "empty": b"", "a bit": flipped, "another file's": b"\x7fELF" * 50}[damage])
    assert cubin_for("merge_states", MACROS, "sm_90") == right
    assert len(recorder) == 2
    assert file.read_bytes() == content


def test_a_folder_that_cannot_be_written_costs_a_compilation_not_the_result(
    recorder: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "file"))  # even root cannot make a folder in a file
    assert cubin_for("merge_states", MACROS, "sm_90") == cubin_for("merge_states", MACROS, "sm_90")
    assert len(recorder) == 2
