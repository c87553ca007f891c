"""Regular files of others: the kind and the size of a file are known before it is opened for reading.

A name in a folder that is not trusted may lead to a pipe, which has no end or no writer, to a device, or to a file of
many terabytes. A symbolic link is followed to its target.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

_KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes. A file of another kind is not opened.

    Raises: OSError for a file that is missing, of another kind, larger, or unreadable; strerror is the reason
    """
    require(path, most)
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # the file may be a pipe by now
    with open(descriptor, "rb") as file:
        require(path, most, os.fstat(descriptor))
        return file.read(most + 1)


def require(path: Path, most: int | None = None, status: os.stat_result | None = None) -> None:
    """Raise OSError unless `path` is a regular file of at most `most` bytes. status: of the file, if it is open."""
    status = status or os.stat(path)
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'a special file')}, not a regular file", str(path))
    if most is not None and status.st_size > most:
        raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, at most {most:,} are read", str(path))
