"""The handles that MemoryManager gives out: AddressSpace (one sequence), Plan (one step), Pin (frames to be kept).

A handle names a row of the page table by number and generation, so a stale handle is refused at the call that uses it
(I8). An AddressSpace holds no figures of its own: it asks the manager that opened it, through the few methods of
`Manager`. This file must not know tables or rules.
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
        """Give back all frames."""


class AddressSpace:
    """The page table and length of one sequence, made by `MemoryManager.open` and `fork`.

    `len(space)` is the number of its committed tokens. Every method raises StaleHandle once the space was released,
    even if its number belongs to another space by then (I8).
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
        """int32 [num_pages]: the frame of each page in a layer group; -1 also for a page behind the window. A copy."""
        return self.manager.pages_of(self, group)

    @property
    def runs(self) -> I32:
        """int32 [R, 2]: first frame and length of each run of neighbouring frames, by pages. One copy moves a run."""
        return runs_in(self.pages)

    def runs_in(self, group: int) -> I32:
        """int32 [R, 2]: the `runs` of a layer group."""
        return runs_in(self.pages_in(group))

    @property
    def token_ids(self) -> I32:
        """int32 [len]: the committed tokens, as recorded beside the frames; -1 where a page was punched. A copy."""
        return self.manager.tokens_of(self)

    def fork(self) -> AddressSpace:
        """Open a space that shares every frame of this one. The first write to a shared frame copies it. O(pages).

        Raises: PlanConflict while a plan of this space is outstanding
        """
        return self.manager.fork(self)

    def truncate(self, length: int) -> None:
        """Drop the tokens from `length` on, and give back the frames that hold no other token.

        Raises: InvalidRequest unless 0 <= length <= len; PlanConflict while a plan of this space is outstanding
        """
        self.manager.truncate(self, length)

    def punch(self, first: int, last: int) -> None:
        """Unmap the pages `first` .. `last` - 1, leaving holes that are never read (sliding windows).

        Raises: InvalidRequest unless these pages are full and committed;
                PlanConflict while a plan of this space is outstanding
        """
        self.manager.punch(self, first, last)

    def release(self) -> None:
        """Give back all frames. The handle is stale at once.

        Frames of an outstanding plan stay until the plan is settled.
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

    Shapes: rows int32 [B]: the row of each sequence in the page table        slots int64 [T]
            copies int32 [C, 2]: the copies of this group; `Plan.copies` has those of all groups
    """

    rows: I32
    slots: I64
    copies: I32


@dataclass(eq=False, slots=True)
class Plan:
    """The slots of one step. The frames are mapped already; the caller copies, then writes KV, then commits.

    Shapes: slots int64 [T]: frame * block_size + offset of each new token, sequence by sequence
            positions int64 [T]: the position of each new token in its sequence
            copies int32 [C, 2]: source and target frames, to be copied before any KV is written; the targets are
                distinct, and none of them is a source
            seq_lens int32 [B]: KV length after the step
            cu_seqlens_q int32 [B + 1]: the first new token of each sequence
            rows int32 [B]: the asid of each sequence
            block_table int32 [A, P]: the live page tables themselves, not a copy
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
    """int64 [G, T]: the slots of each layer group; row 0 is `slots`."""
    splits: I32 = field(repr=False)
    """int32 [C, 4]: source, target and row of each copy; 1 if the prefix of the source is pinned as well, else 0."""
    manager: object = field(repr=False)
    """The MemoryManager that made the plan. No other one may settle it."""
    settled: str = ""
    """"", "committed" or "aborted"."""

    @property
    def copies(self) -> I32:
        """int32 [C, 2]: source and target frames."""
        return self.splits[:, :2]

    def group(self, number: int) -> GroupPlan:
        """Return the rows, slots and copies of one layer group; positions and lengths are equal for all groups."""
        mine = (self.splits[:, 2] - number) % len(self.group_slots) == 0
        return GroupPlan(self.rows + np.int32(number), self.group_slots[number], self.splits[mine, :2])

    @property
    def num_tokens(self) -> int:
        """T: new tokens of the step."""
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class Pin:
    """The handle of pinned frames, made by `MemoryManager.pin` and given back to `unpin`.

    A row of the page table maps the frames, so none of them is evicted, moved or written (I7). `owner` and `deadline`
    come from the caller and serve `overdue`: a transfer that never ends is found by its name, before the pool is full.
    """

    asid: int
    generation: int
    num_frames: int
    owner: str
    deadline: float | None
