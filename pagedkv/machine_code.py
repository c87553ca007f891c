"""Machine code on disk: where numba keeps the functions that it compiled from one set of sources.

Numba compiles a function again when its own file changes, but not when a function that it calls, perhaps inlined,
changes in another file. So the name of the folder holds the digest of all sources: after an upgrade in place, or an
edit, the folder is another one. The digest costs less than a millisecond an import.

    NUMBA_CACHE_DIR            if it is set
    <cache>/machine-code       the cache folder of debug.py: PAGEDKV_CACHE_DIR, or pagedkv/ in the user's cache
    <tmp>/pagedkv-<user>       if neither can be written
    (memory)                   if nothing can be written: every process compiles again

A new folder takes over the code of each module that an older folder, or one that cannot be written, has for the same
syntax tree of the module and of the modules that it imports. An edit of a comment or of a docstring compiles nothing.

This file writes nothing next to the sources, so an installation may be read-only, and can be removed without a trace.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pagedkv import debug

MOST_FOLDERS: Final = 16
"""Other folders that are kept: other versions, environments and processors may still use them."""

_LOG: Final = logging.getLogger(__name__)

_DIGESTS: Final = "digests.json"


class MachineCode:
    """The place for the compiled functions of the sources below one folder; makes numba's decorators use it."""

    def __init__(self, sources: Path, numba: Any, what: str) -> None:
        """numba: the package. what: the subject of the line that says what is compiled, and for how long."""
        self.folder: Path | None = _folder_for(sources, _compiler(numba))
        self._sources, self._numba, self._what = sources, numba, what
        self._said: set[str] = set()

    def keep(self, decorator: Callable[..., Any], *args: Any, **options: Any) -> Callable[[Any], Any]:
        """Return `decorator(*args, **options)`, which keeps what it compiles in `folder`.

        With `args`, the types of arguments, the decorator compiles at once.
        """

        def decorate(function: Any) -> Any:
            source = Path(function.__code__.co_filename)
            if self.folder is None or not source.is_relative_to(self._sources):
                return decorator(*args, cache=False, **options)(function)
            if args and not self.has(function.__name__):
                self.say("")
            impl = self._numba.core.caching.CompileResultCacheImpl
            locator = _Locator(self.folder / _name(source, self._sources))
            before, impl._locator_classes = impl._locator_classes, [locator]
            try:
                return decorator(*args, cache=True, **options)(function)
            finally:
                impl._locator_classes = before

        return decorate

    def has(self, name: str) -> bool:
        """Return whether a function of this name was compiled in this folder."""
        return self.folder is not None and any(self.folder.rglob(f"*.{name}-*.nbi"))

    @property
    def place(self) -> str:
        """str: where compiled functions are kept, as a sentence."""
        if self.folder is None:
            return "no folder can be written: each process compiles in memory; set PAGEDKV_CACHE_DIR to a folder"
        return f"compiled functions are kept in {self.folder.parent}"

    def say(self, how: str, *, again: bool = False) -> None:
        """Log, once a process, that functions are compiled; once for each `how` if it is said again.

        how: text on what goes on meanwhile
        """
        if how not in self._said and (again or not self._said):
            self._said.add(how)
            _LOG.warning("compiling %s%s; `pagedkv warm` compiles all at once; %s", self._what, how, self.place)


class _Locator:
    """The place of one module's functions, as numba asks for it. Their line numbers are of no account."""

    _py_file = "?"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def from_function(self, *_: object) -> _Locator:
        return self

    def ensure_cache_path(self) -> None:
        for place in (self._folder.parent, self._folder):  # another process may have removed them
            place.mkdir(mode=0o700, exist_ok=True)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return ""

    def get_disambiguator(self) -> str:
        return ""


def _compiler(numba: Any) -> str:
    """Return the versions and the processor for which numba compiles."""
    codegen = numba.core.codegen
    processor = f"{codegen.ll.get_host_cpu_name()} {codegen.get_host_cpu_features()}"
    return f"{sys.version_info[:2]} {numba.__version__} {processor}"


