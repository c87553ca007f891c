"""Compiled kernels on disk: their names, and folders that are damaged, shared, read-only or filled by a build."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pagedkv.kernels.cuda import compiler
from pagedkv.kernels.cuda.compiler import cubin_for

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
MACROS = {"Q_KIND": 0, "HEAD_DIM_V": 64}


class Recorder:
    """A stand-in for NVRTC that records each compilation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from cupy.cuda import nvrtc

        self.calls: list[tuple[str, str]] = []
        self.version, self.archs = (13, 0), (80, 86, 89, 90, 100, 120)
        monkeypatch.setattr(compiler, "compile_cubin", self.compile)
        monkeypatch.setattr(nvrtc, "getVersion", lambda: self.version)
        monkeypatch.setattr(nvrtc, "getSupportedArchs", lambda: self.archs)

    def compile(self, kernel: str, macros: dict[str, int], arch: str) -> compiler._Compiled:
        self.calls.append((kernel, arch))
        return compiler._Compiled(f"{kernel} {arch} {sorted(macros.items())}".encode() * 100, "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cubins"


@pytest.fixture
def recorder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def test_a_compiled_kernel_is_found_again(recorder: Recorder, folder: Path) -> None:
    first = cubin_for("merge_states", MACROS, "sm_90")
    assert cubin_for("merge_states", dict(reversed(MACROS.items())), "sm_90") == first
    assert recorder.calls == [("merge_states", "sm_90")]
    assert [path.name[:19] for path in folder.iterdir()] == ["merge_states-sm_90-"]


def test_every_change_of_the_code_changes_the_name(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {compiler._key("merge_states", MACROS, "sm_90", (13, 0))}
    names |= {
        compiler._key("write_kv", MACROS, "sm_90", (13, 0)),
        compiler._key("merge_states", MACROS | {"HEAD_DIM_V": 80}, "sm_90", (13, 0)),
    }
    names |= {
        compiler._key("merge_states", MACROS, "sm_80", (13, 0)),
        compiler._key("merge_states", MACROS, "sm_90", (13, 1)),
    }
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "-G"))
        names.add(compiler._key("merge_states", MACROS, "sm_90", (13, 0)))
    texts = dict(compiler._sources())
    for name in texts:  # included files count too
        with monkeypatch.context() as patch:
            patch.setattr(compiler, "_sources", lambda name=name: texts | {name: texts[name] + " "})
            names.add(compiler._key("merge_states", MACROS, "sm_90", (13, 0)))
    assert len(names) == 6 + len(texts)


@pytest.mark.parametrize("damage", ["cut", "empty", "a bit", "another file's"])
def test_a_damaged_file_is_compiled_again(damage: str, recorder: Recorder, folder: Path) -> None:
    right = cubin_for("merge_states", MACROS, "sm_90")
    file = next(folder.iterdir())
    content = file.read_bytes()
    flipped = bytes([*content[:-1], content[-1] ^ 1])
    file.write_bytes({"cut": content[:-7], "empty": b"", "a bit": flipped, "another file's": b"\x7fELF" * 50}[damage])
    assert cubin_for("merge_states", MACROS, "sm_90") == right
    assert len(recorder.calls) == 2
    assert file.read_bytes() == content


def test_a_folder_that_cannot_be_written_costs_a_compilation_not_the_result(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "file"))  # even root cannot make a folder in a file
    assert cubin_for("merge_states", MACROS, "sm_90") == cubin_for("merge_states", MACROS, "sm_90")
    assert len(recorder.calls) == 2
