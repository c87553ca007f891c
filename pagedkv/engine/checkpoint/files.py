"""The files of a checkpoint folder: text and JSON, read with limits. A checkpoint comes from elsewhere: no trust.

Every fault of a file is a CheckpointError in one line, which names the file. The files may be symbolic links, as in the
cache of huggingface_hub; names that an index gives may not lead out of the folder.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import xxhash

from pagedkv.engine.checkpoint import regular_files
from pagedkv.errors import CheckpointError

MOST_BYTES: Final = 2**24
"""Bytes of a config or an index. The largest published index, of 600 billion parameters, has 9 million."""


def is_present(folder: Path, name: str) -> bool:
    """Return whether the folder has an entry of this name; a link to nowhere counts as absent."""
    return os.path.exists(folder / name)


def listed(folder: Path) -> str:
    """Return the names of the first entries of a folder, for an error."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        names = []
    return ", ".join(names[:8]) or "nothing"


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file of at most `most` bytes. Raises: CheckpointError if the file cannot be read."""
    try:
        return regular_files.read(path, most)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}, only: {listed(path.parent)}. "
            "Give the folder of a Hugging Face checkpoint"
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from None


def read_text(path: Path) -> str:
    """Return the content of a text file. Raises: CheckpointError if the file cannot be read or is not UTF-8."""
    data = read_bytes(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} cannot be read as UTF-8 ({error.reason} at byte {error.start}); it is not the real file. "
            "Fetch it again"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises: CheckpointError if the file cannot be read, is not JSON, holds no object, or has half of a surrogate pair
        in a text
    """
    text = read_text(path)
    try:
        values = json.loads(text)
        json.dumps(values, ensure_ascii=False).encode()  # a lone surrogate would fail later, where no file is known
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise CheckpointError(f"{path} has {half!r} in a text, half of a surrogate pair. Fetch it again") from None
    except RecursionError:
        raise CheckpointError(
            f"{path} cannot be read as JSON: it is nested too deeply; it is not the real file. Fetch it again"
        ) from None
    except ValueError as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON ({error}); it is truncated or not the real file. Fetch it again"
        ) from None
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path} holds a {type(values).__name__}, not an object; it is not the real file. Fetch it again"
        )
    return values


def read_json_if_present(folder: Path, name: str) -> dict[str, Any]:
    """Return the object of a JSON file of a folder; an empty one without the file. Raises: as `read_json`."""
    return read_json(folder / name) if is_present(folder, name) else {}


def is_plain_name(name: object) -> bool:
    """Return whether `name` can be an entry of a folder, and leads nowhere else."""
    if not isinstance(name, str) or name in ("", ".", "..") or not name.isprintable():
        return False
    return not {"/", "\\"} & set(name) and len(name.encode()) <= 255


def weights_digest(folder: Path) -> str:
    """Return 32 hex digits for config.json and the weights of a checkpoint. It reads all of them.

    Raises: CheckpointError if a file cannot be read
    """
    digest, chunk = xxhash.xxh3_128(), 2**22
    for path in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        try:
            regular_files.require(path)
            with open(path, "rb") as file:
                digest.update(path.name.encode())
                while part := file.read(chunk):
                    digest.update(part)
        except OSError as error:
            raise _unreadable(path, error) from None
    return digest.hexdigest()


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error.strerror}; give a file that can be read")
