"""Fetch: the pages of one prompt on their way from tiers into the pool. Loader: the fetches of one stack of tiers.

    lookup in the pool │ lookup in the tiers │            │
    known pages        │ found there         │ not found  │ last token
                       └─ planned ───────────┘
                          LOAD, page by page ─▶ verified? ─▶ commit the pages up to the first that failed ─▶ release
                                                                                                       hold ─┘

The frames belong to an address space that only the fetch has. Until they are committed no prompt finds them; then they
are cached pages like all others, and `open` maps them. A page that fails in one tier is asked for in the tiers below. A
fetch that is cancelled or late ends at once for its owner, and keeps its frames while a tier may write into them.

A fetch whose first page another fetch is bringing takes no frames: it waits for the other, and then looks again.

A recurrent state comes after its pages: the deepest that a state tier has, then the one before it if that fails. Pages
behind the deepest state are not loaded.

A fetch that holds keeps its address space after it is done, so that its pages are not evicted before the prompt is
opened. A plan that lacks frames takes them all the same, after all cached ones (Holds).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from pagedkv.core.manager import MemoryManager
from pagedkv.core.state import I32, I64
from pagedkv.errors import OutOfFrames
from pagedkv.tiers.level import Level
from pagedkv.tiers.tier import Job, Key, Op
from pagedkv.tiers.tier_names import Namer

if TYPE_CHECKING:
    from pagedkv.core.handles import AddressSpace, Plan

LOOKED_UP: Final = 64
"""Pages that are hashed and looked up at a time. A prompt that no tier has costs one such lookup."""

TRIED: Final = 4
"""Recurrent states of one prompt that are looked for, as one may fail to load."""

Salt = bytes | Mapping[int, bytes]


class _Planned(Protocol):
    """A plan as a cache returns it."""

    @property
    def plan(self) -> Plan:
        """The plan of the manager."""


class Cache(Protocol):
    """The verbs of PagedKVCache that a fetch calls: the same that an engine calls for a prompt."""

    @property
    def reserve(self) -> int:
        """Frames that stay free: the watermark."""

    def lookup(self, token_ids: I32, *, tenant: bytes, salt: Salt) -> int:
        """Return how many tokens `open` would map."""

    def open(self, token_ids: I32, *, tenant: bytes, salt: Salt) -> AddressSpace:
        """Open a space that maps the longest known prefix."""

    def plan(self, batch: Sequence[AddressSpace], counts: Sequence[int]) -> _Planned:
        """Map frames for new tokens. A pool that may grow does."""


class Fetch:
    """The pages of a prompt that lower tiers have, on their way. `PagedKVCache.fetch` makes it.

    asked:  tokens that the tiers seemed to have. tokens: how many of these the pool had when `done`.
    source: pages asked for in each tier, by its name.
    lacked: frames for further pages that the tiers seemed to have, and the pool could not give.
    """

    def __init__(self, ids: I32, pump: Callable[[float], None], deadline: float) -> None:
        self.asked: int = 0
        self.tokens: int = 0
        self.source: dict[str, int] = {}
        self.lacked: int = 0
        self.space: AddressSpace | None = None
        self.plan: Plan | None = None
        self.pages: list[_FetchedPage] = []
        self.states: list[_FetchedPage] = []  # that state tiers seem to have, the deepest first
        self.state: _FetchedPage | None = None  # the one that is loaded, after the pages
        self.jobs: list[Job] = []
        self.ids: I32 = ids
        self.digests: list[bytes] = []  # of its pages, as far as they were hashed
        self.page_tokens: int = 0
        self.first: int = 0  # the page where the planned ones begin
        self.start: int | None = None  # the page where the first look found that the pool ends
        self.after: Fetch | None = None  # the fetch that brings the first page
        self.look: Callable[[Fetch], None] = lambda _: None  # takes the fetch: a cycle would keep its handles alive
        self.deadline: float = deadline
        self.tenant: bytes = b""
        self.holds: bool = False
        self.is_given_up: bool = False
        self.has_ended: bool = False  # whether the owner was told
        self._pump = pump

    @property
    def done(self) -> bool:
        """Whether the fetch has ended: `open` finds now what it could bring. Each look lets it go on."""
        if not self.has_ended:
            self._pump(0.0)
        return self.has_ended

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the fetch has ended, at most `timeout` seconds. Return `done`."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.done and (until is None or time.monotonic() < until):
            self._pump(0.0002)
        return self.has_ended

    def cancel(self) -> None:
        """End the fetch, and hold no pages. Pages that have arrived stay cached.

        Its other frames are free when no tier writes into them any more.
        """
        self.give_up()
        self._pump(0.0)

    # -- for the loader ------------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Ask the tiers to skip what has not begun."""
        self.is_given_up = True
        for job in self.jobs:
            job.cancel()

    def end(self, num_pages: int = 0) -> None:
        """Tell the owner that the fetch has ended, and that the pool has the first `num_pages` pages of the prompt."""
        size = self.asked if self.start is None else max(0, num_pages - self.start) * self.page_tokens
        self.tokens, self.has_ended = min(self.asked, size), True

    @property
    def num_verified(self) -> int:
        """Pages, from the first on, that have arrived in all groups."""
        return next((i for i, page in enumerate(self.pages) if page.missing), len(self.pages))

    @property
    def num_under_way(self) -> int:
        """Loads that a tier has not ended."""
        return sum(len(page.under_way) for page in self.loads)

    @property
    def loads(self) -> list[_FetchedPage]:
        """The pages, or the recurrent state that is loaded after them."""
        return self.pages if self.state is None else [self.state]


