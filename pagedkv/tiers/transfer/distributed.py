"""DistributedLink: messages and frames over torch.distributed, by its gloo engine.

    messages    a connection of their own, so that none waits behind frames: the length and the first 8 KiB with tag 0,
                the rest of a longer message with tag 1
    frames      another connection, with the frame's number as the tag: gloo moves the bytes from frame to frame when
                both sides have posted them

gloo holds a lock of the connection while it moves bytes, and a call that posts a frame waits for it. So a thread of its
own posts the offers, and the next frames are made ready meanwhile.

gloo has no way to give up an operation. But if one operation is over its time, gloo closes the connection, and all
others end with an error. `cut` does that on purpose.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

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
OPTIONS: Final[Any] = ProcessGroupGloo._Options  # type: ignore[attr-defined]
INTERFACE: Final = "GLOO_SOCKET_IFNAME"
"""The variable in which a user names the network interface for gloo."""


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
        self._groups: tuple[Any, Any] | None = None  # of messages and of frames: ProcessGroupGloo
        self._peer = 0
        self._changing = threading.Lock()
        self._reads: dict[int, tuple[Any, torch.Tensor]] = {}  # frames under way, by number
        self._offers: dict[int, tuple[Future[Any], torch.Tensor]] = {}  # likewise, on the prefill side
        self._poster = ThreadPoolExecutor(1)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def open(self, memory: torch.Tensor, *, listens: bool, timeout: float) -> None:
        """See Link.open."""
        store = self._meeting.meet(is_host=listens, timeout=timeout)
        rank, limit = 0 if listens else 1, timedelta(seconds=timeout)
        options = OPTIONS()
        options._timeout, options._devices = limit, [self._device()]
        groups = [ProcessGroupGloo(PrefixStore(name, store), rank, 2, options) for name in ("messages", "frames")]
        self._reads, self._offers, self._poster = {}, {}, ThreadPoolExecutor(1, "pagedkv offers")
        self._peer, self._scratch = int(listens), torch.empty(memory.shape[1], dtype=torch.uint8)
        with self._changing:
            self._groups = groups[0], groups[1]

    def _device(self) -> Any:
        """Return the network interface that leads to the other side, or that of GLOO_SOCKET_IFNAME."""
        if named := os.environ.get(INTERFACE):
            return ProcessGroupGloo.create_device(interface=named.partition(",")[0])
        return ProcessGroupGloo.create_device(hostname=self._meeting.interface)

    def cut(self) -> None:
        """See Link.cut."""
        self._meeting.give_up()
        with self._changing:
            groups, self._groups = self._groups, None
        for group in groups or ():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], self._peer, NEVER_SENT).wait(timedelta(milliseconds=1))
        self._poster.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """See Link.close."""
        self.cut()
        self._reads.clear()
        self._offers.clear()
        self._meeting.leave()

    def _open_groups(self) -> tuple[Any, Any]:
        groups = self._groups
        if groups is None:
            raise LinkDown("the connection has ended")
        return groups

    def send(self, message: bytes, timeout: float) -> None:
        """See Link.send."""
        (group, _), content = self._open_groups(), LENGTH.pack(len(message)) + message
        head, rest = content[:SHORT].ljust(SHORT, b"\0"), content[SHORT:]
        works = [group.send([_tensor(head)], self._peer, HEAD)]
        if rest:
            works.append(group.send([_tensor(rest)], self._peer, REST))
        for work in works:
            work.wait(timedelta(seconds=timeout))

    def receive(self) -> bytes:
        """See Link.receive."""
        (group, _), head = self._open_groups(), torch.empty(SHORT, dtype=torch.uint8)
        group.recv([head], self._peer, HEAD).wait(FOREVER)
        content = head.numpy().tobytes()
        end = LENGTH.size + LENGTH.unpack_from(content)[0]
        if end > MOST_BYTES:
            raise LinkDown(f"a message of {end} bytes was announced")
        if end > SHORT:
            rest = torch.empty(end - SHORT, dtype=torch.uint8)
            group.recv([rest], self._peer, REST).wait(FOREVER)
            content += rest.numpy().tobytes()
        return content[LENGTH.size : end]

    def offer(self, number: int, row: torch.Tensor) -> int:
        """See Link.offer."""
        self._offers[number] = self._poster.submit(self._open_groups()[1].send, [row], self._peer, number), row
        return 0

    def settle(self, number: int, timeout: float) -> None:
        """See Link.settle."""
        offer, _ = self._offers[number]
        try:
            offer.result(timeout).wait(timedelta(seconds=timeout))
        except CancelledError:
            raise LinkDown("the connection has ended") from None
        del self._offers[number]

    def read(self, number: int, place: int, row: torch.Tensor) -> None:
        """See Link.read."""
        self._reads[number] = self._open_groups()[1].recv([row], self._peer, number), row

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
