"""Observation: the methods of MemoryManager that report its work: events, snapshots, hit curves, findable pages.

Recording is off by default. It changes no decision of the manager: which pages are kept does not depend on it. This
file knows the log of events, the sample of reuse distances and the index; it must not know any rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from weakref import ref

import numpy as np
import numpy.typing as npt

from pagedkv.core.arguments import flag, whole
from pagedkv.core.observe import misses
from pagedkv.core.observe.reuse_distance import ReuseSampler
from pagedkv.core.prefix.events import Changes, Event, EventLog, Snapshot
from pagedkv.core.prefix.export import Page, findable_pages
from pagedkv.core.prefix.index import matches_tokens
from pagedkv.core.prefix.roots import Root, Roots, Salts
from pagedkv.core.state import FREE, I32, LOGGED, PUBLISHING, State
from pagedkv.core.tables.layer_groups import Group
from pagedkv.core.thread_guard import ThreadGuard, exclusive
from pagedkv.errors import InvalidRequest


@dataclass(frozen=True)
class Observe:
    """The records that a MemoryManager keeps about itself.

    events:      number of the last events kept for `events(since)`, 16 + 4 x block_size bytes each; 0 for none.
    reuse:       number of pages sampled for `hit_curve()`, 40 to 44 bytes each; 8192 is a good number; 0 for none.
    other_roots: whether `stats().missed_other_root` is counted. If a prompt is not wholly found, `open` then looks the
                 prompt up for every other tenant, O(pages x tenants). The time that `open` takes tells a tenant which
                 prompts others have, so leave it off where tenants do not trust one another.
    """

    events: int = 0
    reuse: int = 0
    other_roots: bool = False

    def __post_init__(self) -> None:
        flag(self.other_roots, "Observe.other_roots")
        for name in ("events", "reuse"):
            object.__setattr__(self, name, whole(getattr(self, name), f"Observe.{name}", 0, 2**31))


class FrameViews(NamedTuple):
    """Records of all frames [F]. They change with the pool; after a resize they are those of the old pool.

    generation: rises when a frame is taken. published: not 0 while a prompt can find the page in the frame.
    uses:       how often the page was used again. refs: page-table entries that name the frame (I2).
    pins:       not 0 while a copy or an open epoch may read the frame.
    """

    generation: npt.NDArray[np.uint32]
    published: npt.NDArray[np.uint8]
    uses: npt.NDArray[np.unsignedinteger]
    refs: npt.NDArray[np.unsignedinteger]
    pins: npt.NDArray[np.unsignedinteger]


class _Restoring:
    """The token of a `restoring` context: the context is under way while its token lives."""


class ObservationMixin(ThreadGuard):
    """The observing methods of MemoryManager."""

    num_frames: int
    groups: tuple[Group, ...]
    state: State
    _roots: Roots

    def _begin_observation(self, observe: Observe | None) -> None:
        """Prepare the records that `observe` asks for. The ring of events is a part of the state."""
        if not isinstance(observe, Observe | None):
            raise InvalidRequest(f"observe is {observe!r}; give an Observe, for example Observe(events=65536)")
        self._observe = observe or Observe()
        self._is_observed = self._observe != Observe()
        self._log = EventLog()
        self._reuse_sampler: ReuseSampler | None = None
        if pages := self._observe.reuse:
            self._reuse_sampler = ReuseSampler(pages, -(-self.num_frames // len(self.groups)))
        self._missed_other_root = 0
        self._restoring: ref[_Restoring] | None = None

    def _record_open(self, prompt: tuple[bytes, Salts], root: Root, ids: I32, asid: int) -> None:
        """Record that space `asid` was opened for the prompt `ids`. prompt: its tenant and its salts."""
        if self._observe.events:
            for each in self._roots.chain(*prompt, self.state.tokens.shape[1]):
                self._log.root_taken(self.state, each.number, (prompt[0], each.own))
        restoring = self._is_restoring()
        if self._reuse_sampler:
            self._reuse_sampler.record_prompt(self.state, root, ids, counted=not restoring)
        if not self._observe.other_roots or restoring:
            return
        if misses.explain(self.state, self._roots, prompt, ids).reason == misses.OTHER_ROOT:
            unit = 1 if matches_tokens(self.state) else self.state.tokens.shape[1]
            self._missed_other_root += (len(ids) - 1) // unit * unit - int(self.state.spaces["length"][asid])

    @property
    def prefix_cache(self) -> bool:
        """bool: True if `commit` publishes full pages and `open` finds them."""
        return bool(self.state.reg[PUBLISHING])

    @exclusive
    def findable_pages(self) -> list[Page]:
        """Return the pages that prompts find in all layer groups, prefixes first. O(published frames)."""
        return findable_pages(self.state, self._roots)

    def free_mask(self) -> npt.NDArray[np.bool_]:
        """bool [F]: True for a frame in state FREE. A copy. O(frames)."""
        mask: npt.NDArray[np.bool_] = self.state.frames["status"] == FREE
        return mask

    def frame_generations(self) -> npt.NDArray[np.uint32]:
        """uint32 [F]: the generation of each frame; it rises when the frame is taken. A copy. O(frames)."""
        return self.state.frames["generation"].copy()

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Suspend statistics and a window of group 0 while the caller refills the prefix cache by open, plan, commit.

        Inside the context, `open` counts in no statistic of prompts, and group 0 gives back no page: a page that was
        given back could be evicted for the next one. Both resume at the end, also after an exception or an interrupt:
        `open` and `commit` ask whether the context is under way, and nothing else changes.
        """
        token = _Restoring()
        outer = self._restoring_from(ref(token))
        try:
            yield
        finally:
            self._restoring_from(outer)

    @exclusive
    def _restoring_from(self, token: ref[_Restoring] | None) -> ref[_Restoring] | None:
        """Make `token` that of the innermost `restoring` context, and return the one before."""
        before, self._restoring = self._restoring, token
        return before

    def _is_restoring(self) -> bool:
        """Return True inside of `restoring`. An interrupt at its end leaves a dead token, which counts for nothing."""
        return self._restoring is not None and self._restoring() is not None

    @exclusive
    def events(self, since: int) -> list[Event]:
        """Return the events after number `since` (0: from the beginning): pages that became findable or ceased to be.

        O(events), and one sha256 for each stored block.
        Raises: EventsLost if some of them have left the ring: begin again from `snapshot()`;
                InvalidRequest if the manager keeps no events
        """
        return self._required_log().events(self.state, whole(since, "since"))

    @exclusive
    def snapshot(self) -> Snapshot:
        """Return every page that can be found, and the number of the last event. O(published frames).

        Raises: InvalidRequest if the manager keeps no events
        """
        return self._required_log().snapshot(self.state)

    def frame_views(self) -> FrameViews:
        """Return views of the frames' records, for code that keeps their bytes. Other threads may read them, too."""
        frames = self.state.frames
        return FrameViews(*(frames[name] for name in FrameViews._fields))

    @property
    def last_event(self) -> int:
        """int: the number of the newest event, 0 if there is none."""
        return int(self.state.reg[LOGGED])

    @exclusive
    def page_changes(self, since: int | None) -> Changes:
        """Return the pages that were published or removed after event `since`, with their frames. See events.Changes.

        since: None for all pages that are published now.
        Raises: InvalidRequest if the manager keeps no events
        """
        return self._required_log().changes(self.state, None if since is None else whole(since, "since"))

    def _required_log(self) -> EventLog:
        if not self._observe.events:
            raise InvalidRequest(
                "this manager keeps no events; make it with observe=Observe(events=N), where N is the number to keep"
            )
        return self._log

    def hit_curve(self, sizes: Sequence[int] | None = None) -> dict[int, float]:
        """dict {pool size in frames: hit rate}: an estimate for LRU pools of these sizes. O(sample).

        The hit rate is the share, of the whole pages that prompts asked for so far, which such a pool would have
        matched.
        sizes: by default an eighth of this pool up to four times this pool, but no more than the sample reaches.
        With layer groups a page counts as one frame in each group, windowed or not: a page behind a window stays
        cached.
        Raises: InvalidRequest if the manager samples no pages, or for a size that the sample does not reach
        """
        if self._reuse_sampler is None:
            raise InvalidRequest(
                "this manager samples no pages; make it with observe=Observe(reuse=N), "
                "where N is the number of pages to sample, for example 8192"
            )
        reach = self._reuse_sampler.reach * len(self.groups)
        if sizes is None:
            pool = min(self.num_frames, reach // 4)
            sizes = [max(1, pool * eighths // 8) for eighths in (1, 2, 4, 8, 16, 32)]
        try:
            frames = [whole(size, "size", 1) for size in sizes]
        except TypeError:
            raise InvalidRequest(f"hit_curve({sizes!r}); give a list of sizes, in frames") from None
        if max(frames, default=1) > reach:
            raise InvalidRequest(f"hit_curve({frames}): give sizes of 1 to {reach} frames, or sample more pages")
        counts = self._reuse_sampler.counts()
        return {size: self._reuse_sampler.hit_rate(size // len(self.groups), counts) for size in frames}
