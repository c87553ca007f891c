"""Calls of a manager or a pool in other threads: one that is under way as long as a test needs it, and many at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pagedkv.core import MemoryManager


class Slow:
    """Token ids whose conversion to an array waits: `open` of them lasts until `finish` is set."""

    def __init__(self) -> None:
        self.begun, self.finish = threading.Event(), threading.Event()

    def __array__(self, *_: Any, **__: Any) -> Any:
        self.begun.set()
        self.finish.wait()
        return np.zeros(1, np.int32)


@contextmanager
def call_under_way(mm: MemoryManager) -> Iterator[None]:
    """Let another thread be inside of `mm.open` meanwhile."""
    ids = Slow()
    thread = threading.Thread(target=lambda: mm.open(ids).release())  # type: ignore[arg-type]
    thread.start()
    ids.begun.wait()
    try:
        yield
    finally:
        ids.finish.set()
        thread.join()


def at_once(*calls: Callable[[], object]) -> None:
    """Make each call in a thread, and wait for all. The threads take turns as often as Python lets them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
