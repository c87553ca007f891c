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
from pagedkv.core.state import I32, I64, KEY, State, history_of
from pagedkv.errors import InvalidRequest

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
def _place(history: I32, state: int) -> tuple[int, int]:
    """Return the set of a prefix, and its tag, which is never 0: that stands for no prefix."""
    row = np.int64(np.uint64(state) >> _SHIFT) & (len(history) - 1)
    return row, np.int64(np.uint64(state) & _TAG_BITS) - 2**31 | 1  # type: ignore[return-value]


@inlined
def _way(history: I32, row: int, tag: int) -> int:
    """Return which of the prefixes of a set has this tag, or -1."""
    for way in range(history.shape[1]):
        if history[row, way, 0] == tag:
            return way
    return -1


@inner
def _note(history: I32, prefix: int, tokens: I32) -> None:
    state: int = np.uint64(prefix)  # type: ignore[assignment]
    for i in range(len(tokens)):
        prefetch(history, _place(history, state)[0])
        state = _mixed(state, tokens[i])
    prefetch(history, _place(history, state)[0])
    state = np.uint64(prefix)  # type: ignore[assignment]
    for i in range(len(tokens) + 1):
        row, tag = _place(history, state)
        last = _way(history, row, tag)
        for way in range(last if last >= 0 else history.shape[1] - 1, 0, -1):
            history[row, way, 0], history[row, way, 1] = history[row, way - 1, 0], history[row, way - 1, 1]
        history[row, 0, 0], history[row, 0, 1] = tag, -1
        if i < len(tokens):
            history[row, 0, 1] = tokens[i]
            state = _mixed(state, tokens[i])


@inner
def _nearest(history: I32, prefix: int, tokens: I32) -> tuple[int, int]:
    state: int = np.uint64(prefix)  # type: ignore[assignment]
    common, was = -1, np.int64(-1)
    for i in range(len(tokens) + 1):
        row, tag = _place(history, state)
        way = _way(history, row, tag)
        if way >= 0:  # prefixes between may have lost their places
            common, was = i, np.int64(history[row, way, 1])
        if i < len(tokens):
            state = _mixed(state, tokens[i])
    if 0 <= common < len(tokens) and was == tokens[common]:
        common, was = common + 1, np.int64(-1)
    return common, int(was)


@compiled
def _note_page(history: I32, prefix: int, tokens: I32) -> None:
    _note(history, prefix, tokens)


@compiled
def _compare_page(history: I32, prefix: int, tokens: I32) -> tuple[int, int]:
    return _nearest(history, prefix, tokens)


class TokenHistory:
    """The tokens that followed prefixes before, for an engine that finds and names its prefixes itself.

    num_tokens: how many are remembered, about, with 32 bytes each. prefix: a number of the engine's below 2**63.
    """

    def __init__(self, num_tokens: int) -> None:
        if not (type(num_tokens) is int and 0 < num_tokens <= 2**30):
            raise InvalidRequest(f"num_tokens is {num_tokens!r}; give an int from 1 to 2**30")
        self._history = history_of(num_tokens)

    def note(self, prefix: int, tokens: I32) -> None:
        """Note that a page with `tokens` (int32 [S]) came after a prefix."""
        _note_page(self._history, prefix, tokens)

    def nearest(self, prefix: int, tokens: I32) -> tuple[int, int]:
        """Compare a page with those that came after its prefix before.

        Returns: (tokens that the nearest of them has in common with it, or -1 if none is known; the token that followed
                 these the last time, or -1 if the whole page was known, or that token is forgotten)
        """
        return _compare_page(self._history, prefix, tokens)


@inner
def note(s: State, root: int, prefix_hash: int, tokens: I32) -> None:
    """Note that a page with `tokens` (int32 [S]) was published after a prefix. root: the first one of the tenant."""
    _note(s.history, np.int64(_begin(s, root, prefix_hash)), tokens)


@compiled
def compare(s: State, place: tuple[int, int], seed: int, salts: I64, token_ids: I32) -> tuple[int, int]:
    """Compare a page of a prompt with the pages that followed its prefix before, as `TokenHistory.nearest` does.

    place: the first root of the tenant, and the number of the page. seed, salts: the result of Roots.seeds.
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
    return _nearest(s.history, np.int64(_begin(s, root, prefix_hash)), token_ids[page * size : (page + 1) * size])
