"""History: which token followed a prefix the last time, so that a miss can be explained after its page was evicted.

    s.history [N, 4, 2]   sets of four prefixes, the newest first: a hash of each, and the token that followed it; -1
                          behind a full page

The tokens of a page are noted when it is published. A hash covers the prefix hash before the page and the tokens of the
page up to a point. It begins with the root of the tenant, so a tenant sees its own past only. A new prefix takes the
place of the oldest in its set. A wrong prefix of the same tenant has the same 32 bits once in 2**32.
"""

from __future__ import annotations

import numpy as np

from pagedkv.core.compiled import compiled, inlined, inner, prefetch
from pagedkv.core.prefix import index
from pagedkv.core.state import I32, I64, KEY, State

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_TAG_BITS = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


@inlined
def _mixed(state: int, token: int) -> int:
    """Return the hash of a prefix that is one token longer."""
    product = (np.uint64(state) ^ np.uint64(np.int64(token) & np.int64(0xFFFFFFFF))) * _MULTIPLIER
    return product ^ (product >> _SHIFT)  # type: ignore[return-value]


@inlined
def _begin(s: State, root: int, prefix_hash: int) -> int:
    """Return the hash of a prefix that ends at a page."""
    return _mixed(_mixed(np.uint64(s.reg[KEY]), root), prefix_hash)


@inlined
def _place(s: State, state: int) -> tuple[int, int]:
    """Return the set of a prefix, and its tag, which is never 0: that stands for no prefix."""
    row = np.int64(np.uint64(state) >> _SHIFT) & (len(s.history) - 1)
    return row, np.int64(np.uint64(state) & _TAG_BITS) - 2**31 | 1  # type: ignore[return-value]


@inlined
def _way(s: State, row: int, tag: int) -> int:
    """Return which of the prefixes of a set has this tag, or -1."""
    for way in range(s.history.shape[1]):
        if s.history[row, way, 0] == tag:
            return way
    return -1


@inner
def note(s: State, root: int, prefix_hash: int, tokens: I32) -> None:
    """Note that a page with `tokens` (int32 [S]) was published after a prefix. root: the first one of the tenant."""
    state = _begin(s, root, prefix_hash)
    for i in range(len(tokens)):
        prefetch(s.history, _place(s, state)[0])
        state = _mixed(state, tokens[i])
    prefetch(s.history, _place(s, state)[0])
    state = _begin(s, root, prefix_hash)
    for i in range(len(tokens) + 1):
        row, tag = _place(s, state)
        last = _way(s, row, tag)
        for way in range(last if last >= 0 else s.history.shape[1] - 1, 0, -1):
            s.history[row, way, 0], s.history[row, way, 1] = s.history[row, way - 1, 0], s.history[row, way - 1, 1]
        s.history[row, 0, 0], s.history[row, 0, 1] = tag, -1
        if i < len(tokens):
            s.history[row, 0, 1] = tokens[i]
            state = _mixed(state, tokens[i])


@compiled
def compare(s: State, place: tuple[int, int], seed: int, salts: I64, token_ids: I32) -> tuple[int, int]:
    """Compare a page of a prompt with the pages that followed its prefix before.

    place: the first root of the tenant, and the number of the page. seed, salts: the result of Roots.seeds.
    Returns: (tokens that the nearest of them has in common with it, or -1 if none is known; the token that followed
             these the last time, or -1 if the whole page was known)
    """
    root, page = place
    size, prefix_hash, salt = s.tokens.shape[1], np.int64(seed), 0
    for before in range(page + 1):
        if salt < len(salts) and salts[salt, 0] == before:
            prefix_hash ^= salts[salt, 1]
            salt += 1
        if before < page:
            tokens = token_ids[before * size : (before + 1) * size]
            prefix_hash = np.int64(index.prefix_hash_of(s.reg[KEY], prefix_hash, tokens))
    state, common, was = _begin(s, root, prefix_hash), -1, np.int64(-1)
    for i in range(size + 1):
        row, tag = _place(s, state)
        way = _way(s, row, tag)
        if way < 0:
            break
        common, was = i, np.int64(s.history[row, way, 1])
        if i < size:
            state = _mixed(state, token_ids[page * size + i])
    return common, int(was)
