"""Misses: why a prompt is not found. It only looks; nothing is mapped, counted or remembered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from pagedkv.core.prefix.roots import Roots
from pagedkv.core.state import I32, State
from pagedkv.core.tables import page_tables

OTHER_ROOT: Final = "other root"


@dataclass(frozen=True)
class Miss:
    """`tokens_matched` of whole pages are known, and `reason` says why no more.

    "nothing missed"    all that can be matched is: one token is always left to compute
    "below one page"    fewer tokens than a page are asked for beside that one
    "evicted"           the next page was there, and was given up not long ago (told by a hash: an error has odds of 1 in 2**30)
    "other root"        the next page is known to another tenant only
    "never published"   or it was evicted long ago
    """

    reason: str
    tokens_matched: int


def explain(s: State, roots: Roots, tenant: bytes, ids: I32) -> Miss:
    """What `open` would find, and why not more. O(pages), times the tenants if something is missing."""
    size = s.tokens.shape[1]
    whole = max(0, (len(ids) - 1) // size)
    found = np.empty(whole, np.int32)
    pages, evicted = 0, False
    if tenant in roots.by_tenant:
        pages, evicted = page_tables.match_prefix(s, *roots.by_tenant[tenant], ids, found)
    if whole == 0:
        reason = "below one page"
    elif pages == whole:
        reason = "nothing missed"
    elif evicted:
        reason = "evicted"
    elif any(
        page_tables.match_prefix(s, *root, ids, found)[0] > pages
        for name, root in roots.by_tenant.items()
        if name != tenant
    ):
        reason = OTHER_ROOT
    else:
        reason = "never published"
    return Miss(reason, pages * size)
