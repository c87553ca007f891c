"""Ownership: one thread calls a manager. A second one that comes in meanwhile is refused, as half of the arrays may be between two laws."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from pagedkv.errors import ConcurrentUse


class Guarded(Protocol):
    """What has the lock that `exclusive` takes."""

    _entered: threading.Lock


Self = TypeVar("Self", bound=Guarded)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def exclusive(
    method: Callable[Concatenate[Self, Parameters], Result],
) -> Callable[Concatenate[Self, Parameters], Result]:
    """A method that only one thread may be in."""

    @wraps(method)
    def guarded(self: Self, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if not self._entered.acquire(blocking=False):
            raise ConcurrentUse(
                f"MemoryManager.{method.__name__} was called while another call was under way; one thread owns a manager. "
                "Call it from one thread, or hold a lock of your own around it."
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            self._entered.release()

    return guarded
