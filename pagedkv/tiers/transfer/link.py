"""Link: the transport between a prefill process and a decode process, as small as a tier needs it.

    messages        both ways: a few kilobytes each
    frames          from the prefill side to the decode side, straight from memory to memory

    prefill side    offer(number, row) ─▶ place ─ ─ message ─ ─▶ read(number, place, row)    decode side
                    settle(number)    ◀─ ─ message ─ ─ ─ ─ ─ ─ ─ finish(number)

A transport of another vendor is a subclass with these methods. It must not know pages, tokens or checksums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch

MOST_BYTES: Final = 16 << 20
"""Bytes of the longest message. A peer that announces a longer one is no peer of ours."""


class LinkDown(ConnectionError):
    """The connection has ended, or the other side does not keep to the rules."""


class Refused(LinkDown):
    """The two sides cannot meet until somebody changes how one of them was made."""


class Link(ABC):
    """A connection between two processes that can be opened again after it has ended.

    One thread opens, receives and closes. Any thread may call the other methods, and `cut`. Each method raises when the
    connection ends (LinkDown, RuntimeError or OSError), also one that waits.
    """

    has_fixed_memory: bool = False
    """Whether frames may be offered and read only in the memory that `open` was given."""

    @abstractmethod
    def open(self, memory: torch.Tensor, *, listens: bool, timeout: float) -> None:
        """Connect with the other side, within `timeout` seconds.

        memory:  uint8 [n, frame_bytes] in host memory, where rows are offered from or read into.
        listens: whether this is the side that is found at the address of the link.
        """

    @abstractmethod
    def cut(self) -> None:
        """End the connection: calls that wait raise within a moment. `finish` says when no byte is written any more."""

    @abstractmethod
    def close(self) -> None:
        """Cut, and give up the address. A second call does nothing."""

    @abstractmethod
    def send(self, message: bytes, timeout: float) -> None:
        """Send a message, of at most MOST_BYTES. One thread sends."""

    @abstractmethod
    def receive(self) -> bytes:
        """Wait for the next message."""

    @abstractmethod
    def offer(self, number: int, row: torch.Tensor) -> int:
        """Let the other side read `row` (uint8 [n]) as `number`. Return the place that it needs to know."""

    @abstractmethod
    def settle(self, number: int, timeout: float) -> None:
        """End the offer: the other side says that it has read the row, or does not want it. See finish."""

    @abstractmethod
    def read(self, number: int, place: int, row: torch.Tensor) -> None:
        """Begin to read the offer `number` into `row` (uint8 [n])."""

    def read_all(self, reads: Sequence[tuple[int, int, torch.Tensor]]) -> None:
        """Begin `read` of each (number, place, row). A transport may override it to post them together.

        Some reads may have begun when it raises. Each number is finished either way.
        """
        for number, place, row in reads:
            self.read(number, place, row)

    @abstractmethod
    def drop(self, number: int, place: int) -> None:
        """Begin to end an offer that is not wanted."""

    @abstractmethod
    def finish(self, number: int, timeout: float) -> None:
        """Wait until the bytes of `read` have arrived, or `drop` has ended. Numbers come in order.

        It raises if they do not come within `timeout` seconds, or the connection ends. No byte is written afterwards.
        """
