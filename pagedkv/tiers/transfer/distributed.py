"""DistributedLink: messages and frames over torch.distributed, by its gloo engine.

    message     its length with tag 0, its bytes with tag 1
    frame       tag 2 + number: gloo moves the bytes when both sides have posted them, from frame to frame

gloo has no way to give up an operation. But if one operation is over its time, gloo closes the connection, and all
others end with an error. `cut` does that on purpose.
"""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import ProcessGroupGloo

from pagedkv.tiers.transfer.link import MOST_BYTES, Link, LinkDown
from pagedkv.tiers.transfer.meeting import Meeting

LENGTH, BODY, FRAMES = 0, 1, 2
"""Tags. FRAMES is that of frame number 0."""
NEVER_SENT: Final = 2**31 - 1
"""A tag."""
FOREVER: Final = timedelta(days=365)


class DistributedLink(Link):
    """A link by torch.distributed (gloo, over TCP).

    address: "HOST:PORT", the same for both sides: where the prefill process is found. The variable GLOO_SOCKET_IFNAME
             names the network interface for the frames.
    There is no authentication: every process that reaches the address may join. Use a private network.
    Raises:  InvalidRequest for an address of another form
    """

    def __init__(self, address: str) -> None:
        self._meeting = Meeting(address)
        self._group: Any = None  # a ProcessGroupGloo: its stubs lack send and recv
        self._peer = 0
        self._changing = threading.Lock()
        self._works: dict[int, tuple[Any, torch.Tensor]] = {}  # frames under way, by number
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def open(self, memory: torch.Tensor, *, listens: bool, timeout: float) -> None:
        """See Link.open."""
        store = self._meeting.meet(is_host=listens, timeout=timeout)
        group = ProcessGroupGloo(store, 0 if listens else 1, 2, timedelta(seconds=timeout))
        self._works, self._peer, self._scratch = {}, int(listens), torch.empty(memory.shape[1], dtype=torch.uint8)
        with self._changing:
            self._group = group

    def cut(self) -> None:
        """See Link.cut."""
        self._meeting.give_up()
        with self._changing:
            group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], self._peer, NEVER_SENT).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """See Link.close."""
        self.cut()
        self._works.clear()
        self._meeting.leave()

    def _open_group(self) -> Any:
        group = self._group
        if group is None:
            raise LinkDown("the connection has ended")
        return group

    def send(self, message: bytes, timeout: float) -> None:
        """See Link.send."""
        group, body = self._open_group(), torch.frombuffer(bytearray(message), dtype=torch.uint8)
        length = torch.tensor([len(message)])
        works = group.send([length], self._peer, LENGTH), group.send([body], self._peer, BODY)
        for work in works:
            work.wait(timedelta(seconds=timeout))

    def receive(self) -> bytes:
        """See Link.receive."""
        group, length = self._open_group(), torch.zeros(1, dtype=torch.int64)
        group.recv([length], self._peer, LENGTH).wait(FOREVER)
        if not 0 < int(length) <= MOST_BYTES:
            raise LinkDown(f"a message of {int(length)} bytes was announced")
        body = torch.empty(int(length), dtype=torch.uint8)
        group.recv([body], self._peer, BODY).wait(FOREVER)
        return body.numpy().tobytes()

    def offer(self, number: int, row: torch.Tensor) -> int:
        """See Link.offer."""
        self._works[number] = self._open_group().send([row], self._peer, FRAMES + number), row
        return 0

    def settle(self, number: int) -> None:
        """See Link.settle."""
        self.finish(number)

    def read(self, number: int, place: int, row: torch.Tensor) -> None:
        """See Link.read."""
        self._works[number] = self._open_group().recv([row], self._peer, FRAMES + number), row

    def drop(self, number: int, place: int) -> None:
        """See Link.drop. The other side has posted the frame, so it has to be received."""
        self.read(number, place, self._scratch)

    def finish(self, number: int) -> None:
        """See Link.finish."""
        work, _ = self._works[number]
        work.wait(FOREVER)
        del self._works[number]
