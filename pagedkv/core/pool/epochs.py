"""Epochs: which epoch may be opened or pass next. The fences of frames are in frames.py.

Epochs are kept modulo 2**31 in the records of frames, so those that have not passed lie within 2**30 of one another.
"""

from __future__ import annotations

from typing import Any

from pagedkv.core.arguments import whole
from pagedkv.core.pool import frames
from pagedkv.core.state import EPOCH, I64, PASSED, State
from pagedkv.errors import InvalidRequest


def opening(reg: I64, epoch: Any) -> tuple[int, int]:
    """Return (epoch, passed), the values of the registers EPOCH and PASSED once `epoch` is open.

    Raises: InvalidRequest unless `epoch` is newer than the last one, and near the oldest one that has not passed
    """
    epoch, newest = whole(epoch, "epoch"), int(reg[EPOCH])
    if epoch <= newest:
        raise InvalidRequest(f"retire under epoch {epoch}: epoch {newest} was opened already; give a larger number")
    oldest = int(reg[PASSED]) if newest > reg[PASSED] else epoch - 1
    if epoch - oldest >= 2**30:
        raise InvalidRequest(
            f"retire under epoch {epoch}: epoch {oldest} passed and later ones have not; keep epochs within 2**30 of it"
        )
    return epoch, oldest


def advance(s: State, epoch: Any) -> int:
    """Let `epoch` and older ones pass, and return how many frames waited for them.

    Raises: InvalidRequest for an epoch that was not opened
    """
    newest, epoch = int(s.reg[EPOCH]), whole(epoch, "epoch", -1)
    if epoch > newest:
        raise InvalidRequest(f"advance to epoch {epoch}: the newest one is {newest}; retire(epoch) opens one")
    if epoch <= s.reg[PASSED]:
        return 0  # epochs are kept modulo 2**31: a very old one could be taken for a future one
    return int(frames.pass_epoch(s, epoch))
