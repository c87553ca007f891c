"""SharedTier: pages in a store that several processes share, behind the client of its vendor.

    STORE     frame ─▶ still published and unchanged? ─▶ record, unless another process has stored it      records.py
    LOAD      record ─▶ verified? ─▶ frame
    lookup    a thread asks the store; an answer that takes longer than `patience` counts as a miss

The tier counts the pages that this process stored, as if each had a slot of its own (slots.py): so `size`, quotas and
the order of eviction are those of other tiers, and a page that loses its slot is deleted from the store. Pages of other
processes are found and loaded, but never counted or deleted. A process that ends leaves its pages to the store, which
has rules of its own for old records.

This file knows frames, slots and records; it must not know a vendor.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.core.arguments import real, whole
from pagedkv.errors import InvalidRequest
from pagedkv.tiers.mover import Task
from pagedkv.tiers.pool_view import PoolView
from pagedkv.tiers.shared.records import HEADER, MISSING, THERE, Client, Records
from pagedkv.tiers.slots import CANCELLED, CHANGED, CORRUPT, GONE, Move, SlotTier
from pagedkv.tiers.tier import CLOSING, Key, Result

ASKED_AT_ONCE: Final = 128
"""Names in one query. A prompt is asked for from its start, so a query without an answer ends the lookup."""


class SharedTier(SlotTier):
    """Pages in a store behind `client`, shared with all processes that give an equal key.

    size:     the most bytes that this process keeps in the store: an int, or text like "200GiB".
    key:      16 to 64 secret bytes, the same in all processes: pages that were not written with it are not found. None
              only where everyone who can write to the store is trusted: such a person can plant pages.
    threads:  how many transfers may be under way at a time.
    patience: the most seconds, of each second, in which lookups wait for answers of the store.
    limit:    the most bytes a second that the tier moves, "2GB" or an int; None for no limit.
    policy:   the order in which this process evicts its pages, see MemoryManager.

    The cache must have a name for its weights (PagedKVCache, model=): pages of another model are not found.
    Raises:   InvalidRequest
    """

    kind = "shared"
    is_lasting = True

    def __init__(
        self,
        client: Client,
        size: str | int,
        *,
        key: bytes | None,
        threads: int = 2,
        patience: float = 0.05,
        limit: str | int | None = None,
        policy: str = "lru",
    ) -> None:
        super().__init__(size, limit=limit, policy=policy)
        self._records = Records(client, key)
        self.num_threads: int = whole(threads, "threads", 1, 1025)
        self._patience = real(patience, "patience")
        if not 0 <= self._patience < math.inf:
            raise InvalidRequest(f"patience is {patience}; give the seconds that a lookup may wait, 0 or more")
        self._waited, self._second = 0.0, 0.0
        self._asker: _Asker | None = None

    def _slot_bytes(self, frame_bytes: int) -> int:
        return frame_bytes + HEADER.size

    def _begin(self, pool: PoolView, fingerprint: bytes, num_slots: int) -> list[tuple[int, bytes, bytes]]:
        self._names = [b""] * num_slots  # of the page in each slot, once it was sent: then its record is this process's
        self._asker = _Asker(self._records)
        return []

    # -- the owner thread ----------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[Key]) -> npt.NDArray[np.bool_]:
        """See Tier.lookup. Keys come in the order of the prompt: behind a missing page no page is asked for."""
        assert self._asker is not None
        found, num_asked = np.zeros(len(keys), bool), 0
        until = self._begin_waiting()
        while num_asked < len(keys):
            part = [key.name for key in keys[num_asked : num_asked + ASKED_AT_ONCE]]
            answer = self._asker.ask(part, until - time.monotonic())
            found[num_asked : num_asked + len(answer)] = answer
            num_asked += len(answer)
            if not (answer and all(answer)):
                break
        self._waited = self._patience - (until - time.monotonic())
        self._lose([key.name for key, is_there in zip(keys[:num_asked], found, strict=False) if not is_there])
        self._stats.asked += len(keys)
        self._stats.hits += int(found.sum())
        return found

    def _begin_waiting(self) -> float:
        """Return the time until which lookups may wait: a long prompt asks often, and must not wait each time."""
        now = time.monotonic()
        if now - self._second >= 1.0:
            self._second, self._waited = now, 0.0
        return now + self._patience - self._waited

    def _lose(self, names: Sequence[bytes]) -> None:
        """Give up the slots of pages that the store has dropped, so that they are stored again."""
        slots = self._slots.find(names) if names else np.empty(0, np.int32)
        slots = slots[slots >= 0].tolist()
        for slot in slots:
            self._names[slot] = b""
        if slots:
            self._slots.unpublish(slots)

    def poll(self) -> list[Result]:
        """See Tier.poll."""
        results = super().poll()
        self._lose([result.key.name for result in results if result.why in (GONE, CORRUPT)])
        return results

    def _begin_loads(self, moves: list[Move]) -> list[Move]:
        for move in moves:
            move.slot = -1  # a load holds no slot: the page may be another process's
        return moves

    def _end_stores(self, moves: Sequence[Move]) -> None:
        self._void([move.slot for move in moves if move.why.startswith("failed")])  # stored perhaps
        for move in moves:
            self._names[move.slot] = b""

    def _void(self, slots: Sequence[int]) -> None:
        names = [self._names[slot] for slot in slots if self._names[slot]]
        for slot in slots:
            self._names[slot] = b""
        if names:
            self._mover.put(Task(partial(self._delete, names), 0, 0, False, lambda: False))

    # -- the tier's threads --------------------------------------------------------------------------------------------

    def _delete(self, names: list[bytes]) -> None:
        try:
            self._records.delete(names)
        except Exception:  # the store is gone, and the records with it, or it drops them by its own rules
            return

    def _store(self, moves: Sequence[Move]) -> None:
        pool = self._pool
        for move, is_there in zip(moves, self._records.find([move.key.name for move in moves]), strict=True):
            move.why = THERE if is_there else ""
        new = [move for move in moves if not move.why]
        if not new:
            return
        frames, stamps = (np.array([getattr(move, name) for move in new]) for name in ("frame", "stamp"))
        stage = torch.empty(len(new), pool.frame_bytes, dtype=torch.uint8)
        pool.read(frames, stage, np.arange(len(new)), new[0].job.fence)
        for move, is_held in zip(new, pool.hold(frames, stamps).tolist(), strict=True):  # after all bytes were read
            move.why = "" if is_held else CHANGED
        sent = [(move, content) for move, content in zip(new, stage.numpy(), strict=True) if not move.why]
        for move, _ in sent:
            self._names[move.slot] = move.key.name
        refusals = self._records.put([move.key.name for move, _ in sent], [content for _, content in sent])
        for (move, _), why in zip(sent, refusals, strict=True):
            move.why = why
            if why == THERE:
                self._names[move.slot] = b""
        if dropped := [move for move, _ in sent if move.job.is_dropped and not move.why]:  # `forget` did not see them
            self._delete([move.key.name for move in dropped])
            for move in dropped:
                move.why = CANCELLED

    def _load(self, moves: Sequence[Move]) -> None:
        contents = self._records.get([move.key.name for move in moves], self._pool.frame_bytes)
        for move, content in zip(moves, contents, strict=True):
            if isinstance(content, str):
                move.why = GONE if content is MISSING else CORRUPT
            else:
                stage = torch.from_numpy(content if content.flags.writeable else content.copy())[None]
                self._pool.write(np.array([move.frame]), stage, np.zeros(1, np.int64), move.job.fence)

    def _end(self) -> None:
        if self._asker is None or self._asker.close():  # else the client is in use, and stays
            self._records.close()

    def close(self, timeout: float = CLOSING) -> None:
        """See Tier.close."""
        if not self._is_registered and not self._is_closed:
            self._records.close()
        super().close(timeout)


class _Asker:
    """A thread that asks the store, so that the owner of the cache waits no longer than it wants to."""

    def __init__(self, records: Records) -> None:
        self._queries: SimpleQueue[_Query | None] = SimpleQueue()
        self._last: _Query | None = None
        self._thread = threading.Thread(
            target=_answer, args=(records, self._queries), name="pagedkv asker", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._queries.put, None)  # also of a tier that is not closed

    def ask(self, names: list[bytes], seconds: float) -> list[bool]:
        """Return whether the store has each page; [] if it does not answer in time, or has not answered before."""
        if seconds <= 0 or (self._last is not None and not self._last.is_answered.is_set()):
            return []
        query = _Query(names)
        self._queries.put(query)
        self._last = query  # now: an interrupt must not leave a query here that is not put
        return self._last.answer if self._last.is_answered.wait(seconds) else []

    def close(self) -> bool:
        """Stop the thread after its query. Return whether it has ended."""
        self._queries.put(None)
        self._thread.join(CLOSING)
        return not self._thread.is_alive()


class _Query:
    def __init__(self, names: list[bytes]) -> None:
        self.names, self.answer, self.is_answered = names, list[bool](), threading.Event()


def _answer(records: Records, queries: SimpleQueue[_Query | None]) -> None:
    while (query := queries.get()) is not None:
        try:
            query.answer = records.find(query.names)
        except Exception:  # a store that cannot be asked has nothing
            query.answer = []
        query.is_answered.set()
