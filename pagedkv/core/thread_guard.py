"""Thread guard: one thread at a time calls a manager. A second caller during a call gets ConcurrentUse.

During a call the arrays may break their invariants, so a second caller would read or write nonsense. The guard covers
every method that changes the state (`exclusive`), and those that read events. Any thread may read figures (`stats`,
lengths). A call that a signal interrupted may not be able to say that it ended. So a second caller is refused only if
the first call is found on the stack of its thread.

`own()` makes the guard stricter: the calling thread is the owner, and a call from any other thread is refused at any
moment. It lasts until the other thread calls `own()` itself, when the work was handed over, or the owner calls
`disown()`. At PAGEDKV_DEBUG=3 the first caller becomes the owner without `own()`.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, Final, NoReturn, ParamSpec, TypeVar

from pagedkv import debug
from pagedkv.core.last_callers import LastCallers
from pagedkv.core.state import State
from pagedkv.errors import ConcurrentUse, InvalidRequest

_ANYONE: Final = 0
_FIRST_CALLER: Final = -1
_MAY_YIELD: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_READINGS: Final = 1000
"""The most times that a stack is read which ends at a generator.

A thread of C code may begin with a generator. Then a call that was interrupted there counts as running until the thread
ends.
"""


class ThreadGuard:
    """Base class of an object that one thread at a time may call. It is neither copied nor pickled."""

    state: State

    def _begin_guard(self, *, strict: bool = True) -> None:
        """Begin without a call. strict: at PAGEDKV_DEBUG=3 the first caller is the owner, and calls are recorded."""
        self._calls: dict[int, list[int]] = {}
        """The call under way, at key 0, as a list with its thread. See `_succeed`."""
        self._succession = threading.Lock()
        self._owner, self._owner_name = _ANYONE, ""
        self._last_callers: LastCallers | None = None
        if strict and debug.level() >= 3:
            self._owner, self._last_callers = _FIRST_CALLER, LastCallers()

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise InvalidRequest(
            f"a {type(self).__name__} cannot be copied or pickled, since both would give out the same frames; make a "
            "new one"
        )

    def own(self) -> None:
        """Make the calling thread the owner: other threads are refused until they call own() themselves.

        Raises: ConcurrentUse while a call of another thread is under way
        """
        if self._is_under_way():
            raise ConcurrentUse(
                "own() was called while another call was under way; hand a manager over between two calls"
            )
        self._owner, self._owner_name = threading.get_ident(), threading.current_thread().name

    def _is_under_way(self) -> bool:
        return any(map(_is_running, list(self._calls.values())))

    def hand_over(self) -> None:
        """Make the calling thread the owner if there is an owner: for a caller whose own lock orders the threads.

        Raises: ConcurrentUse while a call of another thread is under way
        """
        if self._owner:
            self.own()

    def disown(self) -> None:
        """Allow any thread to use this manager again, one at a time."""
        self._owner = _ANYONE

    def _own_or_refuse(self, verb: str) -> None:
        """Make the calling thread the owner if the first caller is to be it, else raise ConcurrentUse."""
        if self._owner != _FIRST_CALLER:
            raise ConcurrentUse(
                f"{type(self).__name__}.{verb.lstrip('_')} was called from thread {threading.current_thread().name!r}; "
                f"thread {self._owner_name!r} owns the manager. Call own() in the new thread when work was handed over "
                "to it, or disown() if a lock of your own orders the calls."
            )
        if not self._calls:  # else `exclusive` refuses the caller as a second one
            self.own()

    def _succeed(self, call: list[int], verb: str) -> None:
        """Let `call` follow a call that was interrupted before it could say that it ended. Raises: ConcurrentUse.

        A call is under way while it is at key 0. Only its own end removes it there; if its frame is gone, it has no end
        any more, and the first thread to hold the lock takes its place.
        """
        with self._succession:  # CPython calls no signal handler between taking the lock and entering the block
            before = self._calls.setdefault(0, call)
            if before is call:
                return
            if not _is_running(before) and self._calls.get(0) is before:
                self._calls[0] = call
                return
        raise ConcurrentUse(
            f"{type(self).__name__}.{verb.lstrip('_')} was called while another call was under way; one thread owns it "
            "at a time. Call it from one thread, or hold a lock of your own around it."
        )


Self = TypeVar("Self", bound=ThreadGuard)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def exclusive(
    method: Callable[Concatenate[Self, Parameters], Result],
) -> Callable[Concatenate[Self, Parameters], Result]:
    """Decorate a method so that one thread at a time may run it, and only the owner if there is one."""
    verb = method.__name__

    @wraps(method)
    def guarded(self: Self, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if self._owner and self._owner != threading.get_ident():
            self._own_or_refuse(verb)
        call = [threading.get_ident()]
        if self._calls.setdefault(0, call) is not call:
            self._succeed(call, verb)
        try:
            if self._last_callers is None:
                return method(self, *args, **kwargs)
            self._last_callers.before(self.state, verb, args)
            result = method(self, *args, **kwargs)
            self._last_callers.after(self.state, verb, args, result)
            return result
        finally:
            del self._calls[0]

    return guarded


_GUARDED: Final = exclusive(ThreadGuard.own).__code__  # type: ignore[attr-defined]


def _is_running(call: list[int]) -> bool:
    """Return whether a frame of `guarded` that made `call` is on the stack of its thread.

    The other thread goes on while its stack is read. Its frames keep their callers when they return, but a generator
    forgets its caller when it yields, and in some versions when it returns. So a stack that ends at a generator is read
    again. This thread's own stack stands still.
    """
    is_own = call[0] == threading.get_ident()
    for _ in range(1 if is_own else _READINGS):
        frame = last = sys._current_frames().get(call[0])
        while frame is not None and not (frame.f_code is _GUARDED and frame.f_locals.get("call") is call):
            last, frame = frame, frame.f_back
        if frame is not None or last is None or not last.f_code.co_flags & _MAY_YIELD:
            return frame is not None
    return not is_own  # unknown: to refuse a caller is safe
