"""State: every integer the memory manager knows, in a handful of arrays.

There is no Python object per frame or page. `frames` holds one record of 36 bytes per frame, so what one operation needs of a frame lies in
one cache line; with the free stack and the index it is at most 48 bytes a frame beside the token ids. `spaces` holds one record per row of
the page table, and `reg` the scalars. Few arrays rather than many is a matter of cost: the compiled functions hand the whole `State` to one
another, which costs 14 ns a call with nine arrays and cost 290 with thirty. `state.frames["refs"]` is a plain strided numpy view.
They are recarrays, so that the same functions run uncompiled too (NUMBA_DISABLE_JIT=1): their own slow twin.

This file knows layout and growth; it must not know any rule about what the numbers mean.
"""

from __future__ import annotations

import secrets
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Records = npt.NDArray[Any]  # np.recarray, whose fields mypy cannot see

# status of a frame (I1)
FREE: Final = 0
MAPPED: Final = 1
CACHED: Final = 2
RETIRED: Final = 3

# status of a row of the page table
UNUSED: Final = 0
OPEN: Final = 1
CLOSING: Final = 2  # released while a plan is outstanding: its frames go back when the last one is settled

HOLE: Final = -1  # a punched page

# reg: scalars
NUM_FREE: Final = 0  # height of the free stack
OLDEST: Final = 1  # ends of the list of evictable frames; -1 when empty
NEWEST: Final = 2
NUM_EVICTABLE: Final = 3  # its length: cached and not pinned
NUM_CACHED: Final = 4
NUM_RETIRED: Final = 5
NUM_SPARE: Final = 6  # height of the stack of unused asids
STAMP: Final = 7  # of the last plan, to tell whether a space is named twice
KEY: Final = 8  # of the hash; drawn per process
PUBLISHING: Final = 9  # 1 if full pages are published
MATCHED: Final = 10  # tokens found by open()
ASKED: Final = 11  # tokens that could have been found
EVICTIONS: Final = 12
COPIES: Final = 13
DEDUPLICATED: Final = 14  # pages that turned out to exist already, at commit
PEAK: Final = 15  # most frames mapped at once
NUM_REGISTERS: Final = 16


FRAME: Final = np.dtype(
    [
        ("refs", np.int32),  # page-table entries that name the frame (I2)
        ("pins", np.int32),
        ("status", np.uint8),
        ("published", np.uint8),  # 1 if the index finds it
        ("generation", np.uint32),  # bumped when taken (I8)
        ("parent", np.int32),  # of a published frame: the frame of the page before, or root_parent(root)
        ("parent_generation", np.uint32),
        ("newer", np.int32),  # links of the list of evictable frames
        ("older", np.int32),
        ("chain", np.int32),  # next published frame in the same bucket
    ],
    align=True,
)

SPACE: Final = np.dtype(
    [
        ("length", np.int64),  # committed tokens
        ("planned", np.int64),  # committed and outstanding tokens
        ("stamp", np.int64),  # of the last plan that named it
        ("num_pages", np.int32),
        ("complete", np.int32),  # leading pages that are published
        ("first_hole", np.int32),  # the first punched page, or NO_HOLE
        ("outstanding", np.int32),  # plans not yet settled
        ("root", np.int32),
        ("generation", np.uint32),
        ("status", np.uint8),
    ],
    align=True,
)

NO_HOLE: Final = np.iinfo(np.int32).max


class State(NamedTuple):
    """The arrays. Shapes: F frames, S block_size, A rows of the page table, P its width, R roots, N buckets."""

    frames: Records  # FRAME [F]
    tokens: I32  # [F, S] the ids whose KV the frame holds
    free: I32  # [F] a stack: what was dropped last is taken next, its bytes are the likeliest to be in a cache
    bucket: I32  # [N] heads of the index; a power of two, at least F
    spaces: Records  # SPACE [A]
    spare: I32  # [A] a stack of unused asids
    table: I32  # [A, P]
    root_refs: I32  # [R] open spaces and published first pages under the root
    reg: I64  # [NUM_REGISTERS]


def _unused_spaces(count: int) -> Records:
    records = np.zeros(count, SPACE).view(np.recarray)
    records["first_hole"] = NO_HOLE
    return records


def new_state(num_frames: int, block_size: int, *, publishing: bool, rows: int = 16, width: int = 16) -> State:
    """A pool of free frames and an empty page table. O(num_frames), a few ns each."""
    reg = np.zeros(NUM_REGISTERS, np.int64)
    reg[NUM_FREE], reg[NUM_SPARE] = num_frames, rows
    reg[OLDEST] = reg[NEWEST] = -1
    reg[KEY] = secrets.randbits(63)
    reg[PUBLISHING] = publishing
    return State(
        frames=np.zeros(num_frames, FRAME).view(np.recarray),
        tokens=np.zeros((num_frames, block_size), np.int32),
        free=np.arange(num_frames - 1, -1, -1, dtype=np.int32),
        bucket=np.full(1 << max(3, (num_frames - 1).bit_length()), -1, np.int32),
        spaces=_unused_spaces(rows),
        spare=np.arange(rows - 1, -1, -1, dtype=np.int32),
        table=np.full((rows, width), HOLE, np.int32),
        root_refs=np.zeros(16, np.int32),
        reg=reg,
    )


def with_more_rows(state: State) -> State:
    """The same state with room for twice as many spaces. The old table is left as it was, for plans that hold it."""
    old, height = len(state.spaces), int(state.reg[NUM_SPARE])
    spare = np.concatenate([state.spare[:height], np.arange(2 * old - 1, old - 1, -1, dtype=np.int32), state.spare[height:]])
    state.reg[NUM_SPARE] += old
    return state._replace(
        spaces=np.concatenate([state.spaces, _unused_spaces(old)]).view(np.recarray),
        spare=spare,
        table=np.concatenate([state.table, np.full_like(state.table, HOLE)]),
    )


def with_wider_table(state: State, num_pages: int) -> State:
    """The same state with a page table at least `num_pages` wide, by doubling. The old table is left as it was."""
    rows, width = state.table.shape
    while width < num_pages:
        width *= 2
    table = np.full((rows, width), HOLE, np.int32)
    table[:, : state.table.shape[1]] = state.table
    return state._replace(table=table)


def with_more_roots(state: State) -> State:
    """The same state with room for twice as many roots."""
    return state._replace(root_refs=np.concatenate([state.root_refs, np.zeros_like(state.root_refs)]))
