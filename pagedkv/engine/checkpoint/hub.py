"""The cache of the Hugging Face hub on this machine: from the name of a repository to the folder of its snapshot.

huggingface_hub, which comes with tokenizers, knows where its cache lies and which snapshot is that of main. It is
asked for local files only: never the network.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from pagedkv.errors import CheckpointError

REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def find(model: str) -> Path:
    """Return the folder that `model` names: a path, or the name of a repository whose snapshot is in the local cache.

    A path that exists comes first, and a text that is no repository's name is a path.
    Raises: CheckpointError if there is neither such a path nor a snapshot; it names the command that fetches one
    """
    path = Path(model)
    if not REPOSITORY.fullmatch(model) or path.exists():
        return path
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError(
            f"there is no folder {model}, and huggingface_hub, which knows the cache of the hub, is not installed; "
            "give a folder, or install huggingface_hub"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(model, local_files_only=True))
    except (OSError, ValueError):
        folder = Path(huggingface_hub.constants.HF_HUB_CACHE, f"models--{model.replace('/', '--')}", "snapshots")
        if len(snapshots := list(folder.glob("*"))) == 1:  # fetched by a revision, so no branch names it
            return snapshots[0]
        raise CheckpointError(
            f"there is no folder {model}, and no snapshot of it in the Hugging Face cache "
            f"{huggingface_hub.constants.HF_HUB_CACHE}; fetch it with: hf download {model}"
        ) from None
