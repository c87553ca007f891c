"""DistributedLink: messages and frames over torch.distributed, by its gloo engine.

    messages    a connection of their own, so that none waits behind frames: the length and the first 8 KiB with tag 0,
                the rest of a longer message with tag 1
    frames      another connection, with the frame's number as the tag: gloo moves the bytes from frame to frame when
                both sides have posted them

gloo holds a connection's lock while it writes, and a call that posts a frame waits for that lock. A thread, the poster,
posts the offers, so the speaker computes checksums meanwhile.

gloo has no way to give up an operation. But if one operation is over its time, gloo closes the connection, and all
others end with an error. `cut` does that on purpose.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from pagedkv.tiers.transfer.link import MOST_BYTES, Link, LinkDown
from pagedkv.tiers.transfer.meeting import Meeting

HEAD, REST = 0, 1
"""Tags of messages."""
LENGTH: Final = struct.Struct("<Q")
SHORT: Final = 8192
"""Bytes of the head of a message, its length included. One operation of gloo costs more than to send as many bytes."""
NEVER_SENT: Final = 2**31 - 1
"""A tag."""
FOREVER: Final = timedelta(days=365)
POSTING: Final = 1.0
"""Seconds that the end of a connection waits for an offer that is being posted."""
OPTIONS: Final[Any] = ProcessGroupGloo._Options  # type: ignore[attr-defined]
INTERFACE: Final = "GLOO_SOCKET_IFNAME"
"""The variable in which a user names the network interface for gloo."""


class _Offer(NamedTuple):
    """A row that is to be posted. posted: its operation of gloo, as soon as there is one."""

    number: int
    row: torch.Tensor
    posted: Future[Any]


class _Connection:
    """The two groups of a connection (ProcessGroupGloo), and the thread that posts its offers."""

    def __init__(self, messages: Any, frames: Any, peer: int) -> None:
        self.messages, self.frames, self.peer = messages, frames, peer
        self.offers = SimpleQueue[_Offer | None]()
        self._poster = threading.Thread(target=self._post, name="pagedkv poster", daemon=True)
        self._poster.start()

    def _post(self) -> None:
        while (offer := self.offers.get()) is not None:
            try:
                offer.posted.set_result(self.frames.send([offer.row], self.peer, offer.number))
            except Exception as error:  # the keeper hears of the end
                offer.posted.set_exception(error)
                self._break()

    def end(self) -> None:
        """Let all operations under way end with an error, and post nothing more.

        It may be called again. It waits for the poster, so that the caller frees the groups: if the poster freed them
        while the process ends, C++ would abort.
        """
        self._break()
        self.offers.put(None)
        self._poster.join(POSTING)

    def _break(self) -> None:
        for group in (self.messages, self.frames):
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], self.peer, NEVER_SENT).wait(timedelta(milliseconds=1))


class DistributedLink(Link):
    """A link by torch.distributed (gloo, over TCP).

    address: "HOST:PORT", the same for both sides: where the prefill process is found. Everything goes through the
             network interface that leads there. The variable GLOO_SOCKET_IFNAME names another one for frames and
             messages.
    There is no authentication: every process that reaches the address may join. Use a private network. gloo aborts the
    process if the other side sends more bytes than a message or a frame has.
    Raises:  InvalidRequest for an address of another form
    """

    def __init__(self, address: str) -> None:
        self._meeting = Meeting(address)
        self._connection: _Connection | None = None
        self._changing = threading.Lock()
        self._reads: dict[int, tuple[Any, torch.Tensor]] = {}  # frames under way, by number
        self._offers: dict[int, _Offer] = {}  # likewise, on the prefill side
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def open(self, memory: torch.Tensor, *, listens: bool, timeout: float) -> None:
        """See Link.open."""
        store = self._meeting.meet(is_host=listens, timeout=timeout)
        rank, limit = 0 if listens else 1, timedelta(seconds=timeout)
        options = OPTIONS()
        options._timeout, options._devices = limit, [self._device()]
        messages, frames = (
            ProcessGroupGloo(PrefixStore(name, store), rank, 2, options) for name in ("messages", "frames")
        )
        self._reads, self._offers, self._scratch = {}, {}, torch.empty(memory.shape[1], dtype=torch.uint8)
        with self._changing:
            self._connection = _Connection(messages, frames, int(listens))

    def _device(self) -> Any:
        """Return the network interface that leads to the other side, or that of GLOO_SOCKET_IFNAME."""
        if named := os.environ.get(INTERFACE):
            return ProcessGroupGloo.create_device(interface=named.partition(",")[0])
        return ProcessGroupGloo.create_device(hostname=self._meeting.interface)

    def cut(self) -> None:
        """See Link.cut."""
        self._meeting.give_up()
        if (connection := self._connection) is not None:
            connection.end()  # first: if an interrupt comes here, the next call ends it
            with self._changing:
                if self._connection is connection:
                    self._connection = None

    def close(self) -> None:
        """See Link.close."""
        self.cut()
        self._reads.clear()
        self._offers.clear()
        self._meeting.leave()

    def _require_open(self) -> _Connection:
        connection = self._connection
        if connection is None:
            raise LinkDown("the connection has ended")
        return connection

    def send(self, message: bytes, timeout: float) -> None:
        """See Link.send."""
        to, content = self._require_open(), LENGTH.pack(len(message)) + message
        head, rest = content[:SHORT].ljust(SHORT, b"\0"), content[SHORT:]
        works = [to.messages.send([_tensor(head)], to.peer, HEAD)]
        if rest:
            works.append(to.messages.send([_tensor(rest)], to.peer, REST))
        for work in works:
            work.wait(timedelta(seconds=timeout))

    def receive(self) -> bytes:
        """See Link.receive."""
        to, head = self._require_open(), torch.empty(SHORT, dtype=torch.uint8)
        to.messages.recv([head], to.peer, HEAD).wait(FOREVER)
        content = head.numpy().tobytes()
        end = LENGTH.size + LENGTH.unpack_from(content)[0]
        if end > MOST_BYTES:
            raise LinkDown(f"a message of {end} bytes was announced")
        if end > SHORT:
            rest = torch.empty(end - SHORT, dtype=torch.uint8)
            to.messages.recv([rest], to.peer, REST).wait(FOREVER)
            content += rest.numpy().tobytes()
        return content[LENGTH.size : end]

    def offer(self, number: int, row: torch.Tensor) -> int:
        """See Link.offer."""
        to, offer = self._require_open(), _Offer(number, row, Future())
        self._offers[number] = offer
        to.offers.put(offer)
        return 0

    def settle(self, number: int, timeout: float) -> None:
        """See Link.settle."""
        until = time.monotonic() + timeout
        work = self._offers[number].posted.result(timeout)
        work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))
        del self._offers[number]

    def read(self, number: int, place: int, row: torch.Tensor) -> None:
        """See Link.read."""
        to = self._require_open()
        self._reads[number] = to.frames.recv([row], to.peer, number), row

    def drop(self, number: int, place: int) -> None:
        """See Link.drop. The other side has posted the frame, so it has to be received."""
        self.read(number, place, self._scratch)

    def finish(self, number: int, timeout: float) -> None:
        """See Link.finish."""
        work, _ = self._reads[number]
        work.wait(timedelta(seconds=timeout))
        del self._reads[number]


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
