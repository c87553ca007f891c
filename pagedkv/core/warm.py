"""Warming up: compile what is called later, or load it from disk, so that no request waits for the compiler.

Numba compiles a function at its first call, once for each machine; later processes load the machine code from disk. A
signal that interrupts the compiler or the loading leaves the manager as it was before the call, but numba may be unable
to load functions afterwards. So an engine warms up before its first step.

Two processes compile the functions of a step at the same time. They read no request and write only machine code. A
program that ends at an interrupt need not wait for them: meanwhile, Python runs the same functions uncompiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Final

import numba
import numpy as np

from pagedkv.core import manager, recovery
from pagedkv.core.compiled import MACHINE_CODE
from pagedkv.core.frame_pool.pool import FramePool
from pagedkv.core.manager import MemoryManager
from pagedkv.core.state import I32, I64, State
from pagedkv.core.tables import page_tables, steps


def warm_up() -> None:
    """Call every compiled function of a MemoryManager once, on a small pool of its own."""
    warm_up_step()
    mm = MemoryManager(num_frames=8, block_size=2, events=1)
    space = mm.open([1])
    mm.commit(mm.plan([space], [5]), [1, 2, 3, 4, 5])
    space.truncate(4)
    mm.unpin(mm.pin(space))
    mm.advise(space)
    mm.retire(1)
    space.release()
    mm.advance(1)
    mm.lookup([1])
    mm.reorder([mm.open([1])], [])
    twin = mm.open([1, 2, 3])
    mm.commit(mm.plan([twin], [2]), [1, 2])
    mm.unpin(mm.pin(twin.pages))
    mm.evict(1)
    mm.resize(16)
    mm.forget()


def warm_up_frame_pool() -> None:
    """Call every compiled function of a FramePool once, on a small pool of its own."""
    pool = FramePool(num_frames=8, key_bytes=4)
    frames = pool.take(2)
    held = pool.publish(frames, [b"key1", b"key2"])
    pool.share(pool.find([b"key1"]))
    pool.drop(held)
    pool.drop(pool.take_one())
    pool.drop(pool.take([7]))
    pool.retire(1)
    pool.advance(1)
    pool.victims(1)
    pool.evict(1)
    pool.unpublish(frames)
    pool.recover(np.zeros(8, np.int32))
    pool.forget()


def warm_up_step() -> None:
    """Call the compiled functions that a step calls: awaited, open, plan, commit, abort, fork and release.

    The first time on a machine, other processes compile them, see begin_warm_up. This process compiles what they could
    not. It waits for nothing while the functions run uncompiled.
    """
    begin_warm_up()
    if _uncompiled:
        return
    _wait()
    mm = MemoryManager(num_frames=8, block_size=2)
    parent = mm.open([1])
    mm.commit(mm.plan([parent], [3]), [1, 2, 3])
    mm.awaited([1, 2, 3])
    mm.abort(mm.plan([parent], [1]))
    parent.fork().release()
    parent.release()


def begin_warm_up(*, uncompiled: bool = False) -> bool:
    """Start processes that compile what a step calls; the caller may load its weights meanwhile. Idempotent.

    They end with this process. warm_up_step waits for them.
    uncompiled: run the functions uncompiled until the processes have ended, which may go on after this one. For a
                program that ends at an interrupt: a function that an interrupt ends in its midst leaves nonsense.
    Returns: whether they run. False if the functions are on disk already, or if no process can be started
    """
    if not _compilers and sys.executable and not all(map(MACHINE_CODE.has, PARTS)):
        quiet = subprocess.DEVNULL
        with suppress(OSError):  # this machine allows no further process
            for part in PARTS:
                command = [sys.executable, "-c", _PROGRAM, part, *(["alone"] if uncompiled else [])]
                _compilers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet))
        if len(_compilers) == len(PARTS) and uncompiled and MACHINE_CODE.folder and not numba.config.DISABLE_JIT:
            _run_uncompiled()
    return bool(_compilers)


def _run_uncompiled() -> None:
    """Let the callers of a step's functions see them uncompiled, until the processes have compiled all of them."""
    plain = [_plain(function) for last in PARTS for function, *_ in _calls(last)]
    for caller in (manager, recovery):
        for module in (page_tables, steps):
            name = module.__name__.rpartition(".")[2]
            if hasattr(caller, name):
                _uncompiled.append((caller, name, module))
                setattr(caller, name, _View(module, [each for each in plain if each.__module__ == module.__name__]))
    threading.Thread(target=_run_compiled, name="pagedkv-compile", daemon=True).start()


def _run_compiled() -> None:
    """Wait for the processes, and let the callers see the modules themselves again if all is compiled."""
    if not any(process.wait() for process in _compilers):
        while _uncompiled:
            caller, name, module = _uncompiled.pop()
            setattr(caller, name, module)


class _View:
    """A module in which some functions are others."""

    def __init__(self, module: Any, functions: list[Any]) -> None:
        self._module = module
        for function in functions:
            setattr(self, function.__name__, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _plain(function: Any) -> Callable[..., Any]:
    """Return the Python function of a compiled one. Its hashes overflow, as they do in machine code."""

    @wraps(function.py_func)
    def run(*args: Any) -> Any:
        with np.errstate(over="ignore"):
            return function.py_func(*args)

    return run


def _wait() -> None:
    """Wait for the processes, and end them if the wait is interrupted."""
    try:
        for process in _compilers:
            process.wait()
    finally:
        for process in _compilers:
            process.kill()
        while _compilers:
            _compilers.pop().communicate()


def compile_part(last: str) -> None:
    """Compile, without calls, the functions of the part of a step whose last function is `last`."""
    for function, *args in _calls(last):
        if not numba.config.DISABLE_JIT:
            function.compile(tuple(map(numba.typeof, args)))


Calls = list[tuple[Any, ...]]


def _calls(last: str) -> Calls:
    """Return the functions of a part, each with arguments of the types with which a step calls it."""
    state = MemoryManager(num_frames=8, block_size=2).state
    return PARTS[last](state, np.zeros(1, np.int32), np.zeros(1, np.int64))


def _planning(state: State, rows: I32, counts: I64) -> Calls:
    return [
        (page_tables.open_space, state, 0, 0, rows, 0, False),
        (page_tables.fork_space, state, 0),
        (steps.num_tokens, counts, 0),
        (steps.plan_step, state, rows, counts, counts, rows),
    ]


def _settling(state: State, rows: I32, counts: I64) -> Calls:
    return [
        (page_tables.release_space, state, 0),
        (steps.abort_step, state, rows, counts, rows, False),
        (steps.commit_step, state, rows, counts, rows, counts, rows, True, False, False),
    ]


PARTS: Final = {"plan_step": _planning, "commit_step": _settling}
"""The parts of a step, each with arguments of its functions, under the name of the function that is compiled last."""

_compilers: Final[list[subprocess.Popen[bytes]]] = []

_uncompiled: Final[list[tuple[Any, str, Any]]] = []
"""(caller, name, module): each module that uses a `_View`, its name for it, and the module of the function."""

_PROGRAM: Final = """
import gc, sys
gc.disable()  # the compiler makes many objects that live: to look for garbage takes a tenth of its time
from pagedkv.core import warm
if sys.argv[2:]:
    warm.give_way()
else:
    warm.end_with_parent()
warm.compile_part(sys.argv[1])
"""


def give_way() -> None:
    """Let other processes have the processor first."""
    if hasattr(os, "nice"):
        os.nice(5)


def end_with_parent() -> None:
    """Let this process end when stdin does: when the process that holds the other end of the pipe has ended."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
