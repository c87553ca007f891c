"""The handles that MemoryManager gives out: AddressSpace (one sequence), Plan (one step), Pin (frames to be kept).

A handle names rows of the page table by number and generation, so a stale one is refused at the call that uses it (I8). A handle holds no
figures of its own: AddressSpace asks the manager that opened it, through the few methods of `Manager`. This file knows no table and no rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pagedkv.core.pool.free_runs import runs_in
from pagedkv.core.state import I32, I64


class Manager(Protocol):
    """The methods of MemoryManager that an AddressSpace calls."""

    def is_stale(self, space: AddressSpace) -> bool:
        """Return True if the space was released."""

    def length_of(self, space: AddressSpace) -> int:
        """Return the number of committed tokens."""

    def pages_of(self, space: AddressSpace, group: int = 0) -> I32:
        """int32 [num_pages]: the frame of each page in a layer group."""

    def tokens_of(self, space: AddressSpace) -> I32:
        """int32 [len]: the committed tokens."""

    def fork(self, space: AddressSpace) -> AddressSpace:
        """Open a space that shares every frame of `space`."""

    def truncate(self, space: AddressSpace, length: int) -> None:
        """Drop the tokens from `length` on."""

    def punch(self, space: AddressSpace, first: int, last: int) -> None:
        """Unmap the pages `first` .. `last` - 1."""

    def release(self, space: AddressSpace) -> None:
        """Give back everything."""


class AddressSpace:
    """The page table and length of one sequence. Made by `MemoryManager.open` and `fork`; `len(a)` is its committed tokens.

    Every method raises StaleHandle once the space was released, even if its number has been given to another one since (I8).
    """

    __slots__ = ("asid", "generation", "manager")
    manager: Manager
    asid: int
    generation: int

    def __init__(self, manager: Manager, asid: int, generation: int) -> None:
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


@dataclass(frozen=True, eq=False, slots=True)
class GroupPlan:
    """The part of a plan that differs between layer groups.

    Shapes: rows int32 [B] of the page table, slots int64 [T], copies int32 [C, 2] (`Plan.copies` are those of all groups)
    """

    rows: I32
    slots: I64
    copies: I32


@dataclass(eq=False, slots=True)
class Plan:
    """The slots of a whole batch. Frames are already mapped; the caller copies, then writes KV, then commits.

    Shapes: slots int64 [T] = frame * block_size + offset, positions int64 [T]: of the new tokens, sequence by sequence
            copies int32 [C, 2]: source and target frames, to be copied before any KV is written; targets are distinct and no source
            seq_lens int32 [B]: KV length after the step        cu_seqlens_q int32 [B + 1]: where each sequence's new tokens begin
            rows int32 [B]: whose (asids)                       block_table int32 [A, P]: the live page tables themselves, not a copy
    """

    slots: I64
    positions: I64
    seq_lens: I32
    cu_seqlens_q: I32
    rows: I32
    block_table: I32
    starts: I64
    """int64 [B]: KV length before the step."""
    counts: I64
    """int64 [B]: new tokens of each sequence."""
    group_slots: I64 = field(repr=False)
    """int64 [G, T]: the slots of each layer group; those of the first are `slots`."""
    splits: I32 = field(repr=False)
    """int32 [C, 4]: source, target and row of each copy, and 1 if the prefix of the source is pinned with it."""
    manager: object = field(repr=False)
    """The MemoryManager that made it, and alone may settle it."""
    settled: str = ""
    """"", "committed" or "aborted"."""

    @property
    def copies(self) -> I32:
        """int32 [C, 2]: source and target frames."""
        return self.splits[:, :2]

    def group(self, number: int) -> GroupPlan:
        """What the layers of one group read and write; positions and lengths are those of all."""
        mine = (self.splits[:, 2] - number) % len(self.group_slots) == 0
        return GroupPlan(self.rows + np.int32(number), self.group_slots[number], self.splits[mine, :2])

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class Pin:
    """The handle of frames that a caller asked to keep: a row of its own maps them, so none is evicted, moved or written (I7).

    Made by `MemoryManager.pin`, given back to `unpin`.
    `owner` and `deadline` are the caller's words, for `overdue`: a transfer that never ends is found by name, and not by a full pool.
    """

    asid: int
    generation: int
    num_frames: int
    owner: str
    deadline: float | None
