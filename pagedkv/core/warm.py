"""Warming up: compile what is called later, or load it from disk, so that no request waits for the compiler.

Numba compiles a function at its first call, once for each machine; later processes load the machine code from disk. A
signal that interrupts the compiler or the loading leaves the manager as it was before the call, but numba may be unable
to load functions afterwards. So an engine warms up before its first step.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numba
import numpy as np

from pagedkv.core.compiled import MACHINE_CODE
from pagedkv.core.manager import MemoryManager
from pagedkv.core.observation import Observe
from pagedkv.core.tables import page_tables, steps


def warm_up() -> None:
    """Call every compiled function of core once, on a small pool of its own."""
    warm_up_step()
    mm = MemoryManager(num_frames=8, block_size=2, observe=Observe(events=1, reuse=1, other_roots=True))
    space = mm.open([1])
    mm.commit(mm.plan([space], [5]), [1, 2, 3, 4, 5])
    space.truncate(4)
    space.punch(0, 1)
    mm.unpin(mm.pin(space))
    mm.advise(space)
    mm.retire(1)
    space.release()
    mm.advance(1)
    twin = mm.open([1, 2, 3])
    mm.commit(mm.plan([twin], [2]), [1, 2])
    mm.unpin(mm.pin(twin.pages))
    mm.evict(1)
    mm.resize(16)
    mm.forget()


def warm_up_step() -> None:
    """Call the compiled functions that a step calls: open, plan, commit, abort, fork and release.

    The first time on a machine a second process compiles a part of them.
    """
    with _second_compiler():
        mm = MemoryManager(num_frames=8, block_size=2)
        parent = mm.open([1])
        plan = mm.plan([parent], [3])
    mm.commit(plan, [1, 2, 3])
    mm.abort(mm.plan([parent], [1]))
    parent.fork().release()
    parent.release()


def compile_settling() -> None:
    """Compile the functions that end a step, without calling them: the part of the second process."""
    state, rows, counts = MemoryManager(num_frames=8, block_size=2).state, np.zeros(1, np.int32), np.zeros(1, np.int64)
    _compile(steps.commit_step, state, rows, counts, rows, counts, rows, True)
    _compile(steps.abort_step, state, rows, counts, rows, False)
    _compile(page_tables.release_space, state, 0)


def _compile(function: Any, *args: Any) -> None:
    if not numba.config.DISABLE_JIT:
        function.compile(tuple(map(numba.typeof, args)))


_SECOND: Final = "from pagedkv.core.warm import compile_settling; compile_settling()"


@contextmanager
def _second_compiler() -> Iterator[None]:
    """Let another process compile a part, and wait for it at the end, unless that part is on disk already.

    The caller compiles what the other process could not.
    """
    if not sys.executable or MACHINE_CODE.has("commit_step"):
        yield
        return
    quiet = subprocess.DEVNULL
    try:
        second = subprocess.Popen([sys.executable, "-c", _SECOND], stdin=quiet, stdout=quiet, stderr=quiet)
    except OSError:  # this machine allows no further process
        yield
        return
    with second:
        try:
            yield
        except BaseException:
            second.kill()
            raise
