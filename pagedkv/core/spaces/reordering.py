"""Reordering: each sequence of a batch continues as any sequence of it, as beams of a search do. One compiled call.

spaces  a  b  c         index 2 0 2         result  c, a, a fork of c         b is released
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagedkv.core import state as st
from pagedkv.core.arguments import whole
from pagedkv.core.handles import AddressSpace
from pagedkv.core.recovery import RecoveryMixin
from pagedkv.core.tables import page_tables
from pagedkv.core.thread_guard import exclusive
from pagedkv.errors import InvalidRequest


class ReorderMixin(RecoveryMixin):
    """The method of MemoryManager that forks, moves and releases spaces at once."""

    if TYPE_CHECKING:

        def _asid(self, space: AddressSpace) -> int: ...
        def _settled_asid(self, space: AddressSpace, verb: str) -> int: ...
        def _require_spaces(self, batch: Sequence[AddressSpace]) -> Sequence[AddressSpace]: ...
        def _grow_tables(self, pages: int = 0, spaces: int = 1) -> None: ...

    @exclusive
    def reorder(
        self, spaces: Sequence[AddressSpace], index: Sequence[int] | npt.NDArray[np.integer]
    ) -> list[AddressSpace]:
        """Return a space for each entry of `index`: one that goes on where `spaces[index[i]]` is.

        The first use of a space is the space itself, its handle included. Each further use is a fork. A space that is
        not used is released. No frame is taken or copied: the first write to a shared page copies it, see fork.
        O(pages of the forks and of the released spaces).
        Raises: InvalidRequest for an index that names no space, or a space named twice in `spaces`; StaleHandle;
                PlanConflict while a plan of a space that would be forked is outstanding. Nothing was changed then.
        """
        self._report_lost()
        asids = [self._asid(space) for space in self._require_spaces(spaces)]
        if len(set(asids)) < len(asids):
            raise InvalidRequest(
                f"reorder names a space twice: {asids[:8]}; name each once, and use index to repeat it"
            )
        sources = [whole(at, "an entry of index", 0, max(1, len(asids))) for at in _listed(index)]
        if sources and not asids:
            raise InvalidRequest(f"index has {len(sources)} entries for no space; give the spaces that it names")
        used: set[int] = set()
        repeats: list[int] = []
        for place, at in enumerate(sources):
            repeats += [place] if at in used else []
            used.add(at)
        forked = np.array([self._settled_asid(spaces[sources[place]], "reorder") for place in repeats], np.int32)
        unused = np.array([asid for at, asid in enumerate(asids) if at not in used], np.int32)
        self._grow_tables(spaces=len(forked))
        page_tables.reorder_spaces(self.state, forked, unused)
        for asid in unused.tolist():  # forks were made first, so none has the number of a released space
            self._handles.pop(asid, None)
        result = [spaces[at] for at in sources]
        for place, child in zip(repeats, forked.tolist(), strict=True):
            result[place] = self._opened(child, int(self.state.spaces["generation"][child]))
        if self.state.reg[st.CLOSED_LONG]:
            st.return_memory(self.state)
        return result


def _listed(index: Sequence[int] | npt.NDArray[np.integer]) -> list[int]:
    try:
        return list(index)
    except TypeError:
        raise InvalidRequest(f"index is {index!r}; give a list of places in the list of spaces") from None
