"""KV events over ZMQ, as vLLM publishes them, so that routers which read vLLM's events read ours. Needs extra `events`.

    publisher = EventPublisher(engine.cache, "tcp://*:5557", topic="kv@pod-3@Qwen/Qwen3-0.6B")
    while engine.has_work:
        engine.step()
        publisher.publish()          # what became findable, and what is gone

    message    topic │ number, 8 bytes, big-endian │ msgpack of [seconds, [event, ...], rank]
    replay     a DEALER socket sends an empty part and a number: it gets the kept messages from there on, and number -1
               at the end. A reader that asks again before the end gets the answer to its last question

Events are read from the log of the manager (events=N), which names blocks by sha256, the same in each
process. A publisher that fell behind the log publishes AllBlocksCleared and all that can be found, a snapshot. A PUB
socket drops messages of a reader that is too slow; the reader sees it by the numbers, and asks for a replay.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pagedkv.core import MemoryManager, as_array, as_map
from pagedkv.errors import EventsLost, InvalidRequest

try:
    import msgspec
    import zmq
except ImportError as _error:
    raise ImportError("pagedkv.integrations.zmq_events needs pyzmq and msgspec; install pagedkv[events]") from _error

if TYPE_CHECKING:
    from pagedkv import PagedKVCache

END: Final = (-1).to_bytes(8, "big", signed=True)
"""The number that ends a replay."""
LOOK: Final = 50
"""Milliseconds after which the thread for replays looks again: was the publisher closed, has a slow reader room?"""
PATIENCE: Final = 10.0
"""Seconds after which a reader that asked for a replay, and takes nothing of it, gets no more."""
MOST_JOINS: Final = 1000
"""Messages of readers that join or leave, taken in by one call of `publish`. Further ones wait for the next call."""
SHARE: Final = 0.1
"""The most of a publisher's time that snapshots for new readers may take."""
FORMS: Final[dict[str, Callable[..., Any]]] = {"map": partial(as_map, short=True), "digests": as_map, "array": as_array}


