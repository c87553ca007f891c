"""Run: one command on all ranks. Rank 0 runs it, the others follow its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pagedkv.distributed.follower import follow
from pagedkv.distributed.launch import Place, require_served
from pagedkv.distributed.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OF_MODEL: Final = ("dtype", "weights", "window", "sinks")
"""Options of Engine.load that all ranks need; those of the pool come from rank 0."""


def on_each(place: Place, folder: Path | None, loading: dict[str, Any], lead: Callable[[Ranks], int]) -> int:
    """Run `lead` on rank 0, and follow it on the others. Returns: the exit status

    loading: options of Engine.load, the same on all ranks.
    Raises: InvalidRequest or CheckpointError for what several ranks do not serve, before they meet; RankLost; on rank 0
        all errors of `lead`
    """
    require_served(place.size, folder, loading)
    with Ranks(place, place.device(loading["device"])) as ranks:
        if ranks.rank == 0:
            return lead(ranks)
        follow(ranks, folder, **{name: loading[name] for name in OF_MODEL})
        return 0
