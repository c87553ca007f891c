"""Layer groups: layers that see different windows have page tables of their own over one pool of equal frames.

A space takes one row of the page table for each group, next to one another: row `asid` is that of group 0, the leader,
and row asid + g that of group g. All rows are equally long. The row of a group with a window has holes for pages that
no later query can see.

    group 0   |--- 0 ---|--- 1 ---|--- 2 ---|--- 3 ---|      its pages form the chain of the prefix index
    group 1   |-- sink -|  hole   |--- 2 ---|--- 3 ---|      the leader of a page: that of group 0 at the same place

A page of another group than 0 is a companion. The index finds it through its leader: its identity is (leader,
generation of the leader, group). That is exact, since the leader's identity is, and compares no tokens. In the index a
companion is one more successor of its leader, so I9 holds for it as for any page: it is evicted before its leader. No
page comes after a companion, so its eviction orphans none.

Group 0 may have a window, too. A space then gives pages back while pages after them are mapped. Each is put just before
its prefix in the order of eviction, so a sequence is found to its end until the pool needs the memory of its past.

This file knows which pages a window needs, and companions in the index; it must not know plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pagedkv.core.arguments import whole
from pagedkv.core.compiled import compiled, inlined, inner
from pagedkv.core.pool import frames
from pagedkv.core.prefix import index
from pagedkv.core.state import DEDUPLICATED, HOLE, I32, I64, State
from pagedkv.errors import InvalidRequest

MOST_GROUPS: Final = 64  # `published` is a byte

# scratch columns of `usable_length`
_PRESENT_FROM: Final = 2  # the group has every page from this one on,
_SINKS_PRESENT: Final = 3  # and this many leading pages

_KEEP: Final = 4  # column: positions that stay behind the window


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose queries see `window` positions back, own one included (None: all), and the first `sinks` tokens.

    keep: how many positions behind the window are not given back, so that a sequence may be truncated by as many.
    """

    window: int | None = None
    sinks: int = 0
    keep: int = 0

    def __post_init__(self) -> None:
        if self.window is not None:  # a query sees its own position at least
            object.__setattr__(self, "window", whole(self.window, "window", 1, 2**31))
        object.__setattr__(self, "sinks", whole(self.sinks, "sinks", 0, 2**31))
        object.__setattr__(self, "keep", whole(self.keep, "keep", 0, 2**31))
        if self.sinks and self.window is None:
            raise InvalidRequest(f"sinks is {self.sinks} without a window; give a window where sinks are more than 0")
        if self.keep and self.window is None:
            raise InvalidRequest(f"keep is {self.keep} without a window; give a window where keep is more than 0")


