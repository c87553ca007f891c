"""The cache of the Hugging Face hub: which snapshot is taken. tests/cli/test_fetching.py has the network.

Regular files: a pipe, a device or a file that is too large is refused before it is opened.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from pagedkv.engine.checkpoint import hub, regular_files
from pagedkv.errors import CheckpointError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def fetched(cache: Path, *commits: str, main: str | bytes | None) -> Path:
    """Write snapshots of owner/name as huggingface_hub does."""
    folder = cache / "models--owner--name"
    for commit in commits:
        (folder / "snapshots" / commit).mkdir(parents=True)
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (folder / "snapshots" / commit / name).touch()
    if main is not None:
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_bytes(main if isinstance(main, bytes) else main.encode())
    return folder / "snapshots"


def test_the_snapshot_of_main_is_taken(cache: Path) -> None:
    snapshots = fetched(cache, "abc", "def", main="def")
    assert hub.find("owner/name") == snapshots / "def"


@pytest.mark.parametrize("main", [None, "gone", b"\xff\xfe", b"a\0b", "x" * 9000])
def test_without_a_good_ref_there_is_no_snapshot(cache: Path, main: str | bytes | None) -> None:
    fetched(cache, "abc", "def", main=main)
    assert hub.find("owner/name") is None


def test_a_snapshot_without_weights_is_a_part(cache: Path) -> None:
    snapshots = fetched(cache, "abc", main="abc")
    (snapshots / "abc" / "model.safetensors").unlink()
    assert hub.find("owner/name") is None
    assert hub.find("owner/name", hub.CONFIG) == snapshots / "abc"


@pytest.mark.parametrize("missing", ["two.safetensors", "tokenizer.json", "config.json"])
def test_a_snapshot_without_a_file_that_the_engine_needs_is_a_part(cache: Path, missing: str) -> None:
    folder = fetched(cache, "abc", main="abc") / "abc"
    (folder / "model.safetensors").rename(folder / "two.safetensors")
    (folder / "one.safetensors").touch()
    shards = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
    assert hub.find("owner/name") == folder
    (folder / missing).unlink()
    assert hub.find("owner/name") is None


@pytest.mark.parametrize("model", ["", ".", "name", "a/b/c", "/etc/passwd", "../up", "owner/..", "\x1b[2J/a", "é/a"])
def test_other_texts_are_paths(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert hub.find(model) == Path(model)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="huggingface_hub, which knows the models of the hub, is not installed"):
        hub.find("owner/name")


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
