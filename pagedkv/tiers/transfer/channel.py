"""Channel: the connection of one side of a transfer. If it ends it is opened again, until the channel is closed.

    keeper thread    open ─▶ hear, hear, hear ... ─▶ cut ─▶ `lost` ─▶ a moment later, open again
    speaker thread   what is due, as soon as there is something; else a sign of life

A peer that was silent for `timeout` seconds counts as dead: the speaker cuts the link, and everything that waits for it
raises. A killed process is noticed at once, because its system closes the connection.

This file knows when to speak; it must not know what is said.

**Interrupts.** A KeyboardInterrupt may come between any two instructions of the owner's thread. `wake` takes no lock,
and a lock that an interrupt has left locked is given back by the owner's next call (`afresh`).
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

import torch

from pagedkv.core.arguments import real
from pagedkv.errors import InvalidRequest
from pagedkv.tiers.transfer.link import Link, LinkDown, Refused
from pagedkv.tiers.transfer.messages import Message, decode, encode

_LOG = logging.getLogger(__name__)

BEATS: Final = 5
BEAT: Final = 0.5
"""Seconds at most between two signs of life: no side knows the `timeout` of the other one, which may be shorter."""
LONGEST: Final = 86_400.0
"""Seconds of the longest timeout."""
AGAIN: Final = 0.25
"""Seconds until a side connects again."""
REFUSED: Final = 2.0
"""Seconds until a guest comes again that was refused."""
EXITING: Final = 2.0
"""Seconds that the end of a process waits for a channel that was not closed."""
GOODBYE: Final = 1.0
"""Seconds in which a side that ends says so."""
CONNECT: Final = 5.0
"""Seconds that it waits for the other one."""


class Side(Protocol):
    """One side of a transfer: its messages. The methods are called by the threads of the channel."""

    def memory(self) -> torch.Tensor:
        """Return uint8 [n, frame_bytes]: where frames are offered from or read into."""

    def hello(self) -> Message:
        """Return the first message."""

    def meet(self, hello: Message) -> None:
        """Begin with a peer that says `hello`. Raises: LinkDown, which refuses it"""

    def due(self) -> Message:
        """Return what has to be said now, {} if there is nothing."""

    def hear(self, message: Message) -> None:
        """Take in a message."""

    def lost(self) -> None:
        """End everything that was under way: the connection has ended, and no byte is written any more."""


class Channel:
    """The threads of a channel. timeout: seconds of silence after which the other side counts as dead."""

    def __init__(self, name: str, link: Link, side: Side, *, listens: bool, timeout: float) -> None:
        self._name, self._link, self._side, self._listens, self._timeout = name, link, side, listens, timeout
        self._news: SimpleQueue[None] = SimpleQueue()  # wakes the speaker
        self._ending: SimpleQueue[None] = SimpleQueue()  # wakes a keeper that waits to connect again
        self._is_closed = False
        self._is_met = threading.Event()
        self._heard_at = 0.0
        self._was_met = False
        self._has_spoken = threading.Event()
        self._has_spoken.set()
        self._keeper = threading.Thread(target=self._keep, name=f"pagedkv {name}", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._keeper.start()

    @property
    def is_open(self) -> bool:
        """Whether the other side is there."""
        return self._is_met.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait until the other side is there, at most `timeout` seconds. Return `is_open`."""
        return self._is_met.wait(timeout)

    def wake(self) -> None:
        """Say at once what is due. Any thread may call this."""
        if self._news.empty():
            self._news.put(None)

    def cut(self) -> None:
        """End this connection; a new one begins a moment later."""
        self._link.cut()

    def close(self, timeout: float) -> bool:
        """Say goodbye, and wait for the threads to end. Return whether they have ended."""
        self._is_closed = True
        self._ending.put(None)
        self.wake()
        self._has_spoken.wait(min(timeout, GOODBYE))
        self._link.cut()
        if self._keeper.ident is not None:
            self._keeper.join(timeout)
        return not self._keeper.is_alive()

    # -- the keeper ----------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        last = ""
        while not self._is_closed:
            why = self._talk()
            if (text := str(why)[:120] or type(why).__name__) != last and not self._is_closed:
                is_news = self._was_met or isinstance(why, Refused)
                _LOG.log(logging.WARNING if is_news else logging.INFO, "%s: no connection (%s)", self._name, text)
            last = text
            with suppress(Empty):
                self._ending.get(timeout=REFUSED if isinstance(why, Refused) and not self._listens else AGAIN)
        self._link.close()

    def _talk(self) -> Exception:
        """Connect, and hear until the connection ends. Return why it did."""
        self._was_met = False
        over = threading.Event()
        speaker = threading.Thread(target=self._speak, args=(over,), name=f"pagedkv {self._name} speaker", daemon=True)
        try:
            self._link.open(self._side.memory(), listens=self._listens, timeout=CONNECT)
            if self._is_closed:  # `close` has cut what was not there yet
                raise LinkDown("this side was closed")
            self._heard_at = time.monotonic()
            self._has_spoken.clear()
            speaker.start()
            self._side.meet(decode(self._link.receive()))
            self._was_met = True
            self._is_met.set()
            self.wake()
            while "bye" not in (message := decode(self._link.receive())):
                self._heard_at = time.monotonic()
                self._side.hear(message)
            self._was_met = False  # no news
            return LinkDown("the other side has ended")
        except Exception as error:  # of the transport's library, too: whatever it is, the connection has ended
            return error
        finally:
            self._is_met.clear()
            over.set()
            self._link.cut()
            self.wake()
            if speaker.ident is not None:
                speaker.join()
            self._side.lost()

    # -- the speaker ---------------------------------------------------------------------------------------------------

    def _speak(self, over: threading.Event) -> None:
        beat, said_at = min(BEAT, self._timeout / BEATS), time.monotonic()
        try:
            self._link.send(encode(self._side.hello()), self._timeout)
            while not (over.is_set() or self._is_closed):
                message = self._side.due() if self._is_met.is_set() else {}
                if message or time.monotonic() - said_at >= beat:
                    self._link.send(encode(message), self._timeout)
                    said_at = time.monotonic()
                if time.monotonic() - self._heard_at > self._timeout:
                    raise LinkDown(f"nothing was heard for {self._timeout:g} s")
                if not message:
                    with suppress(Empty):
                        self._news.get(timeout=beat)
            if self._is_met.is_set():
                self._link.send(encode({"bye": [True]}), GOODBYE)
        except Exception:  # the keeper hears of it, and reports it
            self._link.cut()
        finally:
            self._has_spoken.set()


def seconds_of(timeout: float, name: str = "timeout") -> float:
    """Return the seconds of silence after which a side, or a prompt, is given up. Raises: InvalidRequest"""
    seconds = real(timeout, name)
    if not 0 < seconds <= LONGEST:
        raise InvalidRequest(f"{name} is {timeout}; give seconds of silence, more than 0 and at most {LONGEST:g}")
    return seconds


def afresh(lock: Any) -> Any:
    """Return the RLock `lock` for a call of the owner, unlocked also if an interrupt has left it locked."""
    with suppress(RuntimeError):  # it is not locked by this thread
        while True:
            lock.release()
    return lock
