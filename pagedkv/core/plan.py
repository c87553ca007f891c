"""Plan: what one step will write, and where. Made by `MemoryManager.plan`, given back to `commit` or `abort`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pagedkv.core.state import I32, I64


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
