"""The cache of the Hugging Face hub: where it lies, which snapshot is taken, and words for one that is absent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.checkpoint import hub
from pagedkv.errors import CheckpointError

VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache that the environment names."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def fetched(cache: Path, *commits: str, main: str | bytes | None) -> Path:
    """Write snapshots of owner/name as huggingface_hub does."""
    folder = cache / "models--owner--name"
    for commit in commits:
        (folder / "snapshots" / commit).mkdir(parents=True)
    if main is not None:
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_bytes(main if isinstance(main, bytes) else main.encode())
    return folder / "snapshots"


def test_the_snapshot_of_main_is_taken(cache):
    snapshots = fetched(cache, "abc", "def", main="def\n")
    assert hub.find("owner/name") == snapshots / "def"


@pytest.mark.parametrize("main", [None, "gone", "../../other", b"\xff\xfe", "x" * 9000])
def test_a_single_snapshot_is_taken_without_a_good_ref(cache, main):
    snapshots = fetched(cache, "abc", main=main)
    assert hub.find("owner/name") == snapshots / "abc"


def test_of_several_snapshots_none_is_guessed(cache):
    fetched(cache, "abc", "def", main=None)
    with pytest.raises(CheckpointError, match="no snapshot"):
        hub.find("owner/name")


def test_a_ref_that_is_a_pipe_is_not_opened(cache):
    fetched(cache, "abc", main="abc")
    (cache / "models--owner--name/refs/main").unlink()
    os.mkfifo(cache / "models--owner--name/refs/main")
    assert hub.find("owner/name").name == "abc"


def test_an_absent_model_is_refused_with_the_command_that_fetches_it(cache):
    with pytest.raises(CheckpointError) as error:
        hub.find("owner/name")
    assert str(error.value) == (
        f"there is no folder owner/name, and no snapshot of it in the Hugging Face cache {cache}; "
        "fetch it with: hf download owner/name"
    )


def test_a_folder_comes_before_the_cache(cache, tmp_path, monkeypatch):
    fetched(cache, "abc", main="abc")
    (tmp_path / "owner/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.find("owner/name") == Path("owner/name")


@pytest.mark.parametrize("model", ["", ".", "name", "a/b/c", "/etc/passwd", "../up", "owner/..", "\x1b[2J/a", "é/a"])
def test_other_texts_are_paths(cache, model):
    assert hub.find(model) == Path(model)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, "{home}/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/hub"),
        ({"HF_HOME": "~/h"}, "{home}/h/hub"),
        ({"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/h"}, "/old"),
        ({"HF_HUB_CACHE": "$HOME/c", "HUGGINGFACE_HUB_CACHE": "/old"}, "{home}/c"),
    ],
)
def test_the_place_is_that_of_huggingface_hub(monkeypatch, environment, place):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    expected = place.format(home=os.path.expanduser("~"))
    assert str(hub.cache()) == expected
    if pytest.importorskip("huggingface_hub"):
        program = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
        theirs = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert theirs.stdout.strip() == expected
