"""Launch: the number of this process under torchrun, and the command lines that several ranks do not serve. No torch.

All ranks have one command line and, as a rule, one checkpoint. So each rank comes to the same refusal by itself, before
they have met. The first rank of each machine prints it: the folders of two machines may differ.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pagedkv.checkpoint import BUNDLED
from pagedkv.checkpoint.config import ModelConfig
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

STARTED: Final = "TORCHELASTIC_RUN_ID"
"""Set by torchrun for its processes. Other programs set RANK and WORLD_SIZE too, for work that is not ours."""

PROMPT_TREE: Final = "prompt-tree"


class Place(NamedTuple):
    """The place of a process in its group.

    rank: its number, from 0. local_rank: its number on its machine. host, port: the address of the store where they
        meet.
    attempt: how often torchrun has started the group anew. agent_hosts: whether torchrun holds the store, or rank 0.
    """

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    attempt: int = 0
    agent_hosts: bool = False

    def device(self, name: str) -> str:
        """Return the device of this rank. Raises: InvalidRequest for one GPU, which all ranks would share"""
        if name not in ("cpu", "cuda"):
            raise InvalidRequest(
                f"the device is {name!r}, and torchrun started {self.size} ranks; give cpu, or cuda: then each rank "
                "takes the GPU of its number"
            )
        return f"cuda:{self.local_rank}" if name == "cuda" else name


def place() -> Place | None:
    """Return the place of this process; None if torchrun did not start it, or started no other.

    Raises: InvalidRequest if a variable of torchrun is missing or no number
    """
    if STARTED not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    given = {name: os.environ.get(name, "") for name in names}
    numbers = [given[name] for name in names if name != "MASTER_ADDR"]
    if not given["MASTER_ADDR"] or not all(text.isdecimal() for text in numbers):
        shown = ", ".join(f"{name}={text}" for name, text in given.items())
        raise InvalidRequest(f"{STARTED} is set, and beside it {shown}; start pagedkv by torchrun, or unset {STARTED}")
    attempt, agent = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    rank, size, local_rank, port = map(int, numbers)
    return Place(rank, size, local_rank, given["MASTER_ADDR"], port, int(attempt), agent == "True")


def is_follower() -> bool:
    """Return whether this process is one of several ranks and not the first, so that it prints nothing."""
    found = place()
    return found is not None and found.rank > 0


def prints_refusals() -> bool:
    """Return whether this process is alone, or the first rank of its machine. Raises: as `place`"""
    found = place()
    return found is None or found.local_rank == 0


def silence_torch() -> None:
    """Keep torch's own reports of a lost rank, with their traces, off stderr. Call it before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def require_one_process(command: str) -> None:
    """Raise InvalidRequest if torchrun started several processes."""
    if (found := place()) is not None:
        raise InvalidRequest(
            f"pagedkv {command} runs in one process, and torchrun started {found.size}; start it without torchrun"
        )


def require_served(size: int, folder: Path | None, loading: dict[str, Any]) -> None:
    """Raise InvalidRequest for a model or options that `size` ranks do not serve.

    loading: options of Engine.load. Raises: CheckpointError if the folder has no usable config.json
    """
    if loading.get("tiers"):
        raise InvalidRequest(
            f"--tier is given, and torchrun started {size} ranks: a tier fills the pool of one process only; "
            "leave it out, or start one process"
        )
    if loading.get("speculate") == PROMPT_TREE:
        raise InvalidRequest(
            f"--speculate is {PROMPT_TREE}, and torchrun started {size} ranks: the branches of a tree are moved in the "
            "pool of one process only; give prompt-lookup, draft or a folder"
        )
    ModelConfig.load(BUNDLED if folder is None else folder).share(size)
