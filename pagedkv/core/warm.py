"""Warming up: compile what is called later, or load it from disk, so that no request waits for the compiler.

Numba compiles a function at its first call, once for each machine; later processes load the machine code from disk.
Another process compiles what a step calls (background.py); all other functions are compiled by their first call. A
signal that interrupts the compiler or the loading leaves the manager as it was before the call, but numba may be unable
to load functions afterwards. So an engine warms up before its first step.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pagedkv.core import background
from pagedkv.core.compiled import MACHINE_CODE
from pagedkv.core.frame_pool.pool import FramePool
from pagedkv.core.manager import MemoryManager
from pagedkv.core.states.door import StatePool
from pagedkv.core.tables import page_tables, steps
from pagedkv.core.tables.layer_groups import Group


def warm_up() -> None:
    """Call every compiled function of a MemoryManager once, on a small pool of its own."""
    warm_up_step()
    mm = MemoryManager(num_frames=8, block_size=2, events=1)
    space = mm.open([1])
    mm.commit(mm.plan([space], [5]), [1, 2, 3, 4, 5])
    space.truncate(4)
    mm.unpin(mm.pin(space))
    mm.advise(space, "demote")
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


def warm_up_states() -> None:
    """Call every compiled function of a MemoryManager with recurrent states once, on a small pool of its own."""
    mm = MemoryManager(num_frames=16, block_size=2, states=StatePool(8), groups=(Group(), Group(window=4)))
    space = mm.open([1, 2, 3, 4, 5])
    mm.commit(mm.plan([space], [5]), [1, 2, 3, 4, 5])
    mm.commit(mm.plan([space], [1]), [6])
    mm.abort(mm.plan([space], [2], certain=[1]))
    space.truncate(6)
    mm.reorder([space, space.fork()], [0])
    mm.unpin(mm.pin(space))
    mm.retire(1)
    mm.advance(1)
    mm.why([1, 2, 3])
    mm.resize(8)
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

    The first time on a machine, another process compiles them, see begin_warm_up; this one waits for it, and compiles
    what it could not.
    """
    begin_warm_up()
    background.wait()
    mm = MemoryManager(num_frames=8, block_size=2)
    parent = mm.open([1])
    mm.commit(mm.plan([parent], [3]), [1, 2, 3])
    mm.awaited([1, 2, 3])
    mm.abort(mm.plan([parent], [1]))
    parent.fork().release()
    parent.release()


def begin_warm_up() -> bool:
    """Let another process compile what a step calls, as the first step would; the caller may load weights meanwhile.

    Steps run uncompiled until that process has ended. It goes on if this one ends, but Ctrl-C at the terminal ends
    both. With PAGEDKV_BACKGROUND=0 there is none: the first calls compile. Idempotent.
    Returns: whether it runs. False if the functions are on disk already, or if no process can be started
    """
    return background.begin(MACHINE_CODE)


def place() -> str:
    """Return where compiled functions are kept, as a sentence."""
    return MACHINE_CODE.place


def compile_step() -> None:
    """Compile, without calls, the functions that a step calls."""
    for function, *args in _calls_of_step():
        if not numba.config.DISABLE_JIT:
            function.compile(tuple(map(numba.typeof, args)))


def _calls_of_step() -> list[tuple[Any, ...]]:
    """Return the functions of background.STEP, each with arguments of the types with which a step calls it."""
    state = MemoryManager(num_frames=8, block_size=2).state
    rows, counts = np.zeros(1, np.int32), np.zeros(1, np.int64)
    return [
        (page_tables.find_prefix, state, 0, 0, rows, 0, rows),
        (page_tables.open_space, state, 0, 0, rows, 0, False),
        (page_tables.fork_space, state, 0),
        (steps.num_tokens, counts, 0),
        (steps.plan_step, state, rows, counts, counts, rows),
        (page_tables.release_space, state, 0),
        (steps.abort_step, state, rows, counts, rows, False),
        (steps.commit_step, state, rows, counts, rows, counts, rows, True, False, False),
    ]