def _folder_for(sources: Path, compiler: str = "") -> Path | None:
    """Return the folder for functions compiled from the sources below `sources`; None if no folder can be written.

    compiler: the versions and the processor that the code is for.
    Modifies: makes the folder, with the code of older sources that are the same but for comments; removes the folders
    of older sources if there are more than MOST_FOLDERS
    """
    name, others = f"{sources.name}-{_digest(sources, compiler)[:16]}", list[Path]()
    for base in _bases():
        place = base / name
        if not _can_write(place):
            others.append(place)
            continue
        by_use = _by_use(base.glob(f"{sources.name}-*"))  # `place` is the first
        if not (place / _DIGESTS).exists():
            _take_over(place, _digests(sources, compiler), others + [path for _, path in by_use])
        for used, path in by_use[1 + MOST_FOLDERS :]:
            if used < time.time() - 3600:
                shutil.rmtree(path, ignore_errors=True)
        return place
    return None


def _digest(folder: Path, compiler: str = "") -> str:
    """Return a hash of the names and the texts of all sources below `folder`, and of the compiler."""
    digest = hashlib.sha256(compiler.encode())
    for path in sorted(folder.rglob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(text)} ".encode() + text)
    return digest.hexdigest()


def _name(source: Path, sources: Path) -> str:
    """Return the dotted name of a module below the package `sources`."""
    parts = source.relative_to(sources).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "__init__"


def _digests(sources: Path, compiler: str) -> dict[str, str]:
    """Return a hash for each module below the package `sources`: of its syntax tree and of those that it imports."""
    trees = {_name(path, sources): ast.parse(path.read_bytes()) for path in sorted(sources.rglob("*.py"))}
    reached = {name: {name, *_without_docstrings(tree, sources.name, set(trees))} for name, tree in trees.items()}
    for _ in trees:  # as many steps as the longest chain of imports has at most
        reached = {name: names.union(*(reached[other] for other in names)) for name, names in reached.items()}
    codes = {name: hashlib.sha256(ast.dump(tree).encode()).hexdigest() for name, tree in trees.items()}
    texts = {name: " ".join(f"{other} {codes[other]}" for other in sorted(names)) for name, names in reached.items()}
    return {name: hashlib.sha256(f"{compiler} {text}".encode()).hexdigest() for name, text in texts.items()}


def _without_docstrings(tree: ast.Module, package: str, modules: set[str]) -> set[str]:
    """Remove the docstrings of a tree. Return those of `modules`, which lie in `package`, that it imports."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
            if node.level:  # a relative import, of which there are none
                return modules
        elif isinstance(body := getattr(node, "body", None), list):
            body[:] = [each for each in body if not (type(each) is ast.Expr and type(each.value) is ast.Constant)]
    return {f".{name}".rpartition(f".{package}.")[2] for name in found} & modules


def _take_over(place: Path, digests: dict[str, str], others: list[Path]) -> None:
    """Copy the code of each module from the first of `others` that has it for the same digest.

    Other processes may do the same: each file and each folder of a module appears whole, or not at all.
    """
    for other in others:
        with suppress(OSError, ValueError):  # removed by another process, or made by another version of this file
            theirs = json.loads((other / _DIGESTS).read_text()) if _is_trusted(other, {0, _USER}) else {}
            for name in [name for name, digest in digests.items() if theirs.get(name) == digest]:
                if (other / name).is_dir() and not (place / name).exists():
                    _copy(other / name, place / name)
    with suppress(OSError), tempfile.TemporaryDirectory(dir=place) as draft:
        Path(draft, _DIGESTS).write_text(json.dumps(digests))
        Path(draft, _DIGESTS).replace(place / _DIGESTS)


def _copy(source: Path, target: Path) -> None:
    """Copy a folder. Links take no space, but some file systems refuse them; numba replaces files, and edits none."""
    for copy in (os.link, shutil.copy2):
        with suppress(OSError), tempfile.TemporaryDirectory(dir=target.parent) as draft:
            shutil.copytree(source, Path(draft, "copy"), copy_function=copy).rename(target)
            return


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


def _by_use(folders: Iterable[Path]) -> list[tuple[float, Path]]:
    """Return the time of the last use and the path of each folder, the newest first."""
    times = list[tuple[float, Path]]()
    for path in folders:
        with suppress(OSError):  # another process removes it
            times.append((path.stat().st_mtime, path))
    return sorted(times, reverse=True)
