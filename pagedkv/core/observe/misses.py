"""Misses: the length of a prompt's cached prefix, and why the next page is not found. This file changes no number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pagedkv.core.prefix.roots import Root, Roots, Salts
from pagedkv.core.state import I32, State
from pagedkv.core.tables import page_tables


@dataclass(frozen=True)
class Miss:
    """The tokens of a prompt that whole published pages match, and the reason why no more match.

    "nothing missed"    every page that can be matched is matched; one token is always left to compute
    "below one page"    the prompt is too short: without its last token it does not fill a page
    "evicted"           the next page was evicted not long ago (recognised by a hash, wrong once in 2**30)
    "other root"        the next page is published for another tenant, or with other salts, only
    "never published"   the next page was never published, or was evicted long ago

    ready: tokens of them that have a recurrent state, or None for a manager without states: the rest is computed again.
    state_reason: why no more have one: "evicted" not long ago, "never kept", or "" if all have.
    """

    reason: str
    tokens_matched: int
    ready: int | None = field(default=None, repr=False)
    state_reason: str = field(default="", repr=False)

    def __str__(self) -> str:
        text = f"pages to {self.tokens_matched:,}: {self.reason}"
        if self.ready is not None and self.state_reason:
            text = f"pages to {self.tokens_matched:,}, state to {self.ready:,}: {self.state_reason}"
        return text


_StatesOf = Callable[[State, I32], tuple[int, str]]
"""A function of the frames of a prefix. It returns how many of its tokens have a recurrent state, and why no more."""


def explain(s: State, roots: Roots, prompt: tuple[bytes, Salts], ids: I32, states: _StatesOf | None = None) -> Miss:
    """Return how many tokens `open` would match, and why no more pages match. prompt: its tenant and its salts.

    O(pages), times the roots if a page is missing. states: see _StatesOf.
    """
    own, mine, _, evicted = _matched(s, roots, prompt, ids, len(ids))
    size, pages = s.tokens.shape[1], len(mine)
    ready = (None, "") if states is None else states(s, mine)
    whole = max(0, (len(ids) - 1) // size)
    found = np.empty(whole, np.int32)
    if whole == 0:
        reason = "below one page"
    elif pages == whole:
        reason = "nothing missed"
    elif evicted:
        reason = "evicted"
    elif any(
        page_tables.find_prefix(s, root.number, root.seed, ids, len(ids), found)[0] > pages
        for _, root in roots.every()
        if root != own and root.number < len(s.roots)
    ):
        reason = "other root"
    else:
        reason = "never published"
    return Miss(reason, pages * size, *ready)


def known_tokens(s: State, roots: Roots, prompt: tuple[bytes, Salts], ids: I32, most: int) -> int:
    """Return how many tokens, at most `most`, a space of the prompt `ids` can map. prompt: its tenant and its salts."""
    _, found, common, _ = _matched(s, roots, prompt, ids, most)
    return len(found) * s.tokens.shape[1] + common


def _matched(
    s: State, roots: Roots, prompt: tuple[bytes, Salts], ids: I32, most: int
) -> tuple[Root | None, I32, int, bool]:
    """Return the root of the known salts of `prompt`, and what find_prefix finds there: frames, part, evicted."""
    root, begin = roots.longest(*prompt, s)
    if root is None:
        return None, np.empty(0, np.int32), 0, False
    size = s.tokens.shape[1]
    ids = ids if begin < 0 else ids[: begin * size + 1]  # no page with the next salt is known
    found = np.empty(max(0, (len(ids) - 1) // size), np.int32)
    pages, _, common, evicted = page_tables.find_prefix(s, root.number, root.seed, ids, most, found)
    return root, found[:pages], int(common), bool(evicted)
