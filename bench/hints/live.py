"""Ours: the live `MemoryManager` serves the requests of a trace one after the other, with `retain` or without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.bench.hints.agents import BEGINNING, PAGE, Request
from pagedkv.core import MemoryManager


class Played(NamedTuple):
    """Tokens computed again, and the answers of `advise`."""

    again: int
    answers: Counter[str]


def play(trace: Sequence[Request], num_frames: int, share: float) -> Played:
    """Serve a trace. share: `hints` of the manager; 0 for no hint at all."""
    manager, again, answers = MemoryManager(num_frames, PAGE, hints=share), 0, Counter[str]()
    for request in trace:
        ids = _ids(request)
        space = manager.open(ids)
        again += max(0, PAGE * request.known - len(space))
        manager.commit(manager.plan([space], [len(ids) - len(space)]), ids[len(space) :])
        if share:
            until = request.now + request.expected
            answers[manager.advise(space, "retain", until=until, now=request.now)] += 1
        space.release()
    return Played(again, answers)


def _ids(request: Request) -> npt.NDArray[np.int32]:
    """Return the token ids of a context: no two agents, and no two tasks behind the beginning, have one in common."""
    places = np.arange(PAGE * request.pages, dtype=np.int64)
    tasks = np.where(places < PAGE * BEGINNING, 0, request.task + 1)
    ids = (request.agent << 24) + (tasks << 15) + places
    return ids.astype(np.int32)
