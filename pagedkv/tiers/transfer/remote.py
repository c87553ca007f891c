"""RemotePrefill: the decode side. Pages of a prompt that another process computes, as a tier under the pool.

    expect    a prompt is about to be looked up ─▶ ask ─ ─ ─▶ the other process begins to compute it     server.py
    lookup    the pages of prompts that were asked for seem to be there
    LOAD      want ─ ─ ─▶ offer, as soon as the page is computed ─▶ read into the frame ─▶ verified? ─▶ ok
    STORE     nothing is kept here

The engine fetches waiting prompts as from any tier, so the rules of tiers hold: a fetch has a deadline, a load that
fails is a miss, and what did not come is computed here.

A want names a frame that waits for it, so wants are bounded by the pool, and by MOST_WANTS. The threads see wants and
frames; the owner's thread alone calls the methods of Tier.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.core.arguments import whole
from pagedkv.errors import InvalidRequest
from pagedkv.spec import parse_bytes
from pagedkv.tiers.checksum import SUM_BYTES, checksum, require_secret
from pagedkv.tiers.pool_view import PoolView
from pagedkv.tiers.slots import CANCELLED, CORRUPT, GONE
from pagedkv.tiers.tier import CLOSING, Job, Key, Op, Prompt, Result, Tier, TierStats
from pagedkv.tiers.transfer.channel import EXITING, Channel, afresh, seconds_of
from pagedkv.tiers.transfer.link import Link, LinkDown
from pagedkv.tiers.transfer.messages import (
    MOST_ASKED,
    MOST_ASKS,
    MOST_PROMPT,
    Message,
    hello,
    salt_text,
    size_of,
    window_of,
)
from pagedkv.tiers.transfer.rows import Rows

NOT_KEPT: Final = "not kept"
LOST: Final = "lost"
MOST_WANTS: Final = 4096
"""Pages that are wanted at a time. More wait here."""
SAID_AT_ONCE: Final = 256
"""Wants in one message, so that the other side begins while it hears the next."""
AT_ONCE: Final = 64
"""Frames that are reported together if more are on their way, at most."""
KEPT: Final = 64
"""Prompts whose pages are looked up there, the newest ones, also after they were computed."""
NUMBERS: Final = 1 << 30
"""Numbers of wants. Then they begin again."""


@dataclass(slots=True, eq=False)
class _Want:
    """A page that is wanted. is_read: whether its bytes are on their way into the frame. sum: their checksum there."""

    number: int
    job: Job
    key: Key
    frame: int
    ask: int
    sum: bytes = b""
    is_read: bool = False
    began: float = 0.0


@dataclass(slots=True, eq=False)
class _Ask:
    """A prompt that was asked for.

    names:   page names, for each layer group. size: see `size_of`.
    is_over: whether no further page of it will be computed.
    """

    names: list[bytes]
    size: int
    is_over: bool = False


class RemotePrefill(Tier):
    """Prompts are computed by the process at the other end of `link`, which has a PrefillServer, and their pages read.

    min_tokens:  prompts with fewer tokens beyond those in the pool, and in tiers above, are computed here.
    max_prompts: prompts that the other side computes at a time; further ones are for the next tier, or computed here.
    key:         16 to 64 secret bytes, the same on both sides: a page that was not sent under it is a miss. None: pages
                 are checked for damage, and everyone who can reach the link is trusted.
    window:      the most bytes that may be under way.
    timeout:     seconds of silence after which the other side counts as dead, or without a frame that it has offered.
    patience:    seconds in which a page of a prompt comes, or of one that was asked for before it. Else the rest of the
                 prompt is computed here.

    Both caches need the same geometry, dtype, `model=` and `rank=`; otherwise nothing is asked for.
    Raises: InvalidRequest
    """

    name = "prefill"
    is_lasting = True  # another process has its pages: the cache must have a name for its weights

    def __init__(
        self, link: Link, *, min_tokens: int = 64, max_prompts: int = 16, key: bytes | None = None,
        window: str | int = "64MiB", timeout: float = 10.0, patience: float = 30.0,
    ) -> None:  # fmt: skip
        require_secret(key)
        self._link, self._key, self._window_bytes = link, key, parse_bytes(window)
        self._min_tokens = whole(min_tokens, "min_tokens")
        self.max_prompts: int = whole(max_prompts, "max_prompts", 1, MOST_ASKS // 2 + 1)
        self._timeout = seconds_of(timeout)
        self.patience: float | None = seconds_of(patience, "patience")
        self._channel = Channel("remote prefill", link, self, listens=False, timeout=self._timeout)
        self._lock = threading.RLock()  # of what follows, but for the rows
        self._numbers, self._ask_numbers = itertools.cycle(range(NUMBERS)), itertools.count(1)
        self._asks: OrderedDict[int, _Ask] = OrderedDict()
        self._names: dict[bytes, int] = {}  # name of a page: the newest ask that has it
        self._wants: dict[int, _Want] = {}
        self._jobs: dict[Job, int] = {}  # the pages of each that have not ended
        self._waiting: deque[_Want] = deque()  # wants that were not said yet
        self._unsaid: Message = {}
        self._ended: deque[tuple[_Want, str]] = deque()
        self._stats = TierStats()
        self._pool: PoolView | None = None
        self._reader: threading.Thread | None = None
        self._reads = SimpleQueue[tuple[int, _Want | None] | None]()

    # -- the owner thread ----------------------------------------------------------------------------------------------

    def register(self, pool: PoolView, fingerprint: bytes) -> None:
        """See Tier.register. The tier begins to connect."""
        if self._pool is not None:
            raise InvalidRequest("this RemotePrefill serves a cache already; make one for each cache")
        self._pool, self._fingerprint = pool, fingerprint
        self._window = self._most_unsaid = max(1, self._window_bytes // pool.frame_bytes)
        self._rows = Rows(pool, self._window)
        self._at_exit = weakref.finalize(self, self._channel.close, EXITING)
        self._channel.start()

    @property
    def is_connected(self) -> bool:
        """Whether the other side is there now."""
        return self._channel.is_open

    def wait(self, timeout: float) -> bool:
        """Wait until the other side is there, at most `timeout` seconds. Return `is_connected`."""
        return self._channel.wait(timeout)

    def expect(self, prompt: Prompt) -> bool:
        """See Tier.expect: ask the other side to compute a prompt, if that is worth it."""
        if not self.is_connected:
            return False
        known = prompt.num_known()
        if len(prompt.token_ids) - 1 - known < max(self._min_tokens, prompt.block_size):
            return False
        names = [key.name for page in prompt.keys(known // prompt.block_size) for key in page]
        size = size_of(prompt.token_ids, prompt.tenant, prompt.salt)
        with afresh(self._lock):
            if all(name in self._names for name in names):
                return True
            sizes = self._sizes()
            if len(sizes) >= self.max_prompts or size > MOST_PROMPT or sum(sizes) + size > MOST_ASKED // 2:
                return False
            number, ids = next(self._ask_numbers), prompt.token_ids.tolist()
            self._say("asks", [number, prompt.tenant.hex(), salt_text(prompt.salt), ids])
            self._asks[number] = _Ask(names, size)
            self._names |= dict.fromkeys(names, number)
            for old in [old for old, ask in self._asks.items() if ask.is_over][:-KEPT]:
                self._forget_ask(old)
        return True

    def cost(self, prompt: Prompt) -> int:
        """See Tier.cost: the prompts under way there, and the tokens of this one that were not asked for there."""
        known = prompt.num_known()
        keys = list(prompt.keys(known // prompt.block_size))
        with afresh(self._lock):
            pages = (page for page, each in enumerate(keys) if not all(key.name in self._names for key in each))
            return sum(self._sizes()) + len(prompt.token_ids) - known - prompt.block_size * next(pages, len(keys))

    def lookup(self, keys: Sequence[Key]) -> npt.NDArray[np.bool_]:
        """See Tier.lookup. The pages of a prompt that was asked for seem to be there, computed or not."""
        with afresh(self._lock):
            found = np.array([key.name in self._names for key in keys], bool)
        self._stats.asked += len(keys)
        self._stats.hits += int(found.sum())
        return found if self.is_connected else np.zeros(len(keys), bool)

    def submit(self, op: Op, keys: Sequence[Key], frames: Sequence[int]) -> Job:
        """See Tier.submit."""
        assert self._pool is not None
        job = Job(op, fence=self._pool.fence())
        with afresh(self._lock):
            if self._rows.frames is not self._pool.frames:  # the pool was resized, while nothing was under way
                self._rows = Rows(self._pool, self._window)
                if self._link.has_fixed_memory:
                    self._channel.cut()
            wants = [
                _Want(next(self._numbers), job, key, int(frame), self._names.get(key.name, 0))
                for key, frame in zip(keys, frames, strict=True)
            ]
            if op is Op.STORE or not self.is_connected or not wants:
                why = NOT_KEPT if op is Op.STORE else LOST
                self._ended.extend((want, why) for want in wants)
            else:  # in this order an interrupt leaves no want that is not said
                self._jobs[job] = len(wants)
                self._waiting.extend(wants)
                self._wants |= {want.number: want for want in wants}
        self._channel.wake()
        return job

    def poll(self) -> list[Result]:
        """See Tier.poll."""
        with afresh(self._lock):
            if any(job.is_cancelled for job in self._jobs):
                self._drop_cancelled()
            ended = [self._ended.popleft() for _ in range(len(self._ended))]
        self._stats.failed += sum(why == LOST for _, why in ended)
        self._stats.corrupt += sum(why == CORRUPT for _, why in ended)
        return [Result(want.job.number, want.key, not why, why) for want, why in ended]

    def _drop_cancelled(self) -> None:
        """End the wants of cancelled jobs whose bytes are not on their way, and tell the other side."""
        gone = [want for want in self._wants.values() if want.job.is_cancelled and not want.is_read]
        unsaid = {want.number for want in self._waiting}
        for want in gone:
            self._end(want, CANCELLED)
            if want.number not in unsaid:
                self._say("drops", want.number)
        if gone:
            self._waiting = deque(want for want in self._waiting if want.number in self._wants)
            live = {want.ask for want in self._wants.values()}
            for number in {want.ask for want in gone} - live:
                if number in self._asks and not self._asks[number].is_over:
                    self._stop(number)
        jobs = {want.job for want in self._wants.values()}
        self._jobs = {job: number for job, number in self._jobs.items() if job in jobs}

    def _stop(self, number: int) -> None:
        """Ask for a prompt no more, and tell the other side if it has heard of it."""
        asks = self._unsaid.get("asks", [])
        if left := [ask for ask in asks if ask[0] != number]:
            self._unsaid["asks"] = left
        else:
            self._unsaid.pop("asks", None)
        if len(left) == len(asks):
            self._say("stops", number)
        self._forget_ask(number)

    @property
    def num_pending(self) -> int:
        """See Tier.num_pending."""
        with afresh(self._lock):
            return len(self._wants) + len(self._ended)

    def forget(self) -> None:
        """See Tier.forget. The two sides have no name of a page in common any more, so they refuse each other."""
        with afresh(self._lock):
            self._names.clear()
            self._fingerprint = os.urandom(len(self._fingerprint))
        self._channel.cut()

    def stats(self) -> TierStats:
        """See Tier.stats."""
        return self._stats.copy()

    def close(self, timeout: float = CLOSING) -> None:
        """See Tier.close."""
        if self._pool is None:
            self._link.close()
        else:
            afresh(self._lock)
            self._channel.close(timeout)
            self._at_exit.detach()  # it holds the pool

    # -- under the lock ------------------------------------------------------------------------------------------------

    def _say(self, field: str, what: Any) -> None:
        self._unsaid.setdefault(field, []).append(what)
        self._channel.wake()

    def _sizes(self) -> list[int]:
        """Return the sizes of the prompts under way there."""
        return [ask.size for ask in self._asks.values() if not ask.is_over]

    def _end(self, want: _Want, why: str) -> None:
        """Report a want, and write no more into its frame. After an interrupt it may not be reported, but not twice."""
        if self._wants.pop(want.number, None) is not None:
            self._ended.append((want, why))
            self._jobs[want.job] -= 1
            if not self._jobs[want.job]:
                del self._jobs[want.job]

    def _forget_ask(self, number: int) -> None:
        """Look the pages of a prompt up there no more, unless a newer one has them, too."""
        for name in self._asks.pop(number).names:
            if self._names.get(name) == number:
                del self._names[name]

    # -- the threads of the channel ------------------------------------------------------------------------------------

    def memory(self) -> torch.Tensor:
        """See Side.memory."""
        return self._rows.memory

    def hello(self) -> Message:
        """See Side.hello."""
        assert self._pool is not None
        return hello(self._fingerprint, self._pool.frame_bytes, self._window)

    def meet(self, message: Message) -> None:
        """See Side.meet."""
        self._most_unsaid = max(1, min(AT_ONCE, window_of(message, self.hello()) // 4))
        self._reader = threading.Thread(target=self._finish_reads, name="pagedkv remote prefill reader", daemon=True)
        self._reader.start()

    def due(self) -> Message:
        """See Side.due."""
        with self._lock:
            message, self._unsaid = self._unsaid, {}
            asks = message.get("asks", ())
            if len(asks) > 1:  # each in a message of its own: a prompt may be long
                message["asks"], self._unsaid["asks"] = [asks[0]], asks[1:]
                return message  # wants follow what they belong to
            most = min(SAID_AT_ONCE, MOST_WANTS - len(self._wants) + len(self._waiting))
            said = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            wants = [[w.number, w.ask, w.key.name.hex()] for w in said if w.number in self._wants]
            return message | {"wants": wants} if wants else message

    def hear(self, message: Message) -> None:
        """See Side.hear."""
        offers, now = message.get("offers", ()), time.perf_counter()
        with self._lock:
            wants = [self._accept(number, total, now) for number, total, _ in offers]
        begun: list[tuple[int, _Want | None]] = []
        reads: list[tuple[int, int, torch.Tensor]] = []
        try:
            for (number, total, place), want in zip(offers, wants, strict=True):
                if not total:
                    continue
                if self._reads.qsize() + len(begun) > self._window:
                    raise LinkDown("the other side has offered more frames than it may")
                if want is None:
                    self._link.drop(number, place)
                else:
                    reads.append((number, place, self._rows.row(number, want.frame)))
                begun.append((number, want))
            self._link.read_all(reads)
        finally:  # the reader finishes also what was begun before an error
            for read in begun:
                self._reads.put(read)
        for number, is_computed in message.get("ends", ()):
            with self._lock:
                if (ask := self._asks.get(number)) is not None:
                    ask.is_over = True
                    if not is_computed:
                        self._forget_ask(number)
        if self._waiting:
            self._channel.wake()

    def _accept(self, number: int, total: str, now: float) -> _Want | None:
        """Return the want of an offer, whose bytes are going to be read; None if it was dropped or has no page."""
        want = self._wants.get(number)
        if want is None:
            return None
        if want.is_read or len(total) > 2 * SUM_BYTES:
            raise LinkDown("the other side has answered a want twice, or with a sum that is too long")
        if not total:
            self._end(want, GONE)
            if self._names.get(want.key.name) == want.ask:  # the next prompt that has the page is asked for anew
                del self._names[want.key.name]
            return None
        want.is_read, want.sum, want.began = True, bytes.fromhex(total), now
        return want

    def lost(self) -> None:
        """See Side.lost."""
        reader, self._reader = self._reader, None
        if reader is not None:
            self._reads.put(None)
            reader.join()
            self._reads = SimpleQueue()
        with self._lock:
            for want in list(self._wants.values()):
                self._end(want, LOST)
            for held in (self._asks, self._names, self._jobs, self._waiting, self._unsaid):
                held.clear()
            self._rows.free_all()

    # -- the reader's thread -------------------------------------------------------------------------------------------

    def _finish_reads(self) -> None:
        """Wait for the frames in their order, and verify them."""
        done: list[tuple[int, _Want | None, bool]] = []
        try:
            while (read := self._reads.get()) is not None:
                number, want = read
                self._link.finish(number, self._timeout)
                done.append((number, want, want is not None and self._verify(want)))
                if self._reads.empty() or len(done) >= self._most_unsaid:
                    self._settle(done)
                    done.clear()
        except Exception:  # the keeper's calls fail, too
            self._channel.cut()
            while (read := self._reads.get()) is not None:  # no frame is given back that is still written
                with suppress(Exception):
                    self._link.finish(read[0], self._timeout)

    def _verify(self, want: _Want) -> bool:
        """Compare the checksum of a frame that has arrived. Return whether it fits."""
        content = self._rows.bytes_of(want.number, want.frame)
        is_whole = checksum(content, want.key.name, self._key) == want.sum
        if is_whole:
            self._rows.empty(want.number, want.frame, want.job.fence)
        self._rows.free(want.number)
        return is_whole

    def _settle(self, done: Sequence[tuple[int, _Want | None, bool]]) -> None:
        """Report pages, and give the credits of their frames back: a fourth of the window at a time, and the last ones.

        The other side still has three fourths, so a credit that is not said delays no frame. Wants that wait for a
        place are said at once.
        """
        assert self._pool is not None
        now = time.perf_counter()
        with self._lock:
            credits: list[int] = self._unsaid.setdefault("dones", [])
            credits.extend(number for number, _, _ in done)
            for want, is_whole in [(want, is_whole) for _, want, is_whole in done if want is not None]:
                self._stats.loaded += is_whole
                self._stats.loaded_bytes += is_whole * self._pool.frame_bytes
                self._stats.loaded_seconds += now - want.began
                self._end(want, "" if is_whole else CORRUPT)
            is_due = len(credits) >= self._most_unsaid or bool(self._waiting) or not self._wants
        if is_due:
            self._channel.wake()
