"""Machine code on disk: delete numba's cache of compiled functions when a source file has changed.

Numba compiles a function again when its own file changes, but not when a function that it calls, perhaps inlined,
changes in another file. So after an upgrade in place, or an edit, old code would run inside new callers. `forget_stale`
treats all sources below a folder as one unit: when any of them has changed, it deletes all code that was compiled from
them. The check costs less than a millisecond an import.

If the folder cannot be written, numba keeps its cache elsewhere (NUMBA_CACHE_DIR, or the user's cache); that cache is
not checked.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

STAMP: Final = "numba.stamp"
"""Name of the file that holds the sha256 of the sources from which the code below the folder was compiled."""


def _digest(folder: Path) -> str:
    """Return a hash of the names and the texts of all sources below `folder`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(text)} ".encode() + text)
    return digest.hexdigest()


def forget_stale(folder: Path) -> None:
    """Delete numba's compiled code of every module below `folder` if any source there has changed since the last call.

    Modifies: the __pycache__ folders in `folder` and below, if they can be written
    """
    digest = _digest(folder)
    cache = folder / "__pycache__"
    stamp = cache / STAMP
    try:
        if stamp.exists() and stamp.read_text() == digest:
            return
        cache.mkdir(exist_ok=True)
        for compiled in (*folder.rglob("__pycache__/*.nbi"), *folder.rglob("__pycache__/*.nbc")):
            compiled.unlink(missing_ok=True)
        written = stamp.with_suffix(f".{os.getpid()}")  # several processes may start at once
        written.write_text(digest)
        written.replace(stamp)
    except OSError:  # a read-only installation
        return
