"""Reordering: each sequence of a batch continues as any sequence of it, as beams of a search do.

spaces  a  b  c         index 2 0 2         result  c, a, a fork of c         b is released
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagedkv.core.arguments import whole
from pagedkv.core.state import I32
from pagedkv.errors import InvalidRequest


def continuations(asids: list[int], index: Sequence[int] | npt.NDArray[np.integer]) -> tuple[list[int], list[int], I32]:
    """Return (the entries of `index`, which of them need a fork, int32 asids that no entry names).

    Raises: InvalidRequest for an index that names no space, or a space named twice in `asids`
    """
    if len(set(asids)) < len(asids):
        raise InvalidRequest(f"reorder names a space twice: {asids[:8]}; name each once, and use index to repeat it")
    try:
        places = list(index)
    except TypeError:
        raise InvalidRequest(f"index is {index!r}; give a list of places in the list of spaces") from None
    sources = [whole(at, "an entry of index", 0, max(1, len(asids))) for at in places]
    if sources and not asids:
        raise InvalidRequest(f"index has {len(sources)} entries for no space; give the spaces that it names")
    used: set[int] = set()
    repeats: list[int] = []
    for place, at in enumerate(sources):
        repeats += [place] if at in used else []
        used.add(at)
    return sources, repeats, np.array([asid for at, asid in enumerate(asids) if at not in used], np.int32)
