"""AddressSpace: the handle of one sequence. It knows its manager, its row and the row's generation; everything else is in the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedkv.core.runs import runs_in
from pagedkv.core.state import I32

if TYPE_CHECKING:
    from pagedkv.core.manager import MemoryManager


class AddressSpace:
    """The page table and length of one sequence. Made by `MemoryManager.open` and `fork`; `len(a)` is its committed tokens.

    Every method raises StaleHandle once the space was released, even if its number has been given to another one since (I8).
    """

    __slots__ = ("asid", "generation", "manager")

    def __init__(self, manager: MemoryManager, asid: int, generation: int) -> None:
        self.manager, self.asid, self.generation = manager, asid, generation

    def __len__(self) -> int:
        return self.manager.length_of(self)

    def __bool__(self) -> bool:
        return True  # an empty sequence is still a sequence

    @property
    def pages(self) -> I32:
        """int32 [num_pages]: the frame of each page, -1 for a hole. A copy."""
        return self.manager.pages_of(self)

    def pages_in(self, group: int) -> I32:
        """int32 [num_pages]: the same for another layer group than the first; -1 also where no query will look again. A copy."""
        return self.manager.pages_of(self, group)

    @property
    def runs(self) -> I32:
        """int32 [R, 2]: first frame and length of each run of neighbouring frames, in order of pages: what one copy can move."""
        return runs_in(self.pages)

    def runs_in(self, group: int) -> I32:
        """int32 [R, 2]: the same for another layer group than the first."""
        return runs_in(self.pages_in(group))

    @property
    def token_ids(self) -> I32:
        """int32 [len]: the committed tokens, read back from the frames; -1 where a page was punched. A copy."""
        return self.manager.tokens_of(self)

    def fork(self) -> AddressSpace:
        """A new space that shares every frame of this one; the first write to a shared frame copies it. O(pages).

        Raises: PlanConflict while a plan of this space is outstanding
        """
        return self.manager.fork(self)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on, and give back the frames that held only those.

        Raises: InvalidRequest unless 0 <= length <= len; PlanConflict while a plan of this space is outstanding
        """
        self.manager.truncate(self, length)

    def punch(self, first: int, last: int) -> None:
        """Unmap the pages `first` .. `last` - 1, leaving holes that are never read (sliding windows).

        Raises: InvalidRequest unless these pages are full and committed; PlanConflict while a plan of this space is outstanding
        """
        self.manager.punch(self, first, last)

    def release(self) -> None:
        """Give back everything. While a plan is outstanding its frames stay until it is settled; the handle is stale at once.

        Raises: DoubleRelease the second time
        """
        self.manager.release(self)

    def __repr__(self) -> str:
        if self.manager.is_stale(self):
            return f"AddressSpace(asid={self.asid}, released)"
        return f"AddressSpace(asid={self.asid}, length={len(self)}, pages={self.pages.tolist()})"
