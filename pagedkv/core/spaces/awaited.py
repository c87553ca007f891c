"""The prompts of open spaces: which of them will publish more of a prompt than is known now.

    prompt of an open space    | committed, published | to be computed ............ |
    another prompt             | known                | awaited       | own tokens    equal in whole pages up to here

A caller that opens the other prompt at once computes the awaited pages a second time. This file only remembers what
`open` was given, until the space is released or a question finds its pages computed. It promises no page.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedkv.core.prefix.roots import Salts
from pagedkv.core.state import ALL_NAMED, I32, State


class Awaited(NamedTuple):
    """A longer prefix of a prompt than `open` finds now.

    asid:   the open space that is to compute it
    tokens: the length of the prefix, in whole pages; `open` finds it when the space has committed as many tokens
    known:  the tokens that `open` finds now
    """

    asid: int
    tokens: int
    known: int


class _Prompt(NamedTuple):
    generation: int
    tenant: bytes
    salts: Salts
    first_page: bytes
    ids: I32


class OpenPrompts:
    """The prompts that open spaces have to compute, by asid."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}

    def add(self, space: tuple[int, int], tenant: bytes, salts: Salts, ids: I32, block_size: int) -> None:
        """Remember the prompt of a space that was opened now. space: its asid and generation."""
        if len(ids) >= block_size:
            page = ids[:block_size].tobytes()
            self._prompts[space[0]] = _Prompt(space[1], tenant, salts, page, ids.copy())  # the caller may write there

    def remove(self, asid: int) -> None:
        """Forget the prompt of a space that was released."""
        self._prompts.pop(asid, None)

    def of(self, asid: int, generation: int) -> tuple[bytes, Salts, I32] | None:
        """Return the tenant, the salts and the ids of the prompt of an open space; None if it is not remembered."""
        its = self._prompts.get(asid)
        return None if its is None or its.generation != generation else (its.tenant, its.salts, its.ids)

    def longest(self, state: State, prompt: tuple[bytes, Salts], ids: I32, known: int) -> Awaited | None:
        """Return the longest prefix beyond `known` tokens that an open space is to publish; None if there is none.

        prompt: its tenant and its salts.
        O(spaces that compute a prompt), and O(length of the prompt) for those with the same first page.
        """
        size, spaces = state.tokens.shape[1], state.spaces.view(np.ndarray)
        page, best, computed = ids[:size].tobytes(), Awaited(-1, known, known), []
        for asid, its in self._prompts.items():
            space = spaces[asid]
            if space["generation"] != its.generation or space["length"] // size >= len(its.ids) // size:
                computed.append(asid)
            elif its.first_page == page and its.tenant == prompt[0]:
                common = _common(ids, its.ids, prompt[1], its.salts)
                common = min(common, len(ids) - 1) // size * size
                publishes = not space["no_publish"] and space["named"] == ALL_NAMED
                if publishes and common > max(best.tokens, space["length"]):
                    best = Awaited(asid, common, known)
        for asid in computed:
            self.remove(asid)
        return best if best.asid >= 0 else None


def _common(ids: I32, others: I32, salts: Salts, other_salts: Salts) -> int:
    """Return how many first tokens of two prompts of one tenant are equal, up to the first salt that differs."""
    count = min(len(ids), len(others))
    differ = np.flatnonzero(ids[:count] != others[:count])
    count = int(differ[0]) if len(differ) else count
    return min([count, *(position for position, _ in set(salts) ^ set(other_salts))])