def group_tuple(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return `groups` as a tuple. Raises: InvalidRequest if it is not a sequence of Groups."""
    if not isinstance(groups, Sequence) or not all(isinstance(group, Group) for group in groups):
        raise InvalidRequest(f"groups is {groups!r}; give a list of Groups")
    return tuple(groups)


def group_rows(groups: tuple[Group, ...]) -> I64:
    """Return int64 [G, 5]: window (0 for none) and sinks of each group, two columns of scratch, and keep.

    Raises: InvalidRequest for groups that cannot share a pool
    """
    if not 1 <= len(groups) <= MOST_GROUPS:
        raise InvalidRequest(f"{len(groups)} layer groups; give 1 to {MOST_GROUPS}")
    return np.array([(group.window or 0, group.sinks, 0, 0, group.keep) for group in groups], np.int64)


@inlined
def leader_has_window(s: State) -> bool:
    """Return whether group 0 gives pages back, so that a space may not map the prefix of its pages."""
    return s.groups[0, 0] > 0


@inlined
def _first_visible_page(s: State, group: int, length: int) -> int:
    """Return the first page, apart from sinks, that a query at position `length` or later sees."""
    window = s.groups[group, 0]
    return max(0, length + 1 - window) // s.tokens.shape[1] if window > 0 else 0


@inlined
def first_kept_page(s: State, group: int, length: int) -> int:
    """Return the first page, apart from sinks, that stays when the sequence has `length` tokens."""
    return _first_visible_page(s, group, length - s.groups[group, _KEEP])


@inlined
def num_sink_pages(s: State, group: int) -> int:
    """Return how many leading pages hold sinks and are never given back."""
    size = s.tokens.shape[1]
    return (s.groups[group, 1] + size - 1) // size


@inlined
def _is_visible(s: State, group: int, page: int, length: int) -> bool:
    """Return whether a query at position `length` or later sees `page`."""
    return page >= _first_visible_page(s, group, length) or page < num_sink_pages(s, group)


@inner
def usable_length(s: State, leaders: I32, length: int) -> int:
    """Return the most tokens, up to `length`, after which every group has what the next query sees.

    leaders: int32 [at least the pages of `length`], which are all published
    The search goes back from the end, so it looks up visible pages only, and each of them once.
    O(groups x pages) at worst.
    """
    size = s.tokens.shape[1]
    for group in range(1, len(s.groups)):
        s.groups[group, _PRESENT_FROM], s.groups[group, _SINKS_PRESENT] = (length + size - 1) // size, 0
    group = 1
    while group < len(s.groups):
        lacking = _last_lacking_page(s, leaders, group, length)
        if lacking < 0:
            group += 1
        else:
            # the next query would see that page: end before it, where earlier groups may see other pages
            length, group = lacking * size, 1
    return length


@inlined
def _last_lacking_page(s: State, leaders: I32, group: int, length: int) -> int:
    """Return a page without companion that a query at position `length` sees, or -1. The last page is tried first."""
    pages = (length + s.tokens.shape[1] - 1) // s.tokens.shape[1]
    page = min(s.groups[group, _PRESENT_FROM], pages)
    first = _first_visible_page(s, group, length)
    while page > first:
        if index.find_companion(s, leaders[page - 1], group) < 0:
            return page - 1
        page -= 1
        s.groups[group, _PRESENT_FROM] = page
    while s.groups[group, _SINKS_PRESENT] < min(pages, num_sink_pages(s, group)):
        if index.find_companion(s, leaders[s.groups[group, _SINKS_PRESENT]], group) < 0:
            return int(s.groups[group, _SINKS_PRESENT])
        s.groups[group, _SINKS_PRESENT] += 1
    return -1


@inner
def map_companions(s: State, asid: int, length: int) -> None:
    """Map the pages that a query at position `length` sees in the rows of the other groups; make holes of the rest."""
    for group in range(1, len(s.groups)):
        row = asid + group
        for page in range((length + s.tokens.shape[1] - 1) // s.tokens.shape[1]):
            s.table[row, page] = HOLE
            if _is_visible(s, group, page, length):
                frame = index.find_companion(s, s.table[asid, page], group)
                frames.map_matched(s, frame)
                s.table[row, page] = frame
            else:
                s.spaces[row].first_hole = min(s.spaces[row].first_hole, page)


@inner
def publish_companions(s: State, asid: int, page: int) -> bool:
    """Publish the companions of `page`, whose leader is published. Return False if an outstanding plan forbids it.

    A companion that is published already is shared, as in publish_pages.
    """
    leader = s.table[asid, page]
    for group in range(1, len(s.groups)):
        row = asid + group
        frame = s.table[row, page]
        if frame == HOLE or s.frames[frame].published:
            continue
        existing = index.find_companion(s, leader, group)
        if existing >= 0 and s.spaces[asid].outstanding > 0:
            return False
        if existing >= 0:
            frames.share(s.frames, s.reg, existing)
            s.table[row, page] = existing
            frames.drop(s, frame, False, page, 0)
            s.reg[DEDUPLICATED] += 1
        else:
            index.insert_companion(s, frame, leader, group)
    return True


@compiled
def group_lacking_pages(s: State, asid: int, length: int, begins: int) -> int:
    """Return the first group in which a query would see a page that was given back, or -1.

    The queries are those from position `begins` to `length`: with recurrent states, tokens are computed again.
    """
    size = s.tokens.shape[1]
    for group in range(len(s.groups)):
        if s.groups[group, 0] > 0:
            for page in range((length + size - 1) // size):
                if s.table[asid + group, page] == HOLE and _is_visible(s, group, page, begins):
                    return group
    return -1
