"""Files of this user that hold keys and values, or the names of pages, made in a folder that is not trusted.

Somebody may have put a file or a link under the name of a private file: its descriptor says what was opened, and a file
that is refused stays as it is.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from pagedkv.errors import InvalidRequest


def folder_of(folder: str | Path) -> Path:
    """Return the path of a folder that a user gave. Raises: InvalidRequest"""
    try:
        path = Path(folder)
        has_zero = b"\0" in os.fsencode(path)
    except TypeError:
        raise InvalidRequest(f"folder is {folder!r}; give a path") from None
    except UnicodeEncodeError:
        raise InvalidRequest(f"folder is {folder!r}; a path has no half of a surrogate pair") from None
    if has_zero:
        raise InvalidRequest(f"folder is {folder!r}; a path has no zero byte")
    return path


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone. A folder that is there stays as it is.

    Raises: OSError
    """
    missing = takewhile(lambda folder: not folder.exists(), (path, *path.parents))
    for folder in reversed(list(missing)):
        with suppress(FileExistsError):  # another process was faster
            folder.mkdir(mode=0o700)


def private(path: Path, flags: int) -> int:
    """Open a file that this user alone can open, and return its descriptor. With O_CREAT, a missing file is made.

    Raises: OSError for a file of another kind or user, or that others can open or have linked; strerror is the reason
    """
    descriptor, status = _own(path, flags)
    if (mode := stat.S_IMODE(status.st_mode)) & (stat.S_IRWXG | stat.S_IRWXO):
        os.close(descriptor)
        raise _refusal(path, f"its mode is 0{mode:o}, so other users can open it")
    return descriptor


def _own(path: Path, flags: int) -> tuple[int, os.stat_result]:
    """Open a regular file of this user that has one name. Return its descriptor and its status."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refusal(path, "it is a symbolic link, not a regular file") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refusal(path, "it is not a regular file")
        if status.st_uid != os.geteuid():
            raise _refusal(path, f"it belongs to user {status.st_uid}, and this process is user {os.geteuid()}")
        if status.st_nlink > 1:
            raise _refusal(path, f"it has {status.st_nlink} names (hard links)")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status


def _refusal(path: Path, reason: str) -> OSError:
    return OSError(errno.EPERM, f"{reason}: remove it", str(path))


class Lock:
    """The file at `path`, locked until `release` or the end of this object. One process holds it at a time.

    Raises: BlockingIOError while another process holds it; OSError as `private` does. A lock file of this user that
            others can open is closed to them: it holds nothing
    """

    def __init__(self, path: Path) -> None:
        import fcntl

        self._descriptor, self._fcntl, self._process = -1, fcntl, os.getpid()
        descriptor, _ = _own(path, os.O_RDWR | os.O_CREAT)
        try:
            os.fchmod(descriptor, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock up, also one that a forked process has a copy of. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        if self._process == os.getpid():  # a copy that is dropped leaves the lock to its owner
            self._fcntl.flock(descriptor, self._fcntl.LOCK_UN)
        os.close(descriptor)

    __del__ = release


def write(path: Path, content: bytes, *, part: Path) -> None:
    """Write a new private file `part` and rename it to `path`. A link there is replaced. No reader sees a half.

    Raises: OSError; then there is no new file
    """
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