class EventPublisher:
    """Publishes the events of `cache` (a PagedKVCache or a MemoryManager that keeps events).

    endpoint: the address of the PUB socket: bound if it has a `*` or `::` or is ipc or inproc, else connected, as vLLM
              does. "tcp://*:5557" is bound on all interfaces, "tcp://10.0.0.2:*" on one.
    bind:     True or False to bind or connect, whatever the address is.
    replay:   the address of the socket for replays, which is bound; None for none.
    topic:    llm-d expects "kv@POD@MODEL".
    form:     "map" for the events of today's vLLM, whose blocks are named by the last 64 bits of a digest; "digests"
              for the same with whole digests (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0); "array" for those of vLLM before
              0.24 and of SGLang before September 2026.
    medium:   the memory that the blocks are in, as readers know it.
    rank:     the number of this replica.
    kept:     messages that are kept for replays. A snapshot replaces all messages before it.
    Raises:   InvalidRequest
    """

    def __init__(
        self, cache: PagedKVCache | MemoryManager, endpoint: str = "tcp://*:5557", *, replay: str | None = None,
        topic: str = "", form: str = "map", medium: str = "GPU", rank: int = 0, kept: int = 10_000,
        bind: bool | None = None,
    ) -> None:  # fmt: skip
        if form not in FORMS:
            raise InvalidRequest(f"form is {form!r}; give {', '.join(map(repr, FORMS))}")
        with contextlib.suppress(EventsLost):
            cache.events(0)  # raises InvalidRequest if the manager keeps none
        self._cache, self._topic, self._form = cache, topic.encode(), FORMS[form]
        self._medium, self._rank = medium, rank
        self._since = 0
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=0 if replay is None else kept)
        self._owes_snapshot = False  # to a reader that has joined
        self._next_snapshot = 0.0  # seconds of time.monotonic(): none for readers before
        self._encoder = msgspec.msgpack.Encoder()
        self._is_closed = threading.Event()
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.XPUB)  # PUB, and it tells who joins
            self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.IPV6, "::" in endpoint or "[" in endpoint)
            if bind is None:
                bind = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc:", "inproc:"))
            (self._socket.bind if bind else self._socket.connect)(endpoint)
            self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            self._replays = None if replay is None else self._begin_replays(replay)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            refused = replay if hasattr(self, "endpoint") else endpoint
            raise InvalidRequest(f"ZMQ refuses {refused!r} ({error.strerror}); give one such as tcp://*:5557") from None

    def publish(self) -> int:
        """Publish the events since the last call in one message, and return how many there were. It never waits.

        If a reader has joined, a snapshot is published, with SHARE of the time at most: readers that join one after the
        other wait for one. The thread that owns the cache calls it.
        Raises: InvalidRequest after `close`
        """
        self._refuse_closed("publish")
        self._owes_snapshot |= self._has_new_reader()
        if self._owes_snapshot and time.monotonic() >= self._next_snapshot:
            return self.publish_all()
        try:
            events = self._cache.events(self._since)
        except EventsLost:
            return self.publish_all()
        if not events:
            return 0
        self._since = events[-1].sequence
        return self._send(events)

    def _refuse_closed(self, call: str) -> None:
        if self._is_closed.is_set():
            raise InvalidRequest(f"{call} was called after close; make a new publisher")

    def _has_new_reader(self) -> bool:
        has_joined = False
        for _ in range(MOST_JOINS):  # else a reader that joins and joins would hold up the thread that steps
            if not self._socket.poll(0):
                break
            has_joined |= self._socket.recv()[:1] == b"\x01"
        return has_joined

    def publish_all(self) -> int:
        """Publish AllBlocksCleared and every block that can be found, and return how many events that were.

        Raises: InvalidRequest after `close`
        """
        self._refuse_closed("publish_all")
        began = time.monotonic()
        snapshot = self._cache.events_snapshot()
        self._since, self._owes_snapshot = snapshot.sequence, False
        num_events = self._send(snapshot.as_events())
        while len(self._kept) > 1:  # not cleared before: a reader that asks meanwhile would get nothing
            self._kept.popleft()
        now = time.monotonic()
        self._next_snapshot = now + (now - began) / SHARE
        return num_events

    def _send(self, events: list[Any]) -> int:
        batch = [time.time(), [self._form(event, medium=self._medium) for event in events], self._rank]
        number, content = self._number, self._encoder.encode(batch)
        self._number += 1
        self._kept.append((number, content))
        self._socket.send_multipart([self._topic, number.to_bytes(8, "big"), content], zmq.NOBLOCK)
        return len(events)

    def _begin_replays(self, endpoint: str) -> threading.Thread:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else it drops what a reader is too slow for
        socket.setsockopt(zmq.IPV6, "::" in endpoint or "[" in endpoint)
        socket.bind(endpoint)
        thread = threading.Thread(target=self._answer, args=(socket,), name="pagedkv event replays", daemon=True)
        thread.start()
        return thread

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        """Send the kept messages from a number on to each reader that asks, and then END. None waits for a slow one."""
        replays: dict[bytes, _Replay] = {}  # by reader
        with socket:
            while not self._is_closed.is_set():
                if socket.poll(LOOK):
                    reader, *rest = socket.recv_multipart()
                    if len(rest) == 2:  # else it is no request
                        first = int.from_bytes(rest[1], "big")
                        replays[reader] = _Replay(deque(kept for kept in list(self._kept) if kept[0] >= first))
                for reader, replay in list(replays.items()):
                    if replay.is_over(socket, reader):
                        del replays[reader]

    def close(self) -> None:
        """Close the sockets. A second call does nothing."""
        self._is_closed.set()
        if self._replays is not None:
            self._replays.join()
        self._context.destroy(0)


@dataclass
class _Replay:
    """The messages that a reader has still to get, and the time at which it took one."""

    rest: deque[tuple[int, bytes]]
    moved: float = field(default_factory=time.monotonic)

    def is_over(self, socket: zmq.Socket[bytes], reader: bytes) -> bool:
        """Send as much as the socket takes. Return True after END, and if the reader is gone or stands still."""
        try:
            while self.rest:
                number, content = self.rest[0]
                socket.send_multipart([reader, b"", number.to_bytes(8, "big"), content], zmq.NOBLOCK)
                self.rest.popleft()
                self.moved = time.monotonic()
            socket.send_multipart([reader, b"", END, b""], zmq.NOBLOCK)
        except zmq.Again:
            return time.monotonic() > self.moved + PATIENCE
        except zmq.ZMQError:  # EHOSTUNREACH: the reader is gone
            pass
        return True
