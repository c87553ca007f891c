"""Misses: the length of a prompt's cached prefix, and why the next page is not found. This file changes no number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pagedkv.core.prefix import history
from pagedkv.core.prefix.roots import Root, Roots, Salts
from pagedkv.core.state import I32, State
from pagedkv.core.tables import page_tables


@dataclass(frozen=True)
class Miss:
    """The tokens of a prompt that whole published pages match, and the reason why no more match.

    "nothing missed"    every page that can be matched is matched; one token is always left to compute
    "below one page"    the prompt is too short: without its last token it does not fill a page
    "evicted"           the next page was known, and is not in the pool any more
    "differs"           prompts are known that begin alike: token `position` of the nearest one is `was`, and `now` in
                        this one. Only a manager with `history=` knows it
    "other salt"        the next page is published for this tenant with other salts only: another adapter or image
    "other root"        the next page is published for another tenant only; a private answer never says so
    "never published"   the next page was never published, or was evicted long ago

    position: the first token that does not match. Without a history an evicted page is recognised by a hash, wrong once
    in 2**30.
    ready: tokens of them that have a recurrent state, or None for a manager without states: the rest is computed again.
    state_reason: why no more have one: "evicted" not long ago, "never kept", or "" if all have.
    """

    reason: str
    tokens_matched: int
    ready: int | None = field(default=None, repr=False)
    state_reason: str = field(default="", repr=False)
    position: int = field(default=0, repr=False, compare=False)
    was: int | None = field(default=None, repr=False)
    now: int | None = field(default=None, repr=False)

    def __str__(self) -> str:
        text = f"pages to {self.tokens_matched:,}: {self.reason}"
        if self.was is not None:
            text = f"pages to {self.tokens_matched:,}: token {self.position:,} was {self.was} and is {self.now}"
        if self.ready is not None and self.state_reason:
            text = f"pages to {self.tokens_matched:,}, state to {self.ready:,}: {self.state_reason}"
        return text


class View(NamedTuple):
    """The pages that an explanation may use. private: only those of the tenant.

    states: a function of the frames of a prefix. It returns how many of its tokens have a recurrent state, and why no
            more; None for a manager without states.
    """

    states: Callable[[State, I32], tuple[int, str]] | None = None
    private: bool = False


def explain(s: State, roots: Roots, prompt: tuple[bytes, Salts], ids: I32, view: View) -> Miss:
    """Return how many tokens `open` would match, and why no more pages match. prompt: its tenant and its salts.

    O(pages), times the roots that may be looked at if a page is missing.
    """
    own, mine, _, evicted = _matched(s, roots, prompt, ids, len(ids))
    size, pages = s.tokens.shape[1], len(mine)
    ready, state_reason = (None, "") if view.states is None else view.states(s, mine)
    whole, at = max(0, (len(ids) - 1) // size), pages * size

    def missed(reason: str, position: int = at, was: int | None = None, now: int | None = None) -> Miss:
        return Miss(reason, at, ready, state_reason, position, was, now)

    if whole == 0:
        return missed("below one page")
    if pages == whole:
        return missed("nothing missed")
    common, was = -1, -1
    first = roots.by_tenant.get(prompt[0])
    if len(s.history) and first is not None:
        common, was = history.compare(s, (first.number, pages), *roots.seeds(*prompt, s), ids)
    if evicted or common == size:
        return missed("evicted")
    found = np.empty(whole, np.int32)
    others = {
        tenant
        for tenant, root in (roots.of_tenant(prompt[0]) if view.private else roots.every())
        if root != own and root.number < len(s.roots)
        if page_tables.find_prefix(s, root.number, root.seed, ids, len(ids), found)[0] > pages
    }
    if others:
        return missed("other salt" if prompt[0] in others else "other root")
    if at + common > 0 and was >= 0:
        return missed("differs", at + common, was, int(ids[at + common]))
    return missed("never published")


def known_tokens(s: State, roots: Roots, prompt: tuple[bytes, Salts], ids: I32, most: int) -> int:
    """Return how many tokens, at most `most`, a space of the prompt `ids` can map. prompt: its tenant and its salts."""
    _, found, common, _ = _matched(s, roots, prompt, ids, most)
    return len(found) * s.tokens.shape[1] + common


def _matched(
    s: State, roots: Roots, prompt: tuple[bytes, Salts], ids: I32, most: int
) -> tuple[Root | None, I32, int, bool]:
    """Return the root of the known salts of `prompt`, and what find_prefix finds there: frames, part, evicted.

    The root is None if the next page has salts that no root has.
    """
    root, begin = roots.longest(*prompt, s)
    if root is None:
        return None, np.empty(0, np.int32), 0, False
    size = s.tokens.shape[1]
    ids = ids if begin < 0 else ids[: begin * size + 1]  # no page with the next salt is known
    found = np.empty(max(0, (len(ids) - 1) // size), np.int32)
    pages, _, common, evicted = page_tables.find_prefix(s, root.number, root.seed, ids, most, found)
    return None if pages == begin else root, found[:pages], int(common), bool(evicted)
