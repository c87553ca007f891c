"""Private files: each is this user's alone, and nothing of another file is changed. A tier takes no file of others."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock

import pytest

from pagedkv import PagedKVCache
from pagedkv.tiers import DiskTier, ObjectTier, Tier, private_files
from tests.tiers.world import IDS, SPEC, World, evicted

PRECIOUS = b"precious" * 100
IS_ROOT = os.geteuid() == 0


def plant(kind: str, path: Path) -> Path:
    """Put something of somebody else at `path`. Return the file that must stay as it is."""
    other = path.with_name("precious")
    other.write_bytes(PRECIOUS)
    other.chmod(0o600)
    if kind == "a symbolic link":
        path.symlink_to(other)
    elif kind == "a broken link":
        path.symlink_to(path.with_name("nothing"))
    elif kind == "a hard link":
        path.hardlink_to(other)
    elif kind == "a pipe":
        os.mkfifo(path, 0o600)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "another user's":
        other.rename(path)
        os.chown(path, 12345, -1)
        return path
    else:
        other.rename(path)
        path.chmod(int(kind, 8))
        return path
    return other


PLANTED = [
    *("a symbolic link", "a broken link", "a hard link", "a pipe", "a folder", "0640", "0602"),
    pytest.param("another user's", marks=pytest.mark.skipif(not IS_ROOT, reason="only root makes files of others")),
]


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT])
@pytest.mark.parametrize("kind", PLANTED)
def test_a_private_file_is_nobody_elses_and_what_is_refused_stays_as_it_is(
    kind: str, flags: int, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    other = plant(kind, path)
    mode, open_files = other.stat().st_mode, len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"it is a |it is not a |it belongs to |hard links|its mode is 0|a directory"):
        private_files.private(path, flags)
    assert (other.read_bytes(), other.stat().st_mode) == (PRECIOUS, mode)
    assert not (tmp_path / "nothing").exists()
    assert len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.parametrize("kind", PLANTED)
def test_a_file_is_written_in_place_of_what_is_there_and_never_through_it(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    other = plant(kind, path)
    if kind == "a folder":
        with pytest.raises(OSError, match="directory"):
            private_files.write(path, b"new", part=tmp_path / "beside")
        assert not (tmp_path / "beside").exists()
        return
    private_files.write(path, b"new", part=tmp_path / "beside")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert other == path or other.read_bytes() == PRECIOUS


@pytest.mark.parametrize("kind", PLANTED)
def test_a_name_beside_that_is_taken_is_an_error(kind: str, tmp_path: Path) -> None:
    other = plant(kind, tmp_path / "beside")
    with pytest.raises(FileExistsError):
        private_files.write(tmp_path / "file", b"new", part=tmp_path / "beside")
    assert not (tmp_path / "file").exists()
    assert other.read_bytes() == PRECIOUS


def test_a_lock_is_held_by_one_until_it_is_released_or_its_owner_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch(0o644)  # as older versions made it
    one = private_files.Lock(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            private_files.Lock(path)
    child = subprocess.Popen(["sleep", "60"])  # it gets no descriptor
    one.release()
    one.release()
    two = private_files.Lock(path)
    del two
    private_files.Lock(path).release()
    child.kill()
    child.wait()


def test_a_forked_process_neither_keeps_nor_gives_up_a_lock(tmp_path: Path) -> None:
    held = private_files.Lock(tmp_path / "lock")
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(writer)
        os.read(reader, 1)  # until the parent has closed its end
        os._exit(0)
    if (other := os.fork()) == 0:
        held.release()  # its copy
        os._exit(0)
    os.waitpid(other, 0)
    with pytest.raises(BlockingIOError):
        private_files.Lock(tmp_path / "lock")
    held.release()
    private_files.Lock(tmp_path / "lock").release()
    os.close(writer)
    os.waitpid(child, 0)
    os.close(reader)


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
