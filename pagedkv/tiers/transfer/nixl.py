"""NixlLink: messages and frames over NIXL, by its UCX engine: shared memory, TCP or RDMA, as UCX finds them.

    message     a notification
    frame       the decode side reads it from the registered memory of the other one; place: its address

The sides find one another through the same store as those of DistributedLink, where each leaves the description of its
agent. Notifications and the ends of reads are polled, since NIXL has no call that waits.

The agent has no progress thread. The progress thread of NIXL 1.5.1 polls without pause, and takes a core from the model
on each side. Each poll of this file makes progress instead.

Over shared memory a read copies its bytes in the call that posts it, and an agent runs one call at a time. A second
thread could wait for its turn until all reads have ended. So the thread that posts sends the messages that come
meanwhile, and `finish` makes no call for a read that ended in the call that posted it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch

from pagedkv.errors import InvalidRequest
from pagedkv.tiers.transfer.link import Link, LinkDown
from pagedkv.tiers.transfer.meeting import Meeting

PAUSE: Final = 0.0002
"""Seconds between two looks for a message."""
BRIEF: Final = 0.00005
"""Seconds between two looks at a read."""
BUSY: Final = 0.00002
"""Seconds of a look that has moved bytes itself: the next look follows at once."""
QUIET: Final = 0.1
"""Seconds without a message after which the pause between two looks is REST."""
REST: Final = 0.001
MEMORY: Final = "DRAM"


@dataclass(slots=True)
class _Posted:
    """Reads with one handle. state: how they have ended, "" while they are under way."""

    handle: Any
    state: str = ""


class NixlLink(Link):
    """A link by NIXL. Install it by hand: `pip install --no-deps nixl nixl-cu12`, on machines without a GPU, too.

    address: "HOST:PORT", the same for both sides: where the prefill process is found. UCX chooses the network for the
             frames, see UCX_NET_DEVICES and UCX_TLS.
    There is no authentication: every process that reaches the address may join. Use a private network.
    Raises:  InvalidRequest for an address of another form, or without the package
    """

    has_fixed_memory = True

    def __init__(self, address: str) -> None:
        self._meeting = Meeting(address)
        try:
            from nixl import _api
        except ImportError as error:
            raise InvalidRequest(
                f"a link by NIXL needs its package ({error}): pip install --no-deps nixl nixl-cu12"
            ) from None
        self._api = _api
        if (log := logging.getLogger("nixl")).level == logging.INFO:  # its own choice: a line for each agent
            log.setLevel(logging.WARNING)
        self._agent: Any = None
        self._registered: Any = None
        self._peer = ""
        self._is_cut = threading.Event()
        self._messages: deque[bytes] = deque()  # heard
        self._unsent: deque[bytes] = deque()
        self._using = threading.Lock()  # the agent, to post reads or send messages
        self._reads: dict[int, _Posted] = {}  # by number

    def open(self, memory: torch.Tensor, *, listens: bool, timeout: float) -> None:
        """See Link.open."""
        self._drop_agent()
        store = self._meeting.meet(is_host=listens, timeout=timeout)
        store.set_timeout(timedelta(seconds=timeout))
        strict = self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # several threads call one agent
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=strict)
        agent = self._api.nixl_agent(f"pagedkv {secrets.token_hex(8)}", config)
        self._agent, self._reads = agent, {}
        self._registered = agent.register_memory([(memory.data_ptr(), memory.numel(), 0, "")], MEMORY)
        store.set(f"agent {int(listens)}", agent.get_agent_metadata())
        name = agent.add_remote_agent(store.get(f"agent {int(not listens)}"))
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._messages.clear()
        self._unsent.clear()
        self._is_cut.clear()

    def cut(self) -> None:
        """See Link.cut."""
        self._meeting.give_up()
        self._is_cut.set()

    def close(self) -> None:
        """See Link.close."""
        self.cut()
        self._drop_agent()
        self._meeting.leave()

    def _drop_agent(self) -> None:
        """Disconnect, in the order in which NIXL can: an agent that ends with open handles takes the process along."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        with contextlib.suppress(Exception):
            agent.remove_remote_agent(self._peer)
        with contextlib.suppress(Exception):
            agent.deregister_memory(self._registered)
        self._registered = None

    def _require_open(self) -> Any:
        if self._is_cut.is_set() or self._agent is None:
            raise LinkDown("the connection has ended")
        return self._agent

    def send(self, message: bytes, timeout: float) -> None:
        """See Link.send. The link, and then NIXL, keeps the message until it is sent."""
        agent = self._require_open()
        self._unsent.append(message)
        self._send_unsent(agent)

    def _send_unsent(self, agent: Any) -> None:
        """Send the messages that are due, unless another thread uses the agent: that one sends them when it is done."""
        while self._unsent and self._using.acquire(blocking=False):
            try:
                if self._unsent:  # still: only the thread that uses the agent takes messages
                    agent.send_notif(self._peer, self._unsent.popleft())
            finally:
                self._using.release()

    def receive(self) -> bytes:
        """See Link.receive."""
        began = time.monotonic()
        while not self._messages:
            for messages in self._require_open().get_new_notifs().values():
                self._messages.extend(messages)
            if not self._messages:
                self._is_cut.wait(PAUSE if time.monotonic() - began < QUIET else REST)
        return self._messages.popleft()

    def offer(self, number: int, row: torch.Tensor) -> int:
        """See Link.offer."""
        self._require_open()
        return row.data_ptr()

    def settle(self, number: int, timeout: float) -> None:
        """See Link.settle. There is nothing to do: the other side reads by itself."""

    def read(self, number: int, place: int, row: torch.Tensor) -> None:
        """See Link.read."""
        self.read_all([(number, place, row)])

    def read_all(self, reads: Sequence[tuple[int, int, torch.Tensor]]) -> None:
        """See Link.read_all. One handle reads all rows, and one descriptor each run of rows."""
        if not reads:
            return
        agent, runs = self._require_open(), runs_of(reads)
        ours = agent.get_xfer_descs([(row, size, 0) for row, _, size in runs], MEMORY)
        theirs = agent.get_xfer_descs([(place, size, 0) for _, place, size in runs], MEMORY)
        with self._using:
            posted = _Posted(agent.initialize_xfer("READ", ours, theirs, self._peer))
            self._reads |= {number: posted for number, _, _ in reads}
            state = agent.transfer(posted.handle)
            if state == "DONE":  # so `finish` needs no call
                agent.release_xfer_handle(posted.handle)
                posted.state = state
        self._send_unsent(agent)
        if state == "ERR":
            raise LinkDown("NIXL cannot read from the other side")

    def drop(self, number: int, place: int) -> None:
        """See Link.drop. There is nothing to do."""

    def finish(self, number: int, timeout: float) -> None:
        """See Link.finish."""
        posted = self._reads.get(number)
        if posted is None:  # dropped
            return
        if not posted.state:
            posted.state = self._wait_for(posted.handle, timeout)
        del self._reads[number]
        if posted.state != "DONE":
            raise LinkDown("the connection has ended" if self._is_cut.is_set() else "NIXL could not read a frame")

    def _wait_for(self, handle: Any, timeout: float) -> str:
        """Wait until a handle has ended, and release it. Return its state."""
        agent, until = self._agent, time.monotonic() + timeout
        while True:
            began = time.monotonic()
            state: str = agent.check_xfer_state(handle)
            if state != "PROC":
                agent.release_xfer_handle(handle)
                return state
            if self._is_cut.is_set() or time.monotonic() > until:
                self._cancel_read(agent, handle)
                return "ERR"
            if time.monotonic() - began < BUSY:
                time.sleep(BRIEF)

    def _cancel_read(self, agent: Any, handle: Any) -> None:
        """Cancel a read, and wait until it has ended. Its rows must not be used before."""
        with contextlib.suppress(Exception):
            agent.remove_remote_agent(self._peer)
        while True:
            try:
                agent.release_xfer_handle(handle)
            except Exception:  # it is under way still
                time.sleep(PAUSE)
            else:
                return


def runs_of(reads: Sequence[tuple[int, int, torch.Tensor]]) -> list[tuple[int, int, int]]:
    """Return (address of the row, place, bytes) of each run: rows that follow one another on both sides are one run."""
    runs: list[tuple[int, int, int]] = []
    for _, place, row in reads:
        address, size = row.data_ptr(), row.numel()
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (address, place):
            last = runs.pop()
            runs.append((last[0], last[1], last[2] + size))
        else:
            runs.append((address, place, size))
    return runs
