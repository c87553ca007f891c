"""Files that hold keys and values, or names of pages, are this user's alone. A tier takes no file of others."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock

import pytest

from pagedkv import PagedKVCache
from pagedkv.tiers import DiskTier, ObjectTier, Tier
from tests.tiers.trust.test_private_files import PLANTED, PRECIOUS, plant
from tests.tiers.world import IDS, SPEC, World, evicted


def objects(folder: Path) -> Tier:
    pytest.importorskip("obstore")
    folder.mkdir()
    return ObjectTier(f"file://{folder}", "1MiB", key=None, linger=0.0, patience=5.0)


MAKES: dict[str, Callable[[Path], Tier]] = {
    "disk": lambda folder: DiskTier(folder / "tier", "1MiB"),
    "disk, not direct": lambda folder: DiskTier(folder, "1MiB", direct=False),
    "objects": lambda folder: objects(folder / "objects"),
}


def modes(folder: Path) -> set[int]:
    """Return the modes of all files below `folder`."""
    return {stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*") if not path.is_dir()}


@pytest.fixture(params=[0o000, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("kind", MAKES)
def test_files_of_a_tier_are_for_this_user_alone_whatever_the_umask(
    kind: str, umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, one_at_a_time = os.replace, Lock()  # another thread of the tier would rename a file while modes looks

    def renamed(part: Path, path: Path) -> None:
        with one_at_a_time:
            assert modes(tmp_path) == {0o600}, "before a file has its name, too"
            replace(part, path)

    monkeypatch.setattr(os, "replace", renamed)
    tier = MAKES[kind](tmp_path)
    world = evicted(tier)
    assert world.fetched(IDS) == 40
    world.store([7, *IDS])
    world.cache.tiers.close()
    assert modes(tmp_path) == {0o600}
    made = [path for path in tmp_path.rglob("*") if path.is_dir() and path != tmp_path / "objects"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} <= {0o700}


@pytest.mark.parametrize("end", ["lock", "json", "seals", "bytes"])
@pytest.mark.parametrize("kind", PLANTED)
def test_a_disk_tier_takes_no_file_of_others_and_keeps_its_own_pages(kind: str, end: str, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    evicted(DiskTier(folder, "1MiB")).cache.tiers.close()
    path = folder / f"pagedkv-tier.{end}"
    own = {file.name: file.read_bytes() for file in folder.iterdir() if file != path}
    aside = path.rename(tmp_path / "aside")
    other = plant(kind, path)
    if end == "lock" and kind.isdigit():  # a mode. A lock holds nothing: it is closed to others
        evicted(DiskTier(folder, "1MiB")).cache.tiers.close()
        assert modes(folder) == {0o600}
        return
    with pytest.raises(
        OSError, match=f"(it is a|it is not a|it belongs|hard links|its mode is|a directory).*pagedkv-tier.{end}"
    ):
        PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(folder, "1MiB")])
    assert other.read_bytes() == PRECIOUS
    assert {name: (folder / name).read_bytes() for name in own} == own
    for planted in {path, other}:
        planted.rmdir() if planted.is_dir() and not planted.is_symlink() else planted.unlink(missing_ok=True)
    aside.rename(path)
    world = World(PagedKVCache(SPEC, model="m", num_frames=16, tiers=[DiskTier(folder, "1MiB")]))
    assert world.fetched(IDS) == 40
    world.cache.tiers.close()
