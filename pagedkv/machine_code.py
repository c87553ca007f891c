"""Machine code on disk: numba's cache of compiled functions, kept true to the sources.

Numba compiles a function again when its own file changes, and not when a function that it calls, perhaps inlined, changes in another file.
So after an upgrade in place, or an edit, old code would run in new callers. Here the sources of a folder are one: when any of them has
changed, all that was compiled of them is forgotten. It costs under a millisecond an import.

Where the folder cannot be written numba keeps its cache elsewhere (NUMBA_CACHE_DIR, or the user's cache), and that is not seen to.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

STAMP: Final = "numba.stamp"
"""Holds the digest of the sources that the compiled functions beside it were made of."""


def forget_stale(folder: Path) -> None:
    """Delete numba's compiled code of every module in `folder` and below, if any of their sources has changed since then.

    Modifies: the __pycache__ folders in `folder`; nothing where they cannot be written
    """
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))).hexdigest()
    cache = folder / "__pycache__"
    stamp = cache / STAMP
    try:
        if stamp.exists() and stamp.read_text() == digest:
            return
        cache.mkdir(exist_ok=True)
        for compiled in (*folder.rglob("__pycache__/*.nbi"), *folder.rglob("__pycache__/*.nbc")):
            compiled.unlink(missing_ok=True)
        written = stamp.with_suffix(f".{os.getpid()}")  # several processes may begin at once
        written.write_text(digest)
        written.replace(stamp)
    except OSError:  # a read-only installation
        return
