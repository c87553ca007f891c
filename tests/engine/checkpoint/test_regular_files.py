"""Regular files: a pipe, a device or a file that is too large is refused before it is opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagedkv.engine.checkpoint import regular_files


def make(kind: str, path: Path) -> None:
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a folder":
        path.mkdir()
    else:
        path.write_bytes(b"12345678")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("a pipe", "it is a pipe, not a regular file"),
        ("a device", "it is a device, not a regular file"),
        ("a folder", "it is a folder, not a regular file"),
        ("a large file", "it has 8 bytes, at most 7 are read"),
    ],
)
def test_a_file_that_is_refused_is_not_opened(
    kind: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(kind, tmp_path / "file")
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("the file was opened"))
    with pytest.raises(OSError, match=reason):
        regular_files.read(tmp_path / "file", 7)


def test_a_pipe_that_takes_the_place_of_a_file_is_refused_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("a pipe", tmp_path / "pipe")
    make("a file", tmp_path / "file")
    status = os.stat(tmp_path / "file")
    monkeypatch.setattr(os, "stat", lambda *_, **__: status)
    with pytest.raises(OSError, match="it is a pipe"):
        regular_files.read(tmp_path / "pipe", 8)


def test_a_link_to_a_regular_file_is_read(tmp_path: Path) -> None:
    make("a file", tmp_path / "file")
    (tmp_path / "link").symlink_to("file")
    assert regular_files.read(tmp_path / "link", 8) == b"12345678"
    with pytest.raises(FileNotFoundError):
        regular_files.read(tmp_path / "nothing", 8)
