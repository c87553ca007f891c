"""Layer groups: layers that see different windows keep page tables of their own over one pool of equal frames.

A space takes one row of the page table for each group, next to one another: row `asid` is that of group 0, which leads, and row asid + g
that of group g. All rows are equally long; a windowed one has holes where no query will look again.

    group 0   |--- 0 ---|--- 1 ---|--- 2 ---|--- 3 ---|      its pages form the chain of the prefix index
    group 1   |-- sink -|  hole   |--- 2 ---|--- 3 ---|      each page has the page of group 0 at the same place as its leader

A companion, the page of another group, is found by way of its leader: its identity is (leader, its generation, group), which is exact,
since the leader's is, and compares no tokens. In the index it is one more successor of its leader, so I9 holds for it as for any page:
it is given up before its leader; and given up itself, it orphans nobody.

This file knows which pages a window needs, and companions in the index; it must not know plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pagedkv.core.arguments import whole
from pagedkv.core.compiled import compiled, inlined
from pagedkv.core.pool import frames
from pagedkv.core.prefix import index
from pagedkv.core.state import DEDUPLICATED, HOLE, I32, I64, State
from pagedkv.errors import InvalidRequest

MOST_GROUPS: Final = 64  # `published` is a byte

_UNBROKEN: Final = 2  # scratch of `covered`: from which page on nothing is lacking,
_SINKS: Final = 3  # and how many leading pages are there


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that see the same: `window` positions back, a query's own included (None for all), and the first `sinks` tokens always."""

    window: int | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window is not None:  # a query sees its own position at least
            object.__setattr__(self, "window", whole(self.window, "window", 1, 2**31))
        object.__setattr__(self, "sinks", whole(self.sinks, "sinks", 0, 2**31))
        if self.sinks and self.window is None:
            raise InvalidRequest(f"sinks is {self.sinks} without a window; give a window where sinks are more than 0")


def group_tuple(groups: Sequence[Group]) -> tuple[Group, ...]:
    """`groups`, which a caller gave."""
    if not isinstance(groups, Sequence) or not all(isinstance(group, Group) for group in groups):
        raise InvalidRequest(f"groups is {groups!r}; give a list of Groups")
    return tuple(groups)


def group_rows(groups: tuple[Group, ...], *, prefix_cache: bool, by_token: bool) -> I64:
    """int64 [G, 4]: window (0 for none) and sinks of each, and scratch. Raises: InvalidRequest for groups that cannot share a pool."""
    if not 1 <= len(groups) <= MOST_GROUPS:
        raise InvalidRequest(f"{len(groups)} layer groups; give 1 to {MOST_GROUPS}")
    if len(groups) > 1 and by_token:
        raise InvalidRequest("match='token' works with one layer group; use match='page'")
    if len(groups) > 1 and prefix_cache and groups[0].window is not None:
        raise InvalidRequest(
            "group 0 leads the prefix cache and keeps all pages: give a group without window first, or prefix_cache=False"
        )
    return np.array([(group.window or 0, group.sinks, 0, 0) for group in groups], np.int64)


@inlined
def first_seen(s: State, group: int, length: int) -> int:
    """The first page, but for the sinks, that a query at position `length` or later sees."""
    window = s.groups[group, 0]
    return max(0, length + 1 - window) // s.tokens.shape[1] if window > 0 else 0


@inlined
def sink_pages(s: State, group: int) -> int:
    """Leading pages that are never given back."""
    size = s.tokens.shape[1]
    return (s.groups[group, 1] + size - 1) // size


@inlined
def is_seen(s: State, group: int, page: int, length: int) -> bool:
    """Whether a query at position `length` or later sees `page`."""
    return page >= first_seen(s, group, length) or page < sink_pages(s, group)


@compiled
def covered(s: State, leaders: I32, pages: int) -> int:
    """The most pages, of the first `pages` in `leaders`, after which every group has all that the next query sees.

    From the end, so that only what is seen there is looked up, and each page of a group once: O(groups x pages) at worst.
    """
    for group in range(1, len(s.groups)):
        s.groups[group, _UNBROKEN], s.groups[group, _SINKS] = pages, 0
    group = 1
    while group < len(s.groups):
        lacking = _lacking(s, leaders, group, pages)
        if lacking < 0:
            group += 1
        else:
            pages, group = (
                lacking,
                1,
            )  # it is seen from behind: end before it, where the groups before may see other pages
    return pages


@inlined
def _lacking(s: State, leaders: I32, group: int, pages: int) -> int:
    """A page without companion that the query after `pages` pages sees, the last one outside the sinks; -1 if there is none."""
    page = min(s.groups[group, _UNBROKEN], pages)  # from here on they are there
    first = first_seen(s, group, pages * s.tokens.shape[1])
    while page > first:
        if index.find_companion(s, leaders[page - 1], group) < 0:
            return page - 1
        page -= 1
        s.groups[group, _UNBROKEN] = page
    while s.groups[group, _SINKS] < min(pages, sink_pages(s, group)):
        if index.find_companion(s, leaders[s.groups[group, _SINKS]], group) < 0:
            return int(s.groups[group, _SINKS])
        s.groups[group, _SINKS] += 1
    return -1


@compiled
def map_companions(s: State, asid: int, pages: int) -> None:
    """Map, in the rows of the other groups, what the next query after `pages` pages sees; the rest are holes."""
    for group in range(1, len(s.groups)):
        row = asid + group
        for page in range(pages):
            s.table[row, page] = HOLE
            if is_seen(s, group, page, pages * s.tokens.shape[1]):
                frame = index.find_companion(s, s.table[asid, page], group)
                frames.map_matched(s, frame)
                s.table[row, page] = frame
            else:
                s.spaces[row].first_hole = min(s.spaces[row].first_hole, page)


@compiled
def publish_companions(s: State, asid: int, page: int) -> bool:
    """Publish the companions of `page`, whose leader is. Equal ones are shared as in publish_pages; False if a plan forbids it."""
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
def blind_group(s: State, asid: int, length: int) -> int:
    """The group in which a query at position `length` would see a page that the space has given back; -1 if there is none."""
    size = s.tokens.shape[1]
    for group in range(len(s.groups)):
        if s.groups[group, 0] > 0:
            for page in range((length + size - 1) // size):
                if s.table[asid + group, page] == HOLE and is_seen(s, group, page, length):
                    return group
    return -1
