"""Models of the Hugging Face hub, by name: the folder of a snapshot in the local cache, and the download of one.

`find` asks huggingface_hub, which comes with tokenizers, for local files only. `num_bytes` and `fetch` use the network,
for the files that the engine reads and no others: a repository may hold the same weights in several formats.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from pagedkv.engine.checkpoint.files import is_plain_name, is_present, read_json
from pagedkv.errors import CheckpointError

_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)

_INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = ("config.json",)
FILES: Final = (
    *CONFIG,
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", _INDEX, "model*.safetensors"),
)
"""Patterns of the files that the engine reads. The last one is that of the weights."""


def find(model: str, files: tuple[str, ...] = FILES) -> Path | None:
    """Return the folder that `model` names: a path, or the snapshot of a repository in the local cache.

    A path that exists comes first, and a text that is no repository's name is a path.
    Returns: None if a repository has no snapshot, or one that lacks some of `files`
    Raises: CheckpointError without huggingface_hub
    """
    path = Path(model)
    if not _REPOSITORY.fullmatch(model) or path.exists():
        return path
    try:
        folder = Path(_library(model).snapshot_download(model, local_files_only=True, allow_patterns=[*files]))
    except (OSError, ValueError):
        return None
    return folder if all(is_present(folder, name) for name in _needed(folder, files)) else None


def _needed(folder: Path, files: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of those of `files` that the engine needs: huggingface_hub may return a part of a snapshot."""
    yield from (name for name in (*CONFIG, "tokenizer.json") if name in files)
    if FILES[-1] not in files:
        return
    if not is_present(folder, _INDEX):
        yield "model.safetensors"
        return
    with suppress(CheckpointError, AttributeError):  # a damaged index: the engine says so
        yield from filter(is_plain_name, read_json(folder / _INDEX).get("weight_map", {}).values())


def num_bytes(model: str) -> int:
    """Return the bytes of the files that `fetch` brings. Raises: CheckpointError, also if there are no safetensors"""
    with _from_hub(model) as library:
        found = library.HfApi().model_info(model, files_metadata=True).siblings or ()
    sizes = {file.rfilename: file.size or 0 for file in found if any(fnmatch(file.rfilename, name) for name in FILES)}
    if not any(fnmatch(name, FILES[-1]) for name in sizes):
        raise CheckpointError(f"{model} has no weights in safetensors format on the hub; name another model")
    return sum(sizes.values())


def fetch(model: str, files: tuple[str, ...] = FILES) -> Path:
    """Fetch a repository into the local cache, and return its folder. An interrupted download goes on where it ended.

    Raises: CheckpointError if that fails; what was fetched is no snapshot for `find` then
    """
    with _from_hub(model) as library, _bars(library.utils, shown=files != CONFIG and sys.stderr.isatty()):
        return Path(library.snapshot_download(model, allow_patterns=[*files]))


@contextmanager
def _bars(utils: Any, *, shown: bool) -> Iterator[None]:
    """Hide the progress bars of huggingface_hub unless they are `shown`: some of them do not ask for a terminal."""
    hide = not shown and not utils.are_progress_bars_disabled()
    if hide:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            utils.enable_progress_bars()


def _library(model: str) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError(
            f"there is no folder {model}, and huggingface_hub, which knows the models of the hub, is not installed; "
            "give a folder, or install huggingface_hub"
        ) from None
    return huggingface_hub


@contextmanager
def _from_hub(model: str) -> Iterator[Any]:
    """Yield huggingface_hub. Raise a CheckpointError of one line for any error of the block."""
    library = _library(model)
    try:
        yield library
    except Exception as error:  # of huggingface_hub, requests, httpx or httpx2, by version
        known = {
            "GatedRepoError": f"accept its terms at {library.constants.ENDPOINT}/{model}, and run hf auth login",
            "RepositoryNotFoundError": "the hub has no such model, or it is private and needs hf auth login",
        }
        reason = str(error).partition("\n")[0].removeprefix("Got: ") or type(error).__name__
        if library.constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE forbids the network"
        why = known.get(type(error).__name__, f"{reason}; try again, or give a folder")
        raise CheckpointError(f"there is no folder {model}, and it cannot be fetched from the hub: {why}") from None
