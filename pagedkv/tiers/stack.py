"""The stack of tiers of one cache: pages go down when they are published, and come up when a prompt asks for them.

    commit ─▶ pump ─▶ pages published since the last pump ─▶ backlog of each tier ─▶ STORE      (write_back.py)
    fetch  ─▶ keys of the prompt ─▶ lookup, tier by tier ─▶ plan ─▶ LOAD ─▶ commit, release     (fetch.py)

`pump` does what is due and waits for nothing: it reads the events of the manager, polls the tiers, settles the fetches
that have ended and submits what the backlogs hold. The cache calls it after each commit; `Fetch.done` calls it, too.
Each part can be repeated, so a pump that was interrupted is made whole by the next.

A page is stored when it is published and not when it is evicted: an eviction happens inside `plan`, which must not
wait. When the pool evicts a page, the tiers count a use of it. So the order in which a tier evicts is that of a tier
that got the pages by eviction.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pagedkv.core.arguments import real, tenant_name, token_row
from pagedkv.errors import InvalidRequest, OutOfFrames
from pagedkv.tiers.fetch import Fetch, FetchedPage
from pagedkv.tiers.names import Namer, fingerprint
from pagedkv.tiers.tier import Key, Op, PoolView, Tier, TierStats
from pagedkv.tiers.write_back import EveryPage, WriteBack

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from pagedkv.core.manager import MemoryManager
    from pagedkv.spec import KVSpec

PAUSE: Final = 0.0002
"""Seconds between two looks at tiers that are waited for."""
DEADLINE: Final = 30.0
"""Seconds that a fetch may take by default."""


class TierStack:
    """The tiers of one cache, the fastest first. `cache.tiers` is its public side."""

    def __init__(self, tiers: Sequence[Tier], write_back: WriteBack | None = None) -> None:
        if isinstance(tiers, str | bytes) or not isinstance(tiers, Sequence):
            raise InvalidRequest(f"tiers is {tiers!r}; give a list, such as [HostTier('16GiB')]")
        self.tiers: list[Tier] = list(tiers)
        for tier in self.tiers:
            if not hasattr(tier, "submit") or not hasattr(tier, "lookup"):
                raise InvalidRequest(f"{tier!r} is no tier; give HostTier, DiskTier or an object with their methods")
        names = [tier.name for tier in self.tiers]
        for number, tier in enumerate(self.tiers):
            if names[:number].count(names[number]):
                tier.name = f"{tier.name}-{names[:number].count(names[number]) + 1}"
        self._write_back = write_back or EveryPage()
        self._backlogs: list[deque[tuple[int, int, Key]]] = []
        self._fetches: list[Fetch] = []
        self._loads: dict[tuple[int, int, bytes], tuple[Fetch, FetchedPage, int]] = {}
        self._since: int | None = 0  # the last event seen; None: look at all pages that are published

    def attach(
        self, manager: MemoryManager, frames: torch.Tensor, specs: Sequence[KVSpec], layer_groups: Sequence[int]
    ) -> None:
        """Serve `frames` (uint8 [F, frame_bytes]), which `manager` hands out."""
        self._manager = manager
        self.pool: PoolView = PoolView(frames, lambda: manager.frame_views()[:2])
        facts = fingerprint(specs, layer_groups, frames.shape[1])
        self._num_groups, self._namer = len(specs), Namer(facts, len(specs))
        for tier in self.tiers:
            tier.register(self.pool, facts)
        self._backlogs = [deque(maxlen=2 * manager.num_frames) for _ in self.tiers]

    def resized(self, frames: torch.Tensor) -> list[tuple[object, str, object]]:
        """Return the attributes that change with the pool, which has `frames` (uint8 [F, frame_bytes]) from then on."""
        return [(self.pool, "frames", frames), (self, "_since", None)]

    def __len__(self) -> int:
        return len(self.tiers)

    # -- down ----------------------------------------------------------------------------------------------------------

    def pump(self, wait: float = 0.0) -> None:
        """Do what is due. wait: seconds to sleep first, if bytes are under way."""
        if wait and self.num_pending:
            time.sleep(wait)
        if self.tiers and self._manager.last_event != self._since:
            self._take_changes()
        if self._fetches or self.num_pending:
            self._poll()
        for tier, backlog in zip(self.tiers, self._backlogs, strict=True):
            if backlog:
                self._store(tier, backlog)

    def _take_changes(self) -> None:
        """Put the pages that were published into the backlogs, and count a use of those that the pool evicted."""
        changes = self._manager.page_changes(self._since)
        removed = [self._namer.key(page.digest, page.tenant, page.group) for page in changes.removed]
        uses = self._manager.frame_views().uses
        for frame, page in changes.stored:
            if self._write_back.stores(uses=int(uses[frame]), tenant=page.tenant):
                entry = frame, self.pool.stamp(frame), self._namer.key(page.digest, page.tenant, page.group)
                for backlog in self._backlogs:
                    backlog.append(entry)
        for tier in self.tiers:
            tier.touch(removed)
        self._since = changes.sequence

    def _store(self, tier: Tier, backlog: deque[tuple[int, int, Key]]) -> None:
        """Submit the first pages of a backlog that are in the pool still."""
        frames, keys, room = list[int](), list[Key](), tier.room
        while backlog and len(frames) < room:
            frame, stamp, key = backlog.popleft()
            if self.pool.holds(frame, stamp):
                frames.append(frame)
                keys.append(key)
        if frames:
            tier.submit(Op.STORE, keys, frames)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the pages published so far are stored, at most `timeout` seconds. Return whether they are."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self.pump(PAUSE)
            if not (self.num_pending or any(self._backlogs)):
                return True
            if until is not None and time.monotonic() >= until:
                return False

    # -- up ------------------------------------------------------------------------------------------------------------

    def fetch(
        self, cache: Any, token_ids: Sequence[int] | npt.NDArray[np.integer], tenant: bytes,
        salt: bytes | Mapping[int, bytes], timeout: float | None,
    ) -> Fetch:  # fmt: skip
        """See PagedKVCache.fetch."""
        ids, tenant, size = token_row(token_ids), tenant_name(tenant), cache.spec.block_size
        seconds = DEADLINE if timeout is None else real(timeout, "timeout")
        first = cache.lookup(ids, tenant=tenant, salt=salt) // size
        fetch = Fetch(ids, first, self.pump, time.monotonic() + seconds)
        keys = list(self._namer.keys_of(ids[: max(0, len(ids) - 1)], tenant, salt, size))[first:]
        pages = self._findable(keys)
        room = max(0, cache.available_to(tenant) - cache.reserve) // self._num_groups
        fetch.pages, fetch.lacked = pages[:room], self._num_groups * len(pages[room:])
        fetch.asked = size * len(fetch.pages)
        if fetch.pages:
            self._begin(cache, fetch, tenant, salt)
        if not fetch.pages:
            fetch.end()
        return fetch

    def _findable(self, keys: list[list[Key]]) -> list[FetchedPage]:
        """Return the pages from the first on that some tier has in all groups, each with these tiers."""
        pages = [FetchedPage(each, []) for each in keys]
        for number, tier in enumerate(self.tiers if pages else ()):
            hits = tier.lookup([key for each in keys for key in each]).reshape(-1, self._num_groups)
            for page, of_groups in zip(pages, hits.tolist(), strict=True):
                if all(of_groups):
                    page.tiers.append(number)
        return pages[: next((i for i, page in enumerate(pages) if not page.tiers), len(pages))]

    def _begin(self, cache: Any, fetch: Fetch, tenant: bytes, salt: bytes | Mapping[int, bytes]) -> None:
        """Plan frames for the pages of `fetch`, and submit their loads. Without frames the fetch has no pages."""
        size, num_pages = cache.spec.block_size, len(fetch.pages)
        with self._manager.restoring():
            fetch.space = cache.open(fetch.ids[: fetch.first * size + 1], tenant=tenant, salt=salt)
        try:
            if len(fetch.space) != fetch.first * size:
                raise OutOfFrames(num_pages, 0)
            fetch.plan = cache.plan([fetch.space], [num_pages * size]).plan
        except OutOfFrames:
            fetch.pages = []
            fetch.space.release()
            return
        for group in range(self._num_groups):
            frames = fetch.space.pages_in(group)[fetch.first :].tolist()
            for page, frame in zip(fetch.pages, frames, strict=True):
                page.frames.append(frame)
        self._fetches.append(fetch)
        self._submit(fetch)

    def _submit(self, fetch: Fetch) -> None:
        """Ask the next tier for each page that is neither complete nor under way."""
        wanted: dict[int, list[FetchedPage]] = {}
        for page in fetch.pages:
            if page.missing and not page.under_way and page.tiers:
                wanted.setdefault(page.tiers.pop(0), []).append(page)
        for number, pages in wanted.items():
            moves = [(page, group) for page in pages for group in sorted(page.missing)]
            job = self.tiers[number].submit(
                Op.LOAD, [page.keys[g] for page, g in moves], [page.frames[g] for page, g in moves]
            )
            fetch.jobs.append(job)
            name = self.tiers[number].name
            fetch.source[name] = fetch.source.get(name, 0) + len(pages)
            for page, group in moves:
                page.under_way[group] = number
                self._loads[number, job.number, page.keys[group].name] = fetch, page, group

    def _poll(self) -> None:
        """Take the pages that have ended from the tiers, and settle the fetches that are complete or late."""
        for number, tier in enumerate(self.tiers):
            for result in tier.poll():
                load = self._loads.get((number, result.job, result.key.name))
                if load is not None:
                    _, page, group = load
                    if result.ok:
                        page.missing.discard(group)
                    page.under_way.pop(group, None)
                    del self._loads[number, result.job, result.key.name]
            if not tier.num_pending:  # an interrupt may have lost results: then these pages have not arrived
                for name in [name for name in self._loads if name[0] == number]:
                    _, page, group = self._loads[name]
                    page.under_way.pop(group, None)
                    del self._loads[name]
        now = time.monotonic()
        for fetch in list(self._fetches):
            if fetch.deadline is not None and now > fetch.deadline and not fetch.is_given_up:
                fetch.give_up()
            if not fetch.is_given_up:
                self._submit(fetch)
            if fetch.is_given_up or not fetch.num_under_way:
                self._settle(fetch)

    def _settle(self, fetch: Fetch) -> None:
        """Commit the pages that have arrived, and give the other frames back once no tier writes into them."""
        assert fetch.space is not None
        assert fetch.plan is not None
        size, verified = self._manager.block_size, 0
        if not fetch.has_ended:
            verified = fetch.num_verified
            start, end = len(fetch.space), (fetch.first + verified) * size  # from `start` on, if it was interrupted
            if start < end:
                with self._manager.restoring():
                    self._manager.commit(fetch.plan, fetch.ids[start:end], [end - start], keep_planned=True)
            fetch.end(verified * size)
        if not fetch.num_under_way:
            if fetch.plan.is_outstanding:
                self._manager.abort(fetch.plan)
            if not self._manager.is_stale(fetch.space):
                fetch.space.release()
            self._fetches.remove(fetch)

    # -- the rest ------------------------------------------------------------------------------------------------------

    @property
    def num_fetches(self) -> int:
        """Fetches that have frames of the pool."""
        return len(self._fetches)

    @property
    def num_pending(self) -> int:
        """Pages that a tier is reading or writing, or has not reported."""
        return sum(tier.num_pending for tier in self.tiers)

    def stats(self) -> dict[str, TierStats]:
        """Return the counters of each tier, by its name."""
        return {tier.name: tier.stats() for tier in self.tiers}

    def set_quota(self, tenant: bytes, hard: int | None) -> None:
        """Let `tenant` hold the share of each tier that its hard quota, in frames, is of the pool."""
        for tier in self.tiers:
            tier.set_quota(tenant, None if hard is None else min(1.0, hard / self._manager.num_frames))

    def abandon(self) -> None:
        """End all fetches, and wait until no tier writes into their frames. Pages that have arrived stay."""
        for fetch in self._fetches:
            fetch.give_up()
        while self._fetches:
            self._poll()
            time.sleep(PAUSE)

    def quiesce(self) -> None:
        """End all fetches, and wait until no tier reads or writes a frame."""
        self.abandon()
        for backlog in self._backlogs:
            backlog.clear()
        while self.num_pending:
            self._poll()
            time.sleep(PAUSE)

    def forget(self) -> None:
        """Drop all pages of all tiers. The manager has forgotten its own."""
        self.quiesce()
        for tier in self.tiers:
            tier.forget()
        self._since = self._manager.last_event

    def close(self) -> None:
        """Store what waits, end all fetches, and close the tiers. A disk keeps its pages."""
        self.flush()
        self.quiesce()
        for tier in self.tiers:
            tier.close()
        self.tiers, self._backlogs = [], []
