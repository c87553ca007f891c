"""Watch: a process notices that another one has died or hangs, within a deadline, also in the middle of a sum.

    each second    a rank adds 1 to its count in the store, and reads the counts of those that it watches
    rank 0         watches all others; the others watch rank 0
    a count that stands still for the deadline, or a store that cannot be reached: one line on stderr, and the end

A thread does this, over a connection of its own: a collective of gloo waits for a dead rank as long as for an idle one,
and followers wait between steps for as long as the user thinks. Collectives cannot be stopped, so the end is that of
the process (`os._exit`). An interrupt, or an error of one rank, is told to the others through the key ENDED. A second
thread, the timer, ends the process if the store itself does not answer: its host may have been stopped.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

LOST: Final = 3
"""The exit status of a process whose group has lost a rank."""

ENDED: Final = "ended"
LEFT: Final = "left"
"""Keys of the store: why the group ends, and how many followers have seen its end."""

BEAT_S: Final = 1.0
"""Seconds between two beats."""
JOINING: Final = 10
"""Deadlines that a rank may take to come at the start: until then it cannot be told from a dead one."""

_STDERR: Final = 2

T = TypeVar("T")


class Store(Protocol):
    """The methods of a store of torch.distributed that are used here."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, which begins with 0, and return it."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether the store has all keys."""

    def get(self, key: str, /) -> bytes:
        """Return a value."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""


class Watch:
    """The thread of one rank that watches others.

    connect: makes a connection to the store. deadline: seconds of silence after which a rank counts as dead.
    """

    def __init__(self, connect: Callable[[], Store], rank: int, size: int, deadline: float) -> None:
        self._connect, self._rank, self._deadline = connect, rank, deadline
        self._peers = range(1, size) if rank == 0 else (0,)
        self._beat_s = min(BEAT_S, deadline / 4)
        self._stopping, self._ending = threading.Event(), threading.Lock()
        self._answered_at: float | None = None  # by the store
        self._is_claimed = False

    def start(self) -> None:
        """Begin to beat and to watch."""
        for run in (self._run, self._time):
            threading.Thread(target=run, name="pagedkv watch", daemon=True).start()

    def stop(self) -> None:
        """Stop both, so that the end of another rank is no fault."""
        self._stopping.set()

    def claim(self) -> None:
        """Let the calling thread end this process. It does not return if the watch is ending it already."""
        if not self._is_claimed and not self._ending.acquire(blocking=False):
            threading.Event().wait()
        self._is_claimed = True

    def _run(self) -> None:
        try:
            self._watch(self._connect())
        except RuntimeError as error:  # of torch.distributed
            self._end(f"the store through which the ranks meet is gone ({cause(error)})")

    def _watch(self, store: Store) -> None:
        last = time.monotonic()
        heard = dict.fromkeys(self._peers, (0, last))
        while not self._stopping.is_set():  # beat at once: a rank without a beat counts as one that has not come yet
            if (ended := end_of(store)) is not None:
                self._follow(store, ended)
                return
            store.add(f"beat/{self._rank}", 1)
            now, before = time.monotonic(), last
            last = now
            for peer, (count, since) in heard.items():
                new = store.add(f"beat/{peer}", 0)
                # A process that was itself stopped knows nothing of that time.
                if new != count or now - before > self._deadline / 2:
                    heard[peer] = new, now
                elif now - since > self._deadline * (1 if count else JOINING):
                    self._end(f"rank {peer} gave no sign for {now - since:.0f} s")
                    return
            self._answered_at = time.monotonic()
            self._stopping.wait(self._beat_s)

    def _time(self) -> None:
        """End this process if the store does not answer."""
        last = began = time.monotonic()
        while not self._stopping.wait(self._beat_s):
            now, before, answered = time.monotonic(), last, self._answered_at
            last, since = now, began if answered is None else answered  # its host may stop before the first answer
            patience = self._deadline * (JOINING if answered is None else 1)
            if now - before > self._deadline / 2:  # this process was itself stopped
                began, self._answered_at = now, None if answered is None else now
            elif now - since > patience:
                self._end(f"the store through which the ranks meet gave no answer for {now - since:.0f} s")
                return

    def _follow(self, store: Store, ended: dict[str, Any]) -> None:
        """End this process because another rank said so."""
        if self._ending.acquire(blocking=False) and not self._stopping.is_set():
            store.add(LEFT, 1)
            if not ended["said"]:
                _print(ended["reason"])
            os._exit(ended["status"])

    def _end(self, reason: str) -> None:
        """End this process with one line on stderr."""
        if self._ending.acquire(blocking=False) and not self._stopping.is_set():
            _print(f"{reason}; all ranks end. Start them again")
            os._exit(LOST)


def end_of(store: Store) -> dict[str, Any] | None:
    """Return why the group ends: reason, status, and whether a rank has said it to the user; None if it goes on."""
    return json.loads(store.get(ENDED)) if store.check([ENDED]) else None


def tell_end(store: Store, reason: str, status: int, *, said: bool) -> None:
    """Tell all other ranks to end."""
    store.set(ENDED, json.dumps({"reason": reason, "status": status, "said": said}))


def briefly(seconds: float, call: Callable[[], T]) -> T | None:
    """Return the result of a call to the store; None if it fails, or gives no answer for so many seconds."""
    results: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            results.append(call())

    thread = threading.Thread(target=run, name="pagedkv store", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def cause(error: BaseException) -> str:
    """Return the first sentence of an error, without the place in torch that raised it."""
    line = re.sub(r"^\[[^\]]*\] *", "", (str(error).splitlines() or [type(error).__name__])[0])
    return line.partition(". ")[0].removesuffix(".")


def _print(reason: str) -> None:
    """Print a line on stderr by a call that no other thread can block; a terminal gets its cursor back."""
    cursor = "\r\x1b[K\x1b[?25h" if os.isatty(_STDERR) else ""
    line = " ".join(reason.split())
    os.write(_STDERR, f"{cursor}pagedkv: error: {line}\n".encode())
