"""Machine code on disk: where numba keeps the functions that it compiled from one set of sources.

Numba compiles a function again when its own file changes, but not when a function that it calls, perhaps inlined,
changes in another file. So the name of the folder holds the digest of all sources: after an upgrade in place, or an
edit, the folder is another one. The digest costs less than a millisecond an import.

    NUMBA_CACHE_DIR            if it is set
    <cache>/machine-code       the cache folder of debug.py: PAGEDKV_CACHE_DIR, or pagedkv/ in the user's cache
    <tmp>/pagedkv-<user>       if neither can be written; code of the folders above is copied there first
    (memory)                   if nothing can be written: every process compiles anew

Nothing is written beside the sources, so an installation may be read-only, and nothing is left when it is removed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pagedkv import debug

MOST_FOLDERS: Final = 4
"""Folders of older sources that are kept: other versions, in other environments, may still use them."""


class MachineCode:
    """The place for the compiled functions of the sources below one folder; makes numba's decorators use it."""

    def __init__(self, sources: Path, config: Any) -> None:
        """config: numba.config, whose CACHE_DIR is set while a function is decorated."""
        self.folder: Path | None = folder_for(sources)
        self._config = config

    def keep(self, decorator: Callable[..., Any], *args: Any, **options: Any) -> Callable[[Any], Any]:
        """Return `decorator(*args, **options)`, which keeps what it compiles in `folder`."""

        def decorate(function: Any) -> Any:
            before, self._config.CACHE_DIR = self._config.CACHE_DIR, str(self.folder or "")
            try:
                return decorator(*args, cache=self.folder is not None, **options)(function)
            finally:
                self._config.CACHE_DIR = before

        return decorate

    def has(self, name: str) -> bool:
        """Return whether a function of this name was compiled in this folder, or cannot be kept in any folder."""
        return self.folder is None or any(self.folder.rglob(f"*.{name}-*.nbi"))


def folder_for(sources: Path) -> Path | None:
    """Return the folder for functions compiled from the sources below `sources`; None if no folder can be written.

    Modifies: makes the folder, and removes those of older sources if there are more than MOST_FOLDERS
    """
    name, unwritable = f"{sources.name}-{_digest(sources)[:16]}", list[Path]()
    for base in _bases():
        place = base / name
        if not _can_write(place):
            unwritable.append(place)
            continue
        for full in unwritable:
            if _is_trusted(full, {0, _USER}) and not any(place.iterdir()):
                shutil.copytree(full, place, dirs_exist_ok=True)
        _remove_older(place, sources.name)
        return place
    return None


def _digest(folder: Path) -> str:
    """Return a hash of the names and the texts of all sources below `folder`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(text)} ".encode() + text)
    return digest.hexdigest()


def _bases() -> Iterator[Path]:
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(given)
    with suppress(RuntimeError):  # the user has no home
        yield debug.cache_folder() / "machine-code"
    yield Path(tempfile.gettempdir()) / f"pagedkv-{_USER}"


_USER: Final = os.getuid() if hasattr(os, "getuid") else 0


def _is_trusted(place: Path, owners: set[int]) -> bool:
    """Return whether `place` and the folder above are folders of `owners` that no other user can write.

    The folder above may be one of root's where each user removes his own files only, as /tmp.
    """
    try:
        mine, above = place.lstat(), place.parent.lstat()
    except OSError:
        return False
    shared = stat.S_IWGRP | stat.S_IWOTH
    is_tmp = above.st_uid == 0 and bool(above.st_mode & stat.S_ISVTX)
    is_mine = stat.S_ISDIR(mine.st_mode) and (
        os.name != "posix" or (mine.st_uid in owners and not mine.st_mode & shared)
    )
    is_safe_above = os.name != "posix" or is_tmp or (above.st_uid in owners and not above.st_mode & shared)
    return is_mine and is_safe_above


def _can_write(place: Path) -> bool:
    """Make `place`, and return whether this user can make files there, and no other user: code is loaded from it."""
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        if not _is_trusted(place, {_USER}):
            return False
        tempfile.TemporaryFile(dir=place).close()
        os.utime(place)
    except OSError:
        return False
    return True


def _remove_older(place: Path, name: str) -> None:
    """Remove all but the newest folders of other sources of this name, unless they were used in the last hour."""
    try:
        others = [path for path in place.parent.glob(f"{name}-*") if path != place]
        by_use = sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)
        for path in by_use[MOST_FOLDERS:]:
            if path.stat().st_mtime < time.time() - 3600:
                shutil.rmtree(path, ignore_errors=True)
    except OSError:  # another process removes them
        return
