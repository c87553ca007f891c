"""Opening: the prompts of a batch, and the column at which a rectangle of them is known.

The identity of a prompt is its tenant, its tokens and its salts (prefix/roots.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pagedkv.core.handles import AddressSpace
from pagedkv.core.observe.misses import known_tokens
from pagedkv.core.prefix.roots import Roots, Salts
from pagedkv.core.state import I32, State
from pagedkv.errors import InvalidRequest

Salt = bytes | Mapping[int, bytes]


class Opened(NamedTuple):
    """The result of `open_batch`.

    spaces: one for each row, in order.
    skip:   how many leading columns need no computation in any row: padding, or tokens that are known. With `pads`,
            each space ends at that column. Without, a row may know more tokens: `len(space)` says how many. With
            recurrent states, tokens count that are ready, and a space may be longer.
    """

    spaces: list[AddressSpace]
    skip: int


def listed(value: Any, what: str) -> list[Any]:
    """Return the entries of a list, an array, or a tensor of the host."""
    if not isinstance(value, str | bytes | Mapping) and isinstance(value, Sequence):
        return list(value)
    try:
        return list(np.asarray(value if hasattr(value, "__array__") else None))
    except (TypeError, ValueError):  # no array, one without dims, or a tensor of another device
        raise InvalidRequest(f"{what} is {value!r:.60}; give a list") from None


def for_each(value: Any, count: int, what: str) -> list[Any]:
    """Return a list of `count` entries: `value` itself, or its value for every row."""
    if isinstance(value, bytes | Mapping):
        return [value] * count
    entries = listed(value, what)
    if len(entries) != count:
        raise InvalidRequest(f"{what} has {len(entries)} entries for {count} rows; give one for each row")
    return entries


def first_end(lengths: list[int], pads: list[int]) -> int:
    """Return the column at which the first of the rows ends; 0 without rows."""
    return min((pad + length for pad, length in zip(pads, lengths, strict=True)), default=0)


def up_to_one_column(s: State, roots: Roots, prompts: list[tuple[bytes, Salts, I32]], pads: list[int]) -> list[int]:
    """Return how many tokens of each prompt lie before the last column up to which all of them are known.

    A window may lack a page before that column which it does not see from a later one, so the search is repeated.
    """
    most = [len(ids) for _, _, ids in prompts]
    while True:
        known = [
            known_tokens(s, roots, (tenant, salts), ids, length)
            for (tenant, salts, ids), length in zip(prompts, most, strict=True)
        ]
        column = first_end(known, pads)
        most = [max(0, column - pad) for pad in pads]
        if most == known:
            return most
