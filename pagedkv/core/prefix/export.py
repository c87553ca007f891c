"""Export: the findable pages of the prefix cache as rows, for code that stores them elsewhere. It changes nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.prefix.roots import Roots, Salts
from pagedkv.core.state import I32, State


class Page(NamedTuple):
    """A full page that prompts find in every layer group."""

    frames: tuple[int, ...]  # one for each group
    parent: int  # index of the page before in the same list, -1 for a first page
    tenant: bytes
    token_ids: I32  # int32 [S]
    salts: Salts = ()  # of this page, with their offsets in it


def findable_pages(s: State, roots: Roots) -> list[Page]:
    """Return every page that all groups have, each after its prefix. O(published frames).

    The walk is depth first, so a chain of pages is contiguous where it does not branch. A page that one group lacks is
    left out, with all pages behind it.
    """
    tenants = {root.number: tenant for tenant, root in roots.by_tenant.items()}
    salts = {root.number: root.own for root in roots.salted.values()}
    following, companions = _links(s)
    own_salts = st.page_salts(s)
    found: list[Page] = []
    waiting = [(frame, -1) for first in sorted(following) if first < 0 for frame in following[first]]
    while waiting:  # depth first
        frame, parent = waiting.pop()
        frames = (frame, *(companions.get((frame, group), -1) for group in range(1, len(s.groups))))
        if min(frames) >= 0:
            root = int(-2 - s.frames["parent"][frame])
            tenant = found[parent].tenant if parent >= 0 else tenants[root]
            own = salts.get(int(own_salts[frame]) - 1, ())
            found.append(Page(frames, parent, tenant, s.tokens[frame].copy(), own))
            waiting += [(child, len(found) - 1) for child in following.get(frame, [])]
    return found


def _links(s: State) -> tuple[dict[int, list[int]], dict[tuple[int, int], int]]:
    """Return ({frame or root_parent: the pages after it}, {(frame, group): companion})."""
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
