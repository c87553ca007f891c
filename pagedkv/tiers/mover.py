"""The mover: threads that move the bytes of one tier, loads before stores, no faster than a limit.

A mover knows tasks and their sizes; it must not know pages. The threads sleep while there is no task.
A program that ends without `close` waits for the tasks that run, and drops the others. Such pages are computed again.

**Interrupts.** The owner of a mover takes no lock: a KeyboardInterrupt may come where `with` would release it, and the
threads would wait for ever. The owner appends to a queue in one instruction, and wakes a thread in a second one. If an
interrupt comes between them, the next call of any method wakes a thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final

PAUSE: Final = 0.02
"""Seconds after which a task that waits for the limit looks whether it was cancelled."""
GLANCE: Final = 0.001
"""Seconds after which `drain` looks whether the tasks have ended."""


@dataclass(frozen=True, eq=False)
class Task:
    """A call that moves `num_pages` pages, together `num_bytes`. It must not raise.

    is_cancelled: returns whether the call will move nothing, so that it need not wait for the limit.
    """

    run: Callable[[], None]
    num_pages: int
    num_bytes: int
    is_urgent: bool
    is_cancelled: Callable[[], bool]
    queued_at: float = field(default_factory=time.monotonic)


class Mover:
    """A queue of tasks and the threads that run them.

    bytes_per_second: the most that all threads together move; None for no limit.
    """

    def __init__(self, name: str, num_threads: int, bytes_per_second: float | None = None) -> None:
        self._lock = threading.Lock()  # of the threads; the owner takes none
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._urgent: deque[Task] = deque()
        self._other: deque[Task] = deque()
        self._running: list[Task] = []
        self._is_closed = False
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0  # the time at which the limit allows the next task to begin
        self._threads = [
            threading.Thread(target=self._work, name=f"pagedkv {name} {number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, task: Task) -> None:
        """Queue a task."""
        (self._urgent if task.is_urgent else self._other).append(task)
        self._wakes.put(None)

    @property
    def num_pages(self) -> int:
        """Pages of tasks that are queued or running."""
        return sum(task.num_pages for task in self._tasks())

    def drain(self, timeout: float) -> bool:
        """Wait until no task is queued or running, at most `timeout` seconds. Return whether none is."""
        until = time.monotonic() + timeout
        while self._tasks():
            if (left := until - time.monotonic()) <= 0:
                return False
            time.sleep(min(left, GLANCE))
        return True

    def _tasks(self) -> set[Task]:
        """Return the tasks that are queued or running. It wakes a thread if an interrupt may have lost the wake."""
        queued = (*self._urgent, *self._other)  # before the running ones: a thread appends there, then removes here
        if queued and self._wakes.empty():
            self._wakes.put(None)
        return {*queued, *self._running}

    def close(self, timeout: float, *, finish: bool = True) -> bool:
        """Stop the threads, and wait for them, at most `timeout` seconds. Return whether all have ended.

        finish: whether tasks that have not begun run before.
        """
        until = time.monotonic() + timeout
        self._is_closed = True
        if not finish:
            self._drop()
        for _ in self._threads:
            self._wakes.put(None)
        others = [each for each in self._threads if each is not threading.current_thread()]  # a collector runs anywhere
        for thread in others:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in others):
            self._drop()  # a thread that hangs now begins no other task when it comes back
            return False
        return True

    def _drop(self) -> None:
        self._urgent.clear()
        self._other.clear()

    def _work(self) -> None:
        while (task := self._take()) or not self._is_closed:
            if task is None:
                self._wakes.get()
                continue
            self._wait_for_limit(task)
            task.run()
            with self._lock:
                self._running.remove(task)

    def _take(self) -> Task | None:
        """Return the next task, which counts as running from now on; None if none is queued.

        A task that is cancelled comes first: it takes no time, and its owner waits for its frames.
        """
        with self._lock:
            for queue in (self._urgent, self._other):
                with suppress(IndexError):
                    waiting = queue.copy()  # the owner may append meanwhile
                    task = next((task for task in waiting if task.is_cancelled()), waiting[0])
                    self._running.append(task)  # before it leaves the queue: `num_pages` must miss no task
                    with suppress(ValueError):  # `close` has dropped it meanwhile: it began before
                        queue.remove(task)
                    return task
        return None

    def _wait_for_limit(self, task: Task) -> None:
        """Wait until the limit allows the task to begin. A task that is cancelled meanwhile uses nothing of it.

        The time by which tasks before it ended late is made up for, up to the time that the task itself may take.
        """
        if self._bytes_per_second is None or task.is_cancelled():
            return
        seconds = task.num_bytes / self._bytes_per_second
        with self._lock:
            begin = max(self._free_at, task.queued_at, time.monotonic() - seconds)
            self._free_at = begin + seconds
        while (delay := begin - time.monotonic()) > 0 and not self._is_closed:
            if task.is_cancelled():
                with self._lock:
                    self._free_at -= seconds
                return
            time.sleep(min(delay, PAUSE))
