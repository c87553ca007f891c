"""The cache of the Hugging Face hub: which snapshot is taken. tests/cli/test_fetching.py has the network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pagedkv.engine.checkpoint import hub
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
