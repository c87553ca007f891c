"""Ownership: one thread calls a manager. A second one that comes in meanwhile is refused, as half of the arrays may be between two laws.
That holds for what changes something, the fold of the events included; figures (`stats`, lengths) may be read by anybody.

Whoever wants more says `own()`: then every such call from another thread is refused, at whatever moment it comes, until that thread says
`own()` itself (the work was handed over) or the owner `disown()`. At PAGEDKV_DEBUG=3 the first caller owns the manager unasked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, Final, ParamSpec, TypeVar

from pagedkv import debug
from pagedkv.core.last_callers import LastCallers
from pagedkv.core.state import State
from pagedkv.errors import ConcurrentUse

_ANYONE: Final = 0
_FIRST_CALLER: Final = -1


class ThreadGuard:
    """What belongs to one thread at a time."""

    state: State

    def _begin_guard(self) -> None:
        """Begin."""
        self._entered = threading.Lock()
        self._owner, self._owner_name = _ANYONE, ""
        self._last_callers: LastCallers | None = None
        if debug.level() >= 3:
            self._owner, self._last_callers = _FIRST_CALLER, LastCallers()

    def own(self) -> None:
        """From now on only the calling thread may use this manager. Whoever takes work over from another thread says it again.

        Raises: ConcurrentUse while a call of another thread is under way
        """
        if not self._entered.acquire(blocking=False):
            raise ConcurrentUse(
                "own() was called while another call was under way; hand a manager over between two calls"
            )
        self._owner, self._owner_name = threading.get_ident(), threading.current_thread().name
        self._entered.release()

    def disown(self) -> None:
        """Any thread may use this manager again, one at a time."""
        self._owner = _ANYONE

    def _is_not_mine(self, verb: str) -> None:
        """The caller is not the owner: it becomes that if there is none yet, and is refused else."""
        if self._owner != _FIRST_CALLER:
            raise ConcurrentUse(
                f"MemoryManager.{verb} was called from thread {threading.current_thread().name!r}; thread {self._owner_name!r} owns the "
                "manager. Call own() in the new thread when work was handed over to it, or disown() if a lock of yours sees to it."
            )
        if not self._entered.locked():  # else the caller is refused at once, like any second one
            self.own()


Self = TypeVar("Self", bound=ThreadGuard)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def exclusive(
    method: Callable[Concatenate[Self, Parameters], Result],
) -> Callable[Concatenate[Self, Parameters], Result]:
    """A method that only one thread may be in, and only the owner if there is one."""
    verb = method.__name__

    @wraps(method)
    def guarded(self: Self, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if self._owner and self._owner != threading.get_ident():
            self._is_not_mine(verb)
        if not self._entered.acquire(blocking=False):
            raise ConcurrentUse(
                f"MemoryManager.{verb} was called while another call was under way; one thread owns a manager. "
                "Call it from one thread, or hold a lock of your own around it."
            )
        try:
            if self._last_callers is None:
                return method(self, *args, **kwargs)
            self._last_callers.before(self.state, verb, args)
            result = method(self, *args, **kwargs)
            self._last_callers.after(self.state, verb, args, result)
            return result
        finally:
            self._entered.release()

    return guarded