class _FetchedPage:
    """One page of a fetch. keys, frames: one for each layer group. missing: the groups that have not arrived.

    under_way: group: the number of the level that loads it. level: the number of the level to ask next, from the one
    that seems to have the page down; the levels below that one were not looked up.
    end: how many pages of the prompt lie before a recurrent state. 0 for a page.
    """

    def __init__(self, keys: list[Key], end: int = 0) -> None:
        self.keys: list[Key] = keys
        self.end: int = end
        self.frames: list[int] = []
        self.missing: set[int] = set(range(len(keys)))
        self.under_way: dict[int, int] = {}
        self.level: int | None = None


class _Holds:
    """Fetches that are done and keep the address space of their prompt, the oldest first.

    A frame that only these spaces map counts as one that a plan may take, as if it were cached.
    """

    def __init__(self, manager: Callable[[], MemoryManager]) -> None:
        self._manager = manager
        self._fetches: list[Fetch] = []
        self._counted: tuple[list[Fetch], dict[bytes, tuple[I32, I64]]] = [], {}

    def __iter__(self) -> Iterator[Fetch]:
        return iter(list(self._fetches))

    def __len__(self) -> int:
        return len(self._fetches)

    def keep(self, fetch: Fetch) -> None:
        """Hold the pages of `fetch`."""
        if fetch not in self._fetches:
            self._fetches.append(fetch)

    def release(self, fetch: Fetch) -> None:
        """Give the frames of `fetch` back, whether it is held or not. A second call does nothing."""
        fetch.holds = False
        if fetch.space is not None and not self._manager().is_stale(fetch.space):
            fetch.space.release()
        if fetch in self._fetches:
            self._fetches.remove(fetch)

    def release_newest(self, tenant: bytes | None) -> bool:
        """Release the fetch that was held last, of `tenant` if one is given. Return whether there was one."""
        newest = next((f for f in reversed(self._fetches) if tenant in (None, f.tenant)), None)
        if newest is not None:
            self.release(newest)
        return newest is not None

    def num_frames(self, tenant: bytes | None) -> int:
        """Return how many frames would be evictable if no fetch, of `tenant` if one is given, were held. O(pages)."""
        if not self._fetches:
            return 0
        _, _, _, refs, pins = self._manager().frame_views()
        each = self._frames()
        counted = each.values() if tenant is None else [each[tenant]] if tenant in each else []
        return sum(int(((refs[frames] == counts) & (pins[frames] == 0)).sum()) for frames, counts in counted)

    def _frames(self) -> dict[bytes, tuple[I32, I64]]:
        """Return for each tenant the frames that held spaces map, and how many of these spaces map each frame."""
        fetches, frames = list(self._fetches), dict[bytes, list[I32]]()
        if self._counted[0] != fetches:
            for fetch in fetches:
                if fetch.space is not None and not self._manager().is_stale(fetch.space):
                    for group in range(len(self._manager().groups)):
                        frames.setdefault(fetch.tenant, []).append(fetch.space.pages_in(group))
            self._counted = fetches, {tenant: _with_counts(rows) for tenant, rows in frames.items()}
        return self._counted[1]


