"""The mover: threads that move the bytes of one tier, loads before stores, no faster than a limit.

A mover knows tasks and their sizes; it must not know pages. The threads wait on a condition while there is no task.
A program that ends without `close` waits for the tasks that run, and drops the others. Such pages are computed again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

PAUSE: Final = 0.02
"""Seconds after which a task that waits for the limit looks whether it was cancelled."""


@dataclass(frozen=True)
class Task:
    """A call that moves `num_pages` pages, together `num_bytes`. It must not raise.

    is_cancelled: returns whether the call will move nothing, so that it need not wait for the limit.
    """

    run: Callable[[], None]
    num_pages: int
    num_bytes: int
    is_urgent: bool
    is_cancelled: Callable[[], bool]


class Mover:
    """A queue of tasks and the threads that run them.

    bytes_per_second: the most that all threads together move; None for no limit.
    """

    def __init__(self, name: str, num_threads: int, bytes_per_second: float | None = None) -> None:
        self._changed = threading.Condition()
        self._urgent: deque[Task] = deque()
        self._other: deque[Task] = deque()
        self._num_running = 0  # pages
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
        with self._changed:
            (self._urgent if task.is_urgent else self._other).append(task)
            self._changed.notify()

    @property
    def num_pages(self) -> int:
        """Pages of tasks that are queued or running."""
        with self._changed:
            return sum(task.num_pages for task in (*self._urgent, *self._other)) + self._num_running

    def drain(self, timeout: float) -> bool:
        """Wait until no task is queued or running, at most `timeout` seconds. Return whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._urgent or self._other or self._num_running), timeout)

    def close(self, timeout: float, *, finish: bool = True) -> bool:
        """Stop the threads, and wait for them, at most `timeout` seconds. Return whether all have ended.

        finish: whether tasks that have not begun run before.
        """
        until = time.monotonic() + timeout
        with self._changed:
            self._is_closed = True
            if not finish:
                self._urgent.clear()
                self._other.clear()
            self._changed.notify_all()
        others = [each for each in self._threads if each is not threading.current_thread()]  # a collector runs anywhere
        for thread in others:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in others):
            with self._changed:  # a thread that hangs now begins no other task when it comes back
                self._urgent.clear()
                self._other.clear()
            return False
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._other or self._is_closed)
                if not (self._urgent or self._other):
                    return
                task = (self._urgent or self._other).popleft()
                self._num_running += task.num_pages
            self._wait_for_limit(task)
            task.run()
            with self._changed:
                self._num_running -= task.num_pages
                self._changed.notify_all()

    def _wait_for_limit(self, task: Task) -> None:
        """Wait until the limit allows the task to begin. A task that is cancelled meanwhile uses nothing of it."""
        if self._bytes_per_second is None or task.is_cancelled():
            return
        seconds = task.num_bytes / self._bytes_per_second
        with self._changed:
            begin = max(self._free_at, time.monotonic())
            self._free_at = begin + seconds
        while (delay := begin - time.monotonic()) > 0 and not self._is_closed:
            if task.is_cancelled():
                with self._changed:
                    self._free_at -= seconds
                return
            time.sleep(min(delay, PAUSE))
