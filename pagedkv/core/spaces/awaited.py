"""The prompts of open spaces: which of them will publish more of a prompt than is known now.

    prompt of an open space    | committed, published | to be computed ............ |
    another prompt             | known                | awaited       | own tokens    equal in whole pages up to here

A caller that opens the other prompt at once computes the awaited pages a second time. This file only remembers what
`open` was given: it promises no page, changes no space, and may forget a prompt. A prompt that has no full page left to
compute is never kept. Memory: at most twice the prompts that open spaces have still to compute, and 64 more.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from pagedkv.core.prefix.roots import Salts
from pagedkv.core.state import ALL_NAMED, I32, State

_LEAST: Final = 64


class Awaited(NamedTuple):
    """A longer prefix of a prompt than `open` finds now.

    asid:   the open space that is to compute it
    tokens: the length of the prefix, in whole pages; `open` finds it when the space has committed so many tokens
    """

    asid: int
    tokens: int


class _Prompt(NamedTuple):
    asid: int
    generation: int
    salts: Salts
    ids: I32


class OpenPrompts:
    """The prompts that open spaces have to compute, by tenant and first page."""

    def __init__(self) -> None:
        self._by_page: dict[tuple[bytes, bytes], list[_Prompt]] = {}
        self._count, self._sweep_at = 0, _LEAST

    def add(self, state: State, asid: int, prompt: tuple[bytes, Salts], ids: I32) -> None:
        """Remember the prompt of a space that was opened now. prompt: its tenant and its salts."""
        size = state.tokens.shape[1]
        if len(ids) // size <= int(state.spaces["length"][asid]) // size:
            return
        if self._count >= self._sweep_at:
            self._sweep(state)
        entry = _Prompt(asid, int(state.spaces["generation"][asid]), prompt[1], ids.copy())
        self._by_page.setdefault((prompt[0], ids[:size].tobytes()), []).append(entry)
        self._count += 1

    def longest(self, state: State, prompt: tuple[bytes, Salts], ids: I32, known: int) -> Awaited | None:
        """Return the longest prefix beyond `known` tokens that an open space is to publish; None if there is none.

        O(length of the prompt), times the open spaces that compute prompts with the same first page.
        """
        size = state.tokens.shape[1]
        best = Awaited(-1, known)
        for entry in self._by_page.get((prompt[0], ids[:size].tobytes()), ()):
            if _is_computed(state, entry):
                common = _common(ids, entry.ids, prompt[1], entry.salts)
                common = min(common, len(ids) - 1) // size * size
                if common > max(best.tokens, int(state.spaces["length"][entry.asid])):
                    best = Awaited(entry.asid, common)
        return best if best.asid >= 0 else None

    def _sweep(self, state: State) -> None:
        """Forget the prompts that no space computes any more."""
        kept = {page: [e for e in entries if _is_computed(state, e)] for page, entries in self._by_page.items()}
        self._by_page = {page: entries for page, entries in kept.items() if entries}
        self._count = sum(map(len, self._by_page.values()))
        self._sweep_at = 2 * self._count + _LEAST


def _is_computed(state: State, entry: _Prompt) -> bool:
    """Return whether the space of `entry` is open, has pages of its prompt to compute, and will publish them."""
    space, size = state.spaces.view(np.ndarray)[entry.asid], state.tokens.shape[1]
    return bool(
        space["generation"] == entry.generation
        and len(entry.ids) // size > space["length"] // size
        and not space["no_publish"]
        and space["named"] == ALL_NAMED
    )


def _common(ids: I32, others: I32, salts: Salts, other_salts: Salts) -> int:
    """Return how many first tokens of two prompts of one tenant are equal, up to the first salt that differs."""
    count = min(len(ids), len(others))
    differ = np.flatnonzero(ids[:count] != others[:count])
    count = int(differ[0]) if len(differ) else count
    return min([count, *(position for position, _ in set(salts) ^ set(other_salts))])
