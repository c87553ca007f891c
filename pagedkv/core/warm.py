"""Warming up: call every compiled function of core once, so that no request waits for the compiler.

Numba compiles a function at its first call, once per machine; all of core takes some forty seconds. Later processes
load the machine code from disk. A server warms up before it listens.
"""

from __future__ import annotations

from pagedkv.core.manager import MemoryManager
from pagedkv.core.observation import Observe


def warm_up() -> None:
    """Call every compiled function of core once, on a small pool of its own."""
    mm = MemoryManager(num_frames=8, block_size=2, observe=Observe(events=1, reuse=1, other_roots=True))
    parent = mm.open([1])
    mm.commit(mm.plan([parent], [5]), [1, 2, 3, 4, 5])
    child = parent.fork()
    mm.commit(mm.plan([parent, child], [2, 2]), [6, 7, 8], [2, 1])
    mm.abort(mm.plan([child], [1]))
    child.truncate(3)
    child.punch(0, 1)
    mm.unpin(mm.pin(parent))
    mm.advise(child)
    mm.retire(1)
    child.release()
    parent.release()
    mm.advance(1)
    twin = mm.open([1, 2, 3])
    mm.unpin(mm.pin(twin.pages))
    mm.evict(1)
    mm.resize(16)
    mm.forget()
