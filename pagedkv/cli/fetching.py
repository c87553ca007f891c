"""From the name of a model to its folder. A model that is on the hub alone is fetched if the user agrees. No torch."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from pagedkv.engine.checkpoint import hub
from pagedkv.engine.checkpoint.config import ModelConfig
from pagedkv.errors import CheckpointError


def folder_of(model: str, *, is_agreed: bool) -> Path:
    """Return the folder of a model: a path, a snapshot in the cache of the hub, or one that is fetched.

    is_agreed: with --fetch. Else a user at a terminal is asked, and without a terminal nothing is fetched.
    The config comes first: a model that the engine cannot run is refused before its weights are fetched.
    Raises: CheckpointError
    """
    if (found := hub.find(model)) is not None:
        return found
    if not is_agreed and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise _absent(model)
    ModelConfig.load(hub.fetch(model, hub.CONFIG))
    num_bytes = hub.num_bytes(model)
    if not is_agreed and not _agrees(model, num_bytes):
        raise _absent(model)
    return hub.fetch(model)


def _agrees(model: str, num_bytes: int) -> bool:
    from rich.console import Console
    from rich.prompt import Confirm

    from pagedkv.cli.report import size

    question = f"{model} is not on this machine. Fetch it from the hub ({size(num_bytes, 1000)})?"
    with suppress(EOFError):  # Ctrl-D
        return Confirm.ask(question, console=Console(stderr=True, highlight=False), default=True)
    return False


def _absent(model: str) -> CheckpointError:
    import huggingface_hub

    where = f"no whole snapshot of it in the Hugging Face cache {huggingface_hub.constants.HF_HUB_CACHE}"
    return CheckpointError(
        f"there is no folder {model}, and {where}; give --fetch, or fetch it with: hf download {model}"
    )
