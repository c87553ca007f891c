"""Pin: the handle of frames that a caller asked to keep. A row of its own maps them, so they are neither evicted, moved nor written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pin:
    """Made by `MemoryManager.pin`, given back to `unpin`.

    `owner` and `deadline` are the caller's words, for `overdue`: a transfer that never ends is found by name, and not by a full pool.
    """

    asid: int
    generation: int
    num_frames: int
    owner: str
    deadline: float | None
