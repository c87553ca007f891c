"""Observation: what a manager tells about itself while it works. All of it is off by default, and nothing here changes what is kept.

It is the part of MemoryManager that only looks; it knows the log of events, the sample of reuse and the index, and must not know any rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.core.arguments import flag, whole
from pagedkv.core.observe import misses
from pagedkv.core.observe.reuse_distance import Reuse
from pagedkv.core.observe.stats import prompt_registers
from pagedkv.core.prefix.events import Event, EventLog, Snapshot
from pagedkv.core.prefix.export import Page, findable_pages
from pagedkv.core.prefix.roots import Root, Roots
from pagedkv.core.state import FREE, I32, PUBLISHING, State
from pagedkv.core.tables.layer_groups import Group
from pagedkv.core.thread_guard import ThreadGuard, exclusive
from pagedkv.errors import InvalidRequest


@dataclass(frozen=True)
class Observe:
    """What a MemoryManager is to watch.

    events:      how many of the last events are kept for `events(since)`; each takes 12 + 4 x block_size bytes. 0: none.
    reuse:       how many pages are followed for `hit_curve()`; each takes 40 to 44 bytes; 8192 is a good number. 0: none.
    other_roots: whether `stats().missed_other_root` is counted. All tenants are looked at when a prompt is not wholly found, O(pages x
                 tenants), so how long `open` takes tells a tenant what others have: not where they do not trust one another.
    """

    events: int = 0
    reuse: int = 0
    other_roots: bool = False

    def __post_init__(self) -> None:
        flag(self.other_roots, "Observe.other_roots")
        for name in ("events", "reuse"):
            object.__setattr__(self, name, whole(getattr(self, name), f"Observe.{name}", 0, 2**31))


class Observed(ThreadGuard):
    """The observing methods of MemoryManager."""

    num_frames: int
    groups: tuple[Group, ...]
    state: State
    _roots: Roots

    def _watch(self, observe: Observe | None) -> None:
        """Begin. The log itself is a part of the state."""
        if not isinstance(observe, Observe | None):
            raise InvalidRequest(f"observe is {observe!r}; give an Observe, such as Observe(events=65536)")
        self._watched = watch = observe or Observe()
        self._watching = watch != Observe()
        self._log = EventLog()
        self._reuse = Reuse(watch.reuse, -(-self.num_frames // len(self.groups))) if watch.reuse else None
        self._missed_other_root = 0

    def _opened(self, tenant: bytes, root: Root, ids: I32, asid: int) -> None:
        """A space was opened for `ids`."""
        if self._watched.events:
            self._log.root_taken(self.state, root.number, tenant)
        if self._reuse:
            self._reuse.asked(self.state, root.seed, ids)
        if (
            self._watched.other_roots
            and misses.explain(self.state, self._roots, tenant, ids).reason == misses.OTHER_ROOT
        ):
            unit = 1 if len(self.state.kin) else self.state.tokens.shape[1]
            self._missed_other_root += (len(ids) - 1) // unit * unit - int(self.state.spaces["length"][asid])

    @property
    def prefix_cache(self) -> bool:
        """True if full pages are published at commit and found again by `open`."""
        return bool(self.state.reg[PUBLISHING])

    @exclusive
    def findable_pages(self) -> list[Page]:
        """Return every page that a prompt can find in all layer groups, each prefix before its suffixes. O(published frames)."""
        return findable_pages(self.state, self._roots)

    def free_mask(self) -> npt.NDArray[np.bool_]:
        """bool [F]: True for a frame in state FREE. A copy. O(frames)."""
        mask: npt.NDArray[np.bool_] = self.state.frames["status"] == FREE
        return mask

    def frame_generations(self) -> npt.NDArray[np.uint32]:
        """uint32 [F]: the generation of each frame, which rises when the frame is taken from the free list. A copy. O(frames)."""
        return self.state.frames["generation"].copy()

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """A context for refilling the prefix cache, from a snapshot for example, by open, plan and commit.

        Two things are suspended inside. `open` counts in no statistic of prompts. A single layer group with a window gives back no page:
        a space with a hole publishes no further page.
        """
        counters, missed = self.state.reg[prompt_registers(self.state.reg)].copy(), self._missed_other_root
        sampled = self._reuse.counts() if self._reuse else None
        groups = self.groups
        if len(groups) == 1:
            self.groups, self.state.groups[:] = (Group(),), 0
        try:
            yield
        finally:
            if len(groups) == 1:
                self.groups, self.state.groups[:, :2] = groups, (groups[0].window or 0, groups[0].sinks)
            self.state.reg[prompt_registers(self.state.reg)], self._missed_other_root = counters, missed
            if self._reuse and sampled is not None:
                self._reuse.set_counts(sampled)

    @exclusive
    def events(self, since: int) -> list[Event]:
        """What became findable or ceased to be after event number `since` (0: from the beginning). O(events), sha256 for each stored block.

        Raises: EventsLost if some of them are gone: begin again from `snapshot()`; InvalidRequest if the manager keeps no events
        """
        return self._kept().events(self.state, whole(since, "since"))

    @exclusive
    def snapshot(self) -> Snapshot:
        """Every page that can be found, and the number of the event to go on from. O(published frames).

        Raises: InvalidRequest if the manager keeps no events
        """
        return self._kept().snapshot(self.state)

    def _kept(self) -> EventLog:
        if not self._watched.events:
            raise InvalidRequest(
                "this manager keeps no events; make it with observe=Observe(events=N), the number to keep"
            )
        return self._log

    def hit_curve(self, sizes: Sequence[int] | None = None) -> dict[int, float]:
        """pool size in frames: what share of the whole pages asked for so far an LRU pool of that size would have matched. An estimate.

        sizes: by default an eighth of this pool to four times as many; once it has grown, no more than the sample reaches. O(sample). With
        layer groups a page counts a frame in each of them, windowed or not: what was given back behind a window stays cached, and is no
        more than that.
        Raises: InvalidRequest if the manager follows no pages, or for a size that the sample does not reach
        """
        if self._reuse is None:
            raise InvalidRequest(
                "this manager follows no pages; make it with observe=Observe(reuse=N), the number to follow, such as 8192"
            )
        reach = self._reuse.reach * len(self.groups)
        if sizes is None:
            pool = min(self.num_frames, reach // 4)
            sizes = [max(1, pool * times // 8) for times in (1, 2, 4, 8, 16, 32)]
        try:
            wanted = [whole(size, "size", 1) for size in sizes]
        except TypeError:
            raise InvalidRequest(f"hit_curve({sizes!r}); give a list of sizes, in frames") from None
        if max(wanted, default=1) > reach:
            raise InvalidRequest(f"hit_curve({wanted}): give sizes of 1 to {reach} frames, or follow more pages")
        counts = self._reuse.counts()
        return {size: self._reuse.hit_rate(size // len(self.groups), counts) for size in wanted}
