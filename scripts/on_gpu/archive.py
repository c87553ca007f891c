"""The results of `make gpu` as one archive, and back: what a machine that is only had for minutes hands over.

    gpu-results.tar.gz   logs, rows and reports of all stages so far, at most LIMIT bytes
    summary.txt          one screen

Both are written again after each stage, under another name first, so a run that is killed leaves those of the stage
before. Files that do not fit are left out, the largest first, and named. This file knows no stage.
"""

from __future__ import annotations

import io
import os
import tarfile
import zlib
from pathlib import Path
from typing import Final

LIMIT: Final = 15 << 20
"""The most bytes of an archive: a machine gives back files of 16 MB."""

MOST_LOG: Final = 256 << 10
"""The most bytes of a log. Of a longer one the archive has the first and the last half."""

HUGE: Final = 256 << 20
"""A file of more bytes is not even compressed to see whether it fits."""


def pack(folder: Path, target: Path, limit: int = LIMIT) -> list[str]:
    """Write the files of `folder` to the archive `target`. Return the names of files that did not fit."""
    left_out, total = [], 4096
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as archive:
        for file in sorted((path for path in folder.rglob("*") if path.is_file()), key=_size):
            name = str(file.relative_to(folder))
            content = _shortened(file) if _size(file) <= HUGE else b""
            size = len(zlib.compress(content, 6)) + 1024
            if (not content and _size(file)) or total + size > limit:
                left_out.append(name)
                continue
            total += size
            about = tarfile.TarInfo(name)
            about.size, about.mtime = len(content), int(file.stat().st_mtime)
            archive.addfile(about, io.BytesIO(content))
    replace(target, held.getvalue())
    return left_out


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the archive of an earlier call into `folder`. Raises: OSError, tarfile.TarError"""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as held:
        for about in held.getmembers():
            target = (folder / about.name).resolve()
            content = held.extractfile(about) if about.isfile() else None
            if content is None or not target.is_relative_to(folder.resolve()):
                raise tarfile.TarError(f"{archive} holds {about.name!r}, which `make gpu` did not write")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read())


def replace(target: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    new = target.with_name(f".{target.name}.{os.getpid()}")
    new.write_bytes(content)
    new.replace(target)


def _size(file: Path) -> int:
    return file.stat().st_size


def _shortened(file: Path) -> bytes:
    content = file.read_bytes()
    if file.suffix != ".log" or len(content) <= MOST_LOG:
        return content
    half = MOST_LOG // 2
    return content[:half] + b"\n... %d bytes are left out ...\n" % (len(content) - 2 * half) + content[-half:]
