"""The handles that MemoryManager gives out: AddressSpace (one sequence), Plan (one step), Pin (frames to be kept).

A handle names a row of the page table by number and generation, so a stale handle is refused at the call that uses it
(I8). An AddressSpace holds no figures of its own: it asks the manager that opened it, through the few methods of
`_Manager`. This file must not know tables, rules, or what happens to a handle that is dropped (recovery.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from pagedkv.core.pool.free_runs import runs_in
from pagedkv.core.state import HEAD, I32, I64, NUM_COPIES, OUTSTANDING, PARTLY, STATUS


class _Manager(Protocol):
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

    def release(self, space: AddressSpace) -> None:
        """Give back all frames."""

    def detach(self, space: AddressSpace) -> None:
        """Leave the space open when its handle is collected."""

    def holds(self, pin: Pin) -> bool:
        """Return True if the frames of `pin` are pinned."""

    def ready_of(self, space: AddressSpace) -> int:
        """Return the number of tokens that have a recurrent state."""

    def stops_of(self, space: AddressSpace, end: int) -> list[int]:
        """Return the positions up to `end` at which a recurrent state is kept."""


class AddressSpace:
    """The page table and length of one sequence, made by `MemoryManager.open` and `fork`.

    `len(space)` is the number of its committed tokens. Every method raises StaleHandle once the space was released,
    even if its number belongs to another space by then (I8).
    """

    __slots__ = ("__weakref__", "asid", "generation", "manager")
    manager: _Manager
    asid: int
    generation: int

    def __init__(self, manager: _Manager, asid: int, generation: int) -> None:
        self.manager, self.asid, self.generation = manager, asid, generation

    def __len__(self) -> int:
        return self.manager.length_of(self)

    def __bool__(self) -> bool:
        return True  # an empty sequence is still a sequence

    @property
    def ready(self) -> int:
        """int: tokens after which there is a recurrent state; the next step computes from here on.

        Without states (`MemoryManager(states=...)`) it is len(space). Tokens from `ready` to len(space) have KV, and
        are computed again for their state only.
        """
        return self.manager.ready_of(self)

    def stops(self, end: int) -> list[int]:
        """Return the positions in ready + 1 .. `end` at which a recurrent state is kept, `end` itself included.

        A host whose kernels cannot save a state inside a step computes up to one of them at a time.
        """
        return self.manager.stops_of(self, end)

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
        """int32 [len]: the committed tokens, as recorded beside the frames; -1 in pages behind a window. A copy."""
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

    @property
    def is_stale(self) -> bool:
        """True if the space was released."""
        return self.manager.is_stale(self)

    def release(self) -> None:
        """Give back all frames. The handle is stale at once.

        Frames of an outstanding plan stay until the plan is settled.
        Raises: DoubleRelease the second time
        """
        self.manager.release(self)

    def detach(self) -> int:
        """Return the asid, for an engine that keeps integers: the space stays open when this handle is collected.

        The engine releases it by a handle later: `manager.attach(asid)` returns one.
        Raises: StaleHandle
        """
        self.manager.detach(self)
        return self.asid

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


class Step:
    """The arrays of one step, as the compiled functions of tables/steps.py fill and settle them.

    Shapes: rows int32 [B]: the asid of each sequence
            counts int64 [B]: new tokens of each sequence
            longs int64: status, number of copies | slots [G, T] | positions [T] | starts [B]
            ints int32:  cu_seqlens_q [B + 1] | seq_lens [B] | scratch [B, G] | splits [C, 4], in a space for [B * G, 4]
    All figures below are views of these arrays, which are made before the step is planned: boxing results of compiled
    functions would run Python code, and a signal could lose them.
    """

    __slots__ = ("__weakref__", "counts", "ints", "longs", "num_groups", "num_tokens", "rows", "states")

    def __init__(
        self, rows: I32, counts: I64, num_tokens: int, num_groups: int, arrays: tuple[I64, I32] | None = None
    ) -> None:
        """arrays: longs and ints of a step that was made before."""
        batch = len(rows)
        self.rows: I32 = rows
        self.counts: I64 = counts
        self.num_tokens: int = num_tokens
        """T: new tokens of the step."""
        self.num_groups: int = num_groups
        longs, ints = arrays or (
            np.zeros(HEAD + (num_groups + 1) * num_tokens + batch, np.int64),
            np.zeros(2 * batch + 1 + 5 * batch * num_groups, np.int32),
        )
        self.longs: I64 = longs
        self.ints: I32 = ints
        self.states: StateStep | None = None
        """The recurrent states that the step reads and writes; None unless the manager has them."""

    @property
    def settled(self) -> str:
        """ "", "committed" or "aborted"."""
        return _SETTLED[self.longs[STATUS]]

    @property
    def is_outstanding(self) -> bool:
        """Whether frames are mapped for the step, and it is neither committed to its end nor aborted."""
        return int(self.longs[STATUS]) in (OUTSTANDING, PARTLY)

    @property
    def remaining(self) -> I64:
        """int64 [B]: planned tokens of each sequence that no commit(keep_planned=True) has kept yet. A copy."""
        return self.seq_lens - self.starts

    @property
    def group_slots(self) -> I64:
        """int64 [G, T]: the slots of each layer group; row 0 is `slots`."""
        end = HEAD + self.num_groups * self.num_tokens
        return self.longs[HEAD:end].reshape(self.num_groups, self.num_tokens)

    @property
    def slots(self) -> I64:
        """int64 [T]: frame * block_size + offset of each new token, sequence by sequence."""
        return self.longs[HEAD : HEAD + self.num_tokens]

    @property
    def positions(self) -> I64:
        """int64 [T]: the position of each new token in its sequence."""
        first = HEAD + self.num_groups * self.num_tokens
        return self.longs[first : first + self.num_tokens]

    @property
    def starts(self) -> I64:
        """int64 [B]: KV length before the step, plus the tokens that commit(keep_planned=True) has kept since."""
        return self.longs[len(self.longs) - len(self.rows) :]

    @property
    def cu_seqlens_q(self) -> I32:
        """int32 [B + 1]: the first new token of each sequence."""
        return self.ints[: len(self.rows) + 1]

    @property
    def seq_lens(self) -> I32:
        """int32 [B]: KV length after the step."""
        return self.ints[len(self.rows) + 1 : 2 * len(self.rows) + 1]

    @property
    def num_copies(self) -> int:
        """C: copies of shared tail pages; 0 once a part of the step is committed, as they were made then."""
        return int(self.longs[NUM_COPIES])

    @property
    def splits(self) -> I32:
        """int32 [C, 4]: source, target and row of each copy; 1 if the prefix of the source is pinned too, else 0."""
        first = (2 + self.num_groups) * len(self.rows) + 1
        return self.ints[first : first + 4 * self.num_copies].reshape(-1, 4)

    @property
    def copies(self) -> I32:
        """int32 [C, 2]: source and target frames, to be copied before any KV is written.

        The targets are distinct, and none of them is a source.
        """
        return self.splits[:, :2]


_SETTLED: Final = ("", "", "committed", "aborted", "")


class StateStep:
    """The recurrent states of a step: the frames that it reads and writes, each of them written once.

    A kernel takes the state of sequence i from frame state_in[i], computes the step's tokens, and writes the state
    after the last of them to state_out[i]. On the way it writes the state after save_offsets[j] tokens of the sequence
    to save_frames[j], for j in save_indptr[i] .. save_indptr[i + 1] - 1. No step writes a frame of its state_in.

    Shapes: state_in int32 [B], -1: zeros               state_out int32 [B], -1: the sequence has no token in the step
            save_indptr int32 [B + 1]                   save_offsets, save_frames int32 [C], ascending in each sequence
    pages:  the step of the page tables, with the tokens whose KV is new. step: the caller's step, with all tokens.
    """

    __slots__ = ("numbers", "pages", "step")

    def __init__(self, pages: Step, step: Step, num_saves: int) -> None:
        self.pages: Step = pages
        self.step: Step = Step(step.rows, step.counts, step.num_tokens, step.num_groups, (step.longs, step.ints))
        self.numbers: I32 = np.zeros(3 * len(pages.rows) + 1 + 2 * num_saves, np.int32)

    @property
    def state_in(self) -> I32:
        """int32 [B]: the frame with the state before the step, -1 for zeros."""
        return self.numbers[: len(self.pages.rows)]

    @property
    def state_out(self) -> I32:
        """int32 [B]: the frame for the state after the step, -1 for a sequence without a token."""
        return self.numbers[len(self.pages.rows) : 2 * len(self.pages.rows)]

    @property
    def save_indptr(self) -> I32:
        """int32 [B + 1]: the first save of each sequence."""
        return self.numbers[2 * len(self.pages.rows) : 3 * len(self.pages.rows) + 1]

    @property
    def save_offsets(self) -> I32:
        """int32 [C]: tokens of the sequence in this step after which its state is saved."""
        first = 3 * len(self.pages.rows) + 1
        return self.numbers[first : first + int(self.save_indptr[-1])]

    @property
    def save_frames(self) -> I32:
        """int32 [C]: the frame for each saved state."""
        first = (3 * len(self.pages.rows) + 1 + len(self.numbers)) // 2
        return self.numbers[first : first + int(self.save_indptr[-1])]


class Plan(Step):
    """The slots of one step. The frames are mapped already; the caller copies, then writes KV, then commits.

    block_table: int32 [A, P], the live page tables, not a copy; read-only, as the manager alone writes there.
    live_table:  the same, writable, for libraries that take no read-only array (torch.from_numpy). Never write there.
    manager:     the MemoryManager that made the plan. No other one may settle it.
    A plan that is dropped before it is settled keeps its frames mapped. A ResourceWarning says so, and
    `MemoryManager.recover` aborts it.
    """

    __slots__ = ("live_table", "manager", "number")
    live_table: I32
    number: int

    def __init__(self, manager: _Manager, step: Step) -> None:
        super().__init__(step.rows, step.counts, step.num_tokens, step.num_groups, (step.longs, step.ints))
        self.manager: _Manager = manager

    @property
    def block_table(self) -> I32:
        """int32 [A, P]: the live page tables, read-only."""
        table = self.live_table.view()
        table.flags.writeable = False
        return table

    def group(self, number: int) -> GroupPlan:
        """Return the rows, slots and copies of one layer group; positions and lengths are equal for all groups."""
        splits = self.splits
        mine = (splits[:, 2] - number) % self.num_groups == 0
        return GroupPlan(self.rows + np.int32(number), self.group_slots[number], splits[mine, :2])

    def __repr__(self) -> str:
        sizes = f"{len(self.rows)} sequences, {self.num_tokens} new tokens, {self.num_copies} copies"
        return f"Plan({sizes}, {self.settled or 'outstanding'})"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Pin:
    """The handle of pinned frames, made by `MemoryManager.pin` and given back to `unpin`.

    A row of the page table maps the frames, so none of them is evicted, moved or written (I7). `owner` and `deadline`
    are the caller's: a transfer that does not end is found by them. A pin that is dropped before unpin() keeps its
    frames pinned: a ResourceWarning says so, and `MemoryManager.recover` unpins them.
    """

    asid: int
    generation: int
    num_frames: int
    owner: str
    deadline: float | None
