"""The cache of the Hugging Face hub on this machine: from the name of a repository to the folder of its snapshot.

    CACHE/models--OWNER--NAME/refs/main                 the commit that was fetched last
    CACHE/models--OWNER--NAME/snapshots/COMMIT/         links to the files

CACHE is HF_HUB_CACHE, else HF_HOME/hub, else XDG_CACHE_HOME/huggingface/hub, else ~/.cache/huggingface/hub. This file
reads names and never the network; huggingface_hub need not be installed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from pagedkv import regular_files
from pagedkv.checkpoint.files import is_plain_name
from pagedkv.errors import CheckpointError

REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)

MOST_REF_BYTES: Final = 4096


def find(model: str) -> Path:
    """Return the folder that `model` names: a path, or the name of a repository whose snapshot is in the local cache.

    A path that exists comes first, and a text that is no repository's name is a path.
    Raises: CheckpointError if there is neither such a path nor a snapshot; it names the command that fetches one
    """
    path = Path(model)
    if not REPOSITORY.fullmatch(model) or path.exists():
        return path
    folder = cache() / f"models--{model.replace('/', '--')}"
    snapshot = _snapshot(folder)
    if snapshot is None:
        raise CheckpointError(
            f"there is no folder {model}, and no snapshot of it in the Hugging Face cache {cache()}; "
            f"fetch it with: hf download {model}"
        )
    return snapshot


def cache() -> Path:
    """Return the folder in which huggingface_hub keeps repositories, by its environment variables."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not given:
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        given = os.path.join(os.environ.get("HF_HOME") or os.path.join(root, "huggingface"), "hub")
    return Path(os.path.expanduser(os.path.expandvars(given)))


def _snapshot(folder: Path) -> Path | None:
    """Return the snapshot that refs/main names, else the only one; None if there is none."""
    snapshots = folder / "snapshots"
    try:
        commit = regular_files.read(folder / "refs" / "main", MOST_REF_BYTES).decode("ascii", "replace").strip()
        if is_plain_name(commit) and (snapshots / commit).is_dir():
            return snapshots / commit
    except OSError:
        pass
    try:
        found = [path for path in snapshots.iterdir() if path.is_dir()]
    except OSError:
        return None
    return found[0] if len(found) == 1 else None
