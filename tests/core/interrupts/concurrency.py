"""A call of a manager that is under way in another thread for as long as a test needs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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
