"""PrefillServer: the prefill side. It sends pages of this pool to another process, each as soon as it is published.

    take       the prompts that the other side asks for ─▶ the engine computes them, chunk by chunk
    STORE      a page was published ─▶ noted by name; a want that waits for it becomes an offer
    offer      checksum of the frame ─▶ does the frame still hold the page? ─▶ ─ ─ ─▶ read there      remote.py
    finish     no further page of a prompt comes: the wants that wait for one are answered

No byte is kept, and no frame is pinned: the pages are those of the pool. A frame that is evicted after its checksum
was taken does not fit it any more, and is a miss on the other side. A page that was evicted before it was asked for is
told to be missing.

The other side may have `window` bytes of offers that it has not given back, and MOST_WANTS wants. One that does not
keep to that loses the connection.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.core.arguments import token_row
from pagedkv.core.state import I32
from pagedkv.errors import InvalidRequest
from pagedkv.spec import parse_bytes
from pagedkv.tiers.checksum import checksum, require_secret
from pagedkv.tiers.pool_view import PoolView
from pagedkv.tiers.slots import GONE
from pagedkv.tiers.tier import CLOSING, KEY_BYTES, Job, Key, Op, Result, Tier, TierStats
from pagedkv.tiers.transfer.channel import EXITING, Channel, afresh, seconds_of
from pagedkv.tiers.transfer.link import Link, LinkDown
from pagedkv.tiers.transfer.messages import (
    MOST_ASKED,
    MOST_ASKS,
    MOST_PROMPT,
    Message,
    hello,
    require_numbers,
    salt_of,
    size_of,
    window_of,
)
from pagedkv.tiers.transfer.rows import Rows

MOST_WANTS: Final = 16_384
"""Wants that the other side may have at a time."""
AT_ONCE: Final = 16 << 20
"""Bytes of the frames that one message offers, or one frame. The other side reads the frames of a message while this
side takes the checksums of the next ones.
"""


@dataclass(eq=False)
class AskedPrompt:
    """A prompt that the other side asks for. Compute it, and call `PrefillServer.finish`.

    token_ids: int32 [n]. salt: see PagedKVCache.open. is_cancelled: whether the other side needs it no more.
    """

    number: int
    token_ids: I32
    tenant: bytes
    salt: bytes | Mapping[int, bytes]
    is_cancelled: bool = False


class _Page(NamedTuple):
    frame: int
    stamp: int
    fence: torch.cuda.Event | None


class _Want(NamedTuple):
    number: int
    ask: int
    name: bytes


class PrefillServer(Tier):
    """The pages of this cache, for the process at the other end of `link`, which has a RemotePrefill.

    key:     16 to 64 secret bytes, the same on both sides, or None, see RemotePrefill.
    window:  the most bytes that may be under way.
    timeout: seconds of silence after which the other side counts as dead.

    The cache must store every page that it publishes (`write_back=None`), as it does by default.
    Raises: InvalidRequest
    """

    name = "prefill server"
    is_lasting = True  # another process reads its pages: the cache must have a name for its weights

    def __init__(
        self, link: Link, *, key: bytes | None = None, window: str | int = "64MiB", timeout: float = 10.0
    ) -> None:
        require_secret(key)
        self._link, self._key, self._window_bytes = link, key, parse_bytes(window)
        self._timeout = seconds_of(timeout)
        self._channel = Channel("prefill server", link, self, listens=True, timeout=self._timeout)
        self._lock = threading.RLock()  # of what follows
        self._pages: dict[bytes, _Page] = {}  # by name
        self._names: dict[int, bytes] = {}  # by frame
        self._asks: dict[int, AskedPrompt] = {}
        self._new: deque[AskedPrompt] = deque()
        self._has_new: SimpleQueue[None] = SimpleQueue()  # wakes `take`
        self._wants: dict[int, _Want] = {}  # all that were not answered
        self._parked: dict[bytes, list[_Want]] = {}  # those whose page is not there yet, by its name
        self._ready: OrderedDict[int, _Want] = OrderedDict()  # the others, in the order of their answers
        self._ends: list[tuple[int, bool]] = []
        self._offered: set[int] = set()  # numbers that the other side has not given back
        self._ended: deque[Result] = deque()
        self._window = 0  # frames, of this connection
        self._stats = TierStats()
        self._pool: PoolView | None = None

    # -- the owner thread ----------------------------------------------------------------------------------------------

    def register(self, pool: PoolView, fingerprint: bytes) -> None:
        """See Tier.register. The server begins to listen."""
        if self._pool is not None:
            raise InvalidRequest("this PrefillServer serves a cache already; make one for each cache")
        self._pool, self._fingerprint = pool, fingerprint
        self._most = max(1, self._window_bytes // pool.frame_bytes)
        self._at_once = max(1, AT_ONCE // pool.frame_bytes)
        self._rows = Rows(pool.now(), self._most)
        self._at_exit = weakref.finalize(self, self._channel.close, EXITING)
        self._channel.start()

    @property
    def is_connected(self) -> bool:
        """Whether the other side is there now."""
        return self._channel.is_open

    def take(self, timeout: float = 0.0) -> list[AskedPrompt]:
        """Return the prompts that were asked for since the last call, waiting at most `timeout` seconds for the first.

        A prompt may be cancelled when it is returned.
        """
        until = time.monotonic() + timeout
        while not self._new and (left := until - time.monotonic()) > 0:
            with suppress(Empty):
                self._has_new.get(timeout=left)
        with afresh(self._lock):
            taken = list(self._new)
            self._new.clear()
        return taken

    def finish(self, prompt: AskedPrompt, *, is_computed: bool = True) -> None:
        """Say that no further page of `prompt` comes: it was computed, or will not be."""
        with afresh(self._lock):
            if self._asks.get(prompt.number) is not prompt:
                return  # of another connection, or not wanted any more
            self._ends.append((prompt.number, is_computed))
            self._end_ask(prompt)
        self._channel.wake()

    def lookup(self, keys: Sequence[Key]) -> npt.NDArray[np.bool_]:
        """See Tier.lookup. There is nothing but what the pool has."""
        return np.zeros(len(keys), bool)

    @property
    def max_stores(self) -> int:
        """See Tier.max_stores: no byte is moved."""
        assert self._pool is not None
        return len(self._pool.frames)

    def submit(self, op: Op, keys: Sequence[Key], frames: Sequence[int]) -> Job:
        """See Tier.submit. A store notes the place of a page."""
        assert self._pool is not None
        job = Job(op, fence=self._pool.fence())
        with afresh(self._lock):
            if self._rows.frames is not self._pool.frames:  # resized: pages have other places, which are noted anew
                self._begin_anew()
            for key, frame in zip(keys, map(int, frames), strict=True):
                if op is Op.STORE:
                    self._note(key.name, _Page(frame, self._pool.stamp(frame), job.fence))
                self._ended.append(Result(job.number, key, op is Op.STORE, "" if op is Op.STORE else GONE))
            has_ready = bool(self._ready)
        if has_ready:
            self._channel.wake()
        return job

    def poll(self) -> list[Result]:
        """See Tier.poll."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    @property
    def num_pending(self) -> int:
        """See Tier.num_pending."""
        return len(self._ended)

    def forget(self) -> None:
        """See Tier.forget. The two sides have no name of a page in common any more, so they refuse each other."""
        with afresh(self._lock):
            self._pages, self._names = {}, {}
            self._fingerprint = os.urandom(len(self._fingerprint))
        self._channel.cut()

    def stats(self) -> TierStats:
        """See Tier.stats. stored: the pages that were offered to the other side."""
        now = self._stats.copy()
        now.pages = len(self._pages)
        return now

    def close(self, timeout: float = CLOSING) -> None:
        """See Tier.close."""
        if self._pool is None:
            self._link.close()
        else:
            afresh(self._lock)
            self._channel.close(timeout)
            self._at_exit.detach()  # it holds the pool

    # -- under the lock ------------------------------------------------------------------------------------------------

    def _begin_anew(self) -> None:
        assert self._pool is not None
        self._pages, self._names = {}, {}
        self._rows = Rows(self._pool.now(), self._most)
        if self._link.has_fixed_memory:
            self._channel.cut()

    def _note(self, name: bytes, page: _Page) -> None:
        """Note the place of a page, and let the wants be answered that wait for it."""
        before = self._names.get(page.frame, b"")
        if before in self._pages and self._pages[before].frame == page.frame:
            del self._pages[before]
        self._pages[name], self._names[page.frame] = page, name
        for want in self._parked.get(name, ()):
            self._ready[want.number] = want
        self._parked.pop(name, None)

    def _park(self, want: _Want) -> None:
        """Answer a want when its page comes, or at once if it does not come."""
        if want.ask in self._asks:
            self._parked.setdefault(want.name, []).append(want)
        else:
            self._ready[want.number] = want

    def _unpark(self, want: _Want) -> None:
        """Let a want wait for its page no more."""
        if want in (others := self._parked.get(want.name, [])):
            others.remove(want)
            if not others:
                del self._parked[want.name]

    def _end_ask(self, prompt: AskedPrompt) -> None:
        """Answer the wants that wait for a page of `prompt`: no further one comes."""
        for want in [want for want in self._wants.values() if want.ask == prompt.number]:
            self._unpark(want)
            self._ready.setdefault(want.number, want)
        del self._asks[prompt.number]

    def _holds(self, page: _Page, rows: Rows) -> bool:
        """Return whether a frame still holds its page. The pool is looked at last: a resize changes all at once."""
        assert self._pool is not None
        try:
            is_held = self._pool.holds(page.frame, page.stamp)
        except IndexError:  # the pool is smaller now
            return False
        return is_held and self._pool.frames is rows.frames

    # -- the threads of the channel ------------------------------------------------------------------------------------

    def memory(self) -> torch.Tensor:
        """See Side.memory."""
        return self._rows.memory

    def hello(self) -> Message:
        """See Side.hello."""
        assert self._pool is not None
        return hello(self._fingerprint, self._pool.frame_bytes, self._most)

    def meet(self, message: Message) -> None:
        """See Side.meet."""
        self._window = window_of(message, self.hello())

    def hear(self, message: Message) -> None:
        """See Side.hear."""
        for number in message.get("dones", ()):
            self._link.settle(number, self._timeout)
            with self._lock:
                self._offered.remove(number)
            self._rows.free(number)
        asks = [
            AskedPrompt(number, token_row(ids), bytes.fromhex(tenant), salt_of(salt))
            for number, tenant, salt, ids in message.get("asks", ())
        ]
        with self._lock:
            for number in message.get("stops", ()):  # first: they make place for others
                if number in self._asks:
                    self._stop(self._asks[number])
            for prompt in asks:
                self._hear_ask(prompt)
            for number, ask, name in message.get("wants", ()):
                self._hear_want(_Want(number, ask, bytes.fromhex(name)))
            for number in message.get("drops", ()):
                if (dropped := self._wants.pop(number, None)) is not None:
                    self._unpark(dropped)
                    self._ready.pop(number, None)
        self._channel.wake()

    def _hear_ask(self, prompt: AskedPrompt) -> None:
        require_numbers(prompt.number)
        sizes = [size_of(each.token_ids, each.tenant, each.salt) for each in (prompt, *self._asks.values())]
        if sizes[0] > MOST_PROMPT or sum(sizes) > MOST_ASKED or len(self._asks) + len(self._ends) >= MOST_ASKS:
            raise LinkDown("the other side asks for more than it may")
        if prompt.number in self._asks:
            raise LinkDown("the other side asks for two prompts by one number")
        self._asks[prompt.number] = prompt
        self._new.append(prompt)
        if self._has_new.empty():
            self._has_new.put(None)

    def _hear_want(self, want: _Want) -> None:
        require_numbers(want.number, want.ask)
        if len(want.name) != KEY_BYTES or want.number in self._wants or want.number in self._offered:
            raise LinkDown("the other side wants two pages by one number, or one without a name")
        if len(self._wants) >= MOST_WANTS:
            raise LinkDown("the other side wants more than it may")
        self._wants[want.number] = want
        page = self._pages.get(want.name)
        if page is not None and self._holds(page, self._rows):
            self._ready[want.number] = want
        else:
            self._park(want)

    def _stop(self, prompt: AskedPrompt) -> None:
        """Compute a prompt no further, if it has begun."""
        prompt.is_cancelled = True
        if prompt in self._new:
            self._new.remove(prompt)
        self._end_ask(prompt)

    def due(self) -> Message:
        """See Side.due."""
        with self._lock:
            rows = self._rows
            wants = [(want, self._pages.get(want.name)) for want in self._next_wants()]
            self._offered.update(want.number for want, page in wants if page is not None)
        offers, changed = list[Any](), list[tuple[_Want, _Page]]()
        for want, page in wants:
            if page is None:
                offers.append([want.number, "", 0])
            elif (offer := self._offer(want, page, rows)) is not None:
                offers.append(offer)
            else:
                changed.append((want, page))
        with self._lock:
            for want, page in changed:
                self._take_back(want, page)
            ends = [] if self._ready else self._ends  # after the offers of their pages
            if ends:
                self._ends = []
        return {"offers": offers, "ends": ends} if offers or ends else {}

    def _next_wants(self) -> list[_Want]:
        """Return wants that can be answered now, as many as the window has place for."""
        wants: list[_Want] = []
        most = min(self._at_once, self._window - len(self._offered))
        while self._ready and len(wants) < most:
            number, want = self._ready.popitem(last=False)
            del self._wants[number]
            wants.append(want)
        return wants

    def _take_back(self, want: _Want, page: _Page) -> None:
        """Let a want wait again whose frame held another page."""
        self._wants[want.number] = want
        self._offered.discard(want.number)
        if self._pages.get(want.name) is page:
            del self._pages[want.name]
            self._park(want)
        else:  # published again meanwhile
            self._ready[want.number] = want

    def _offer(self, want: _Want, page: _Page, rows: Rows) -> list[Any] | None:
        """Let the other side read the frame of `page`. Return the offer, or None if the frame holds another page."""
        began = time.perf_counter()
        row = rows.fill(want.number, page.frame, page.fence)
        total = checksum(rows.bytes_of(want.number, page.frame), want.name, self._key)
        if not self._holds(page, rows):
            rows.free(want.number)
            self._stats.changed += 1
            return None
        place = self._link.offer(want.number, row)
        self._stats.stored += 1
        self._stats.stored_bytes += len(row)
        self._stats.stored_seconds += time.perf_counter() - began
        return [want.number, total.hex(), place]

    def lost(self) -> None:
        """See Side.lost."""
        with self._lock:
            for prompt in self._asks.values():
                prompt.is_cancelled = True
            for held in (self._asks, self._new, self._wants, self._parked, self._ready, self._ends, self._offered):
                held.clear()
            self._rows.free_all()