def _with_counts(rows: Sequence[I32]) -> tuple[I32, I64]:
    frames, counts = np.unique(np.concatenate(rows), return_counts=True)
    return frames[frames >= 0], counts[frames >= 0]


class Loader:
    """The fetches of one stack, and the loads that they have under way.

    fetches: the ones that have frames. waiting: the ones that wait for another fetch. holds: the ones that are done.

    The manager is the cache itself. A plan of the cache is settled here by the verbs of MemoryManager: those of the
    cache would pump the tiers again.
    """

    def __init__(self, manager: Callable[[], MemoryManager], levels: Sequence[Level]) -> None:
        self._manager, self._levels = manager, levels
        self.fetches: list[Fetch] = []
        self.waiting: list[Fetch] = []
        self.holds: _Holds = _Holds(manager)
        self._loads: dict[tuple[int, int, bytes], tuple[_FetchedPage, int]] = {}

    @property
    def _num_groups(self) -> int:
        return len(self._manager().groups)

    # -- begin ---------------------------------------------------------------------------------------------------------

    def begin(self, cache: Cache, fetch: Fetch, namer: Namer, *, tenant: bytes, salt: Salt) -> None:
        """Look a prompt up, and begin to load what the tiers have of it."""
        fetch.page_tokens, fetch.tenant = self._manager().block_size, tenant
        fetch.look = partial(self._look, cache=cache, namer=namer, salt=salt)
        fetch.look(fetch)

    def _look(self, fetch: Fetch, *, cache: Cache, namer: Namer, salt: Salt) -> None:
        size, ids, tenant = fetch.page_tokens, fetch.ids, fetch.tenant
        fetch.first = cache.lookup(ids, tenant=tenant, salt=salt) // size
        fetch.start = fetch.first if fetch.start is None else min(fetch.start, fetch.first)
        findable, hashed = ids[: max(0, len(ids) - 1)], fetch.digests
        keys = namer.keys_of(findable, tenant, salt, block_size=size, first=fetch.first, digests=hashed)
        pages = self._findable(keys)
        fetch.after = self._bringer(pages)
        most = max(0, MemoryManager.available_to(self._manager(), tenant) - cache.reserve) // self._num_groups
        fetch.pages, fetch.lacked = pages[:most], self._num_groups * len(pages[most:])
        deepest = fetch.first + len(fetch.pages)
        if self._manager().states is not None:
            ready = (self._manager().why(ids, tenant=tenant, salt=salt).ready or 0) // size
            fetch.start = min(fetch.start, ready)
            fetch.states = self._findable_states(fetch, namer, ready, deepest)
            if fetch.states and not self._manager().states_available:  # no frame for any: pages alone save nothing
                fetch.states, fetch.lacked = [], 1
            deepest = max([ready, *(state.end for state in fetch.states)])
            fetch.pages = fetch.pages[: max(0, deepest - fetch.first)]
        fetch.asked = max(fetch.asked, size * (deepest - fetch.start))
        if fetch.after is not None:
            fetch.pages = []
            self.waiting.append(fetch)
            return
        if fetch.pages or fetch.states:
            self._plan(cache, fetch, salt)
        if fetch not in self.fetches:
            fetch.end(fetch.first)

    def _bringer(self, pages: Sequence[_FetchedPage]) -> Fetch | None:
        """Return the fetch that brings the first of `pages`."""
        if not pages:
            return None
        name = pages[0].keys[0].name
        return next(
            (f for f in self.fetches if not f.is_given_up and any(p.keys[0].name == name for p in f.pages)), None
        )

    def _findable(self, keys: Iterator[list[Key]]) -> list[_FetchedPage]:
        """Return the pages from the first on that some tier seems to have in all groups.

        A tier is asked only for what those above it lack: a lookup in a shared store costs a wait.
        """
        pages: list[_FetchedPage] = []
        while part := [_FetchedPage(each) for each in itertools.islice(keys, LOOKED_UP)]:
            self._look_up(part)
            found = next((i for i, page in enumerate(part) if page.level is None), len(part))
            pages += part[:found]
            if found < len(part):
                break
        return pages

    def _findable_states(self, fetch: Fetch, namer: Namer, ready: int, most: int) -> list[_FetchedPage]:
        """Return recurrent states that some tier seems to have, the deepest first: after `ready` + 1 to `most` pages.

        There are a few of them, as one may fail to load.
        """
        ends, found = iter(range(most, ready, -1)), list[_FetchedPage]()
        while len(found) < TRIED and (part := list(itertools.islice(ends, LOOKED_UP))):
            states = [_FetchedPage([namer.state_key(fetch.digests[end - 1], fetch.tenant)], end) for end in part]
            self._look_up(states)
            found += [state for state in states if state.level is not None]
        return found

    def _look_up(self, part: Sequence[_FetchedPage]) -> None:
        """Set the level of each of `part` that some tier seems to have in all groups."""
        for number, level in enumerate(self._levels):
            lacking = [page for page in part if page.level is None and bool(page.end) == level.of_states]
            if lacking:
                hits = level.lookup([key for page in lacking for key in page.keys]).reshape(len(lacking), -1)
                for page, of_groups in zip(lacking, hits.tolist(), strict=True):
                    if all(of_groups):
                        page.level = number

    def _plan(self, cache: Cache, fetch: Fetch, salt: Salt) -> None:
        """Plan frames for the pages of `fetch`, and submit their loads. Without frames the fetch has no pages."""
        size, num_pages = fetch.page_tokens, len(fetch.pages)
        with self._manager().restoring():
            fetch.space = cache.open(fetch.ids[: fetch.first * size + 1], tenant=fetch.tenant, salt=salt)
        try:
            if len(fetch.space) != fetch.first * size:
                raise OutOfFrames(num_pages, 0)
            with self._manager().restoring():
                fetch.plan = cache.plan([fetch.space], [num_pages * size]).plan
        except OutOfFrames:
            fetch.pages = []
            fetch.space.release()
            return
        for group in range(self._num_groups):
            frames = fetch.space.pages_in(group)[fetch.first :].tolist()
            for page, frame in zip(fetch.pages, frames, strict=True):
                page.frames.append(frame)
        self.fetches.append(fetch)
        self._submit(fetch)

    # -- load ----------------------------------------------------------------------------------------------------------

    def _submit(self, fetch: Fetch) -> None:
        """Ask the next tier for each page that is neither complete nor under way."""
        wanted: dict[int, list[_FetchedPage]] = {}
        for page in fetch.loads:
            if page.missing and not page.under_way and (number := self._next_level(page)) is not None:
                page.level = number + 1
                wanted.setdefault(number, []).append(page)
        for number, pages in wanted.items():
            moves = [(page, group) for page in pages for group in sorted(page.missing)]
            for page, group in moves:  # before the tier knows of them: an interrupt must not free frames that it writes
                page.under_way[group] = number
            name = self._levels[number].tier.name
            fetch.source[name] = fetch.source.get(name, 0) + len(pages)
            job = self._levels[number].submit(
                Op.LOAD, [page.keys[g] for page, g in moves], [page.frames[g] for page, g in moves]
            )
            if job is not None:
                fetch.jobs.append(job)
                for page, group in moves:
                    self._loads[number, job.number, page.keys[group].name] = page, group

    def _next_level(self, page: _FetchedPage) -> int | None:
        """Return the number of the next level that `page` may be asked for in; None if there is none."""
        first = len(self._levels) if page.level is None else page.level
        return next(
            (
                number
                for number in range(first, len(self._levels))
                if self._levels[number].is_open and self._levels[number].of_states == bool(page.end)
            ),
            None,
        )

    def poll(self) -> None:
        """Take the pages that have ended from the tiers, and settle the fetches that are complete or late."""
        now = time.monotonic()
        for number, level in enumerate(self._levels):
            for result in level.poll():
                if (load := self._loads.get((number, result.job, result.key.name))) is not None:
                    page, group = load
                    if result.ok:
                        page.missing.discard(group)
                    page.under_way.pop(group, None)
                    del self._loads[number, result.job, result.key.name]
            if self.fetches and not level.num_pending:
                self._end_lost(number)
        for fetch in self.holds:
            if fetch.is_given_up or not fetch.holds:
                self.holds.release(fetch)
        for fetch in list(self.fetches):
            if now > fetch.deadline and not fetch.is_given_up:
                fetch.give_up()
            if not fetch.is_given_up:
                self._submit(fetch)
            if fetch.is_given_up or not fetch.num_under_way:
                self._settle(fetch)
        self._wake(now)

    def _end_lost(self, number: int) -> None:
        """Count loads of a level that has none as ended: an interrupt, or a refusal, kept them from being reported."""
        for name in [name for name in self._loads if name[0] == number]:
            del self._loads[name]
        for page in (page for fetch in self.fetches for page in fetch.loads if page.under_way):
            for group in [group for group, level in page.under_way.items() if level == number]:
                del page.under_way[group]

    def _settle(self, fetch: Fetch) -> None:
        """Commit the pages that have arrived, and give the other frames back once no tier writes into them."""
        assert fetch.space is not None
        assert fetch.plan is not None
        size = self._manager().block_size
        if not fetch.has_ended:
            pages = fetch.first + fetch.num_verified
            start, end = len(fetch.space), pages * size  # from `start` on, if it was interrupted
            if start < end:
                with self._manager().restoring():
                    MemoryManager.commit(
                        self._manager(), fetch.plan, fetch.ids[start:end], [end - start], keep_planned=True
                    )
            if self._manager().states is not None:
                self._settle_state(fetch)
                if not fetch.is_given_up and self._begin_state(fetch):
                    return
                pages = fetch.space.ready // size
            fetch.end(pages)
        if not fetch.num_under_way:
            if fetch.plan.is_outstanding:
                MemoryManager.abort(self._manager(), fetch.plan)
            if fetch.holds and not fetch.is_given_up and (fetch.num_verified or fetch.state is not None):
                self.holds.keep(fetch)
            else:
                self.holds.release(fetch)
            self.fetches.remove(fetch)

    def _settle_state(self, fetch: Fetch) -> None:
        """Give the space of `fetch` the recurrent state that has arrived, and publish it."""
        if fetch.state is not None and not fetch.state.missing and fetch.plan is not None and fetch.plan.is_outstanding:
            assert fetch.space is not None
            with self._manager().restoring():
                ids = fetch.ids[fetch.space.ready : fetch.state.end * fetch.page_tokens]
                MemoryManager.commit(self._manager(), fetch.plan, ids)

    def _begin_state(self, fetch: Fetch) -> bool:
        """Load the deepest recurrent state that was not tried, and whose pages are there. Return whether there is one.

        It is the state that a step over these pages would write. No load is under way.
        """
        assert fetch.space is not None
        assert fetch.plan is not None
        ready, length = fetch.space.ready, len(fetch.space)
        if fetch.plan.is_outstanding:
            MemoryManager.abort(self._manager(), fetch.plan)
        while fetch.states:
            state = fetch.states.pop(0)
            end = state.end * fetch.page_tokens
            if ready < end <= length:
                try:
                    fetch.plan = MemoryManager.plan(self._manager(), [fetch.space], [end - ready], saves_inside=False)
                except OutOfFrames:
                    return False
                assert fetch.plan.states is not None
                state.frames, fetch.state = fetch.plan.states.state_out.tolist(), state
                self._submit(fetch)
                return True
        return False

    def _wake(self, now: float) -> None:
        """Let the fetches look again whose bringers have ended, and end those that are late."""
        for fetch in list(self.waiting):
            is_late = fetch.is_given_up or now > fetch.deadline
            if not is_late and fetch.after is not None and not fetch.after.has_ended:
                continue
            if is_late and not fetch.has_ended:
                fetch.end()
            elif not fetch.has_ended and fetch not in self.fetches:  # else an interrupt came before the next line
                fetch.look(fetch)
            self.waiting.remove(fetch)  # the first entry; `look` appends another one if the fetch has to wait again

    # -- end -----------------------------------------------------------------------------------------------------------

    def give_up(self, *, keep: bool = True) -> None:
        """End all fetches. keep: whether the pages that have arrived are committed."""
        for fetch in (*self.fetches, *self.waiting, *self.holds):
            fetch.give_up()
            if not keep and not fetch.has_ended:
                fetch.end()
