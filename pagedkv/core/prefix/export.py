"""Pages: what the prefix cache holds, as rows that an order can be told from: for those who store it elsewhere. It only looks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedkv.core.prefix.roots import Roots
from pagedkv.core.state import I32, State


class Page(NamedTuple):
    """A full page that prompts find in every layer group. `parent`: the number of the page before in the same list, -1 for a first page."""

    frames: tuple[int, ...]  # of each group
    parent: int
    tenant: bytes
    token_ids: I32  # int32 [S]


def findable_pages(s: State, roots: Roots) -> list[Page]:
    """Every page that all groups have, prefixes first, a chain in a row as far as that goes; without those behind one that some lack.

    O(published frames).
    """
    tenants = {root.number: tenant for tenant, root in roots.by_tenant.items()}
    following, companions = _links(s)
    found: list[Page] = []
    waiting = [(frame, -1) for first in sorted(following) if first < 0 for frame in following[first]]
    while waiting:  # depth first
        frame, parent = waiting.pop()
        frames = (frame, *(companions.get((frame, group), -1) for group in range(1, len(s.groups))))
        if min(frames) >= 0:
            root = int(-2 - s.frames["parent"][frame])
            tenant = found[parent].tenant if parent >= 0 else tenants[root]
            found.append(Page(frames, parent, tenant, s.tokens[frame].copy()))
            waiting += [(child, len(found) - 1) for child in following.get(frame, [])]
    return found


def _links(s: State) -> tuple[dict[int, list[int]], dict[tuple[int, int], int]]:
    """The pages after each frame (or before all, root_parent), and the companion of each (frame, group)."""
    published = np.flatnonzero(s.frames["published"])
    following: dict[int, list[int]] = {}
    companions: dict[tuple[int, int], int] = {}
    columns = [s.frames[name][published].tolist() for name in ("published", "parent", "parent_generation")]
    for frame, number, parent, generation in zip(published.tolist(), *columns, strict=True):
        if parent < 0 or s.frames["generation"][parent] == generation:
            if number == 1:
                following.setdefault(parent, []).append(frame)
            else:
                companions[parent, number - 1] = frame
    return following, companions
