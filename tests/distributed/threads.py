"""Ranks that are threads of one process: sums and messages through lists and barriers. Quick, and it counts the same.

A rank that raises breaks the barrier, so that no other one waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pagedkv.core.state import I32
from pagedkv.distributed.ranks import Ranks

PATIENCE_S = 60


class Meeting:
    """The memory that the threads share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.given: list[Any] = [None] * size

    def exchanged(self, rank: int, value: Any) -> list[Any]:
        """Give a value and return those of all ranks."""
        self.given[rank] = value
        self.barrier.wait()
        values = list(self.given)
        self.barrier.wait()
        return values


class ThreadRanks(Ranks):
    """One of the threads. Everything but the transport is that of Ranks."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size, self.device = rank, meeting.size, torch.device("cpu")
        self.messages, self.message_bytes = 0, 0
        self.sent: list[I32] = []
        self.session, self._sessions = 0, 0
        self._is_whole, self._meeting = True, meeting

    def send(self, words: I32) -> None:
        self.sent.append(words.copy())
        super().send(words)

    def add(self, x: Tensor) -> None:
        x.copy_(torch.stack(self._meeting.exchanged(self.rank, x.clone())).sum(0))

    def gathered(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        if not len(logits):
            return super().gathered(logits, out)
        parts = self._meeting.exchanged(self.rank, logits.clone())  # a follower goes on with its own
        return logits if self.rank else torch.cat(parts, dim=1, out=out)

    def _broadcast(self, words: I32) -> None:
        sent = self._meeting.exchanged(self.rank, words.copy())[0]
        words[:] = sent


def on_threads(size: int, lead: Callable[[ThreadRanks], Any], follow: Callable[[ThreadRanks], Any]) -> Any:
    """Run `lead` as rank 0 and `follow` as all others. Returns: the result of `lead`. Raises: the first error"""
    meeting, errors = Meeting(size), list[BaseException]()

    def guarded(run: Callable[[ThreadRanks], Any], rank: int) -> Any:
        try:
            return run(ThreadRanks(meeting, rank))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()
            return None

    others = [threading.Thread(target=guarded, args=(follow, rank), daemon=True) for rank in range(1, size)]
    for thread in others:
        thread.start()
    result = guarded(lead, 0)
    for thread in others:
        thread.join(PATIENCE_S)
    if errors:
        raise errors[0]
    return result
