"""State: every integer the memory manager knows, in a handful of arrays.

There is no Python object per frame or page. `frames` holds one record of 44 bytes per frame, so what one operation needs of a frame lies in
one cache line or two; with the index, the memory of evicted pages and a bit for each free frame it is at most 48 bytes a frame beside the
token ids. `spaces` holds one record per row of the page table, and `reg` the scalars and the ends of the lists. Few arrays rather than many
is a matter of cost: the compiled functions hand the whole `State` to one another. `state.frames["refs"]` is a plain strided numpy view.
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
U8 = npt.NDArray[np.uint8]
Records = npt.NDArray[Any]  # np.recarray, whose fields mypy cannot see

# status of a frame (I1)
FREE: Final = 0
MAPPED: Final = 1
CACHED: Final = 2
RETIRED: Final = 3

# status of a row of the page table
UNUSED: Final = 0
OPEN: Final = 1
HELD: Final = 3  # the frames of a user's pin
FOLLOWING: Final = 4  # the row of another group than the first, whose row says what it may do
CLOSING: Final = 2  # released while a plan is outstanding: its frames go back when the last one is settled

HOLE: Final = -1  # a punched page

NIL: Final = -1  # no frame

# lists of frames: 0 .. 31 hold the evictable ones (eviction.py), FENCED those that wait for an epoch to pass (frames.py)
DONTNEED: Final = 0
COLD: Final = 1
NORMAL: Final = 2  # and upwards: what this means is the policy's business
NUM_LISTS: Final = 32
FENCED: Final = 32

# where a frame stands: 1 + its list. A pool is made of zeros that the system hands out when they are first touched: 0 must mean nowhere
NOWHERE: Final = 0
AMONG_FENCED: Final = 1 + FENCED

# reg: the scalars, numbered in this order
(
    NUM_FREE,
    NUM_EVICTABLE,  # cached and not pinned: the frames on lists 0 .. 31
    NUM_CACHED,
    NUM_RETIRED,
    NUM_SPARE,  # height of the stack of unused asids
    TICK,  # number of the last plan: the clock of the manager, and the test whether a plan names a space twice
    KEY,  # of the hash; drawn per process
    PUBLISHING,  # 1 if full pages are published
    MATCHED,  # tokens found by open()
    ASKED,  # tokens that open() looked for
    EVICTIONS,
    COPIES,
    DEDUPLICATED,  # pages that turned out to exist already, at commit
    PEAK,  # most frames mapped at once
    EPOCH,  # the newest epoch opened by retire()
    PASSED,  # the newest epoch that has passed; frames are fenced while it is older than EPOCH
    CACHED_FENCED,  # cached frames that only wait for an epoch
    RULE,  # how the policy ranks a frame (eviction.py), with the number of lists it uses
    USED_LISTS,
    INFLATION,  # 1 if the policy's clock is the value of the last victim, 0 if it is TICK
    CLOCK,  # the value of the last victim
    SCALE,  # a parameter of the rule
    MISSED_EVICTED,  # tokens that open() did not find: the first missing page was evicted,
    MISSED_NEW,  # or was never published as far as the index can tell
    PINNED,  # frames held by user pins; a frame of several pins counts for each
    BELOW_PAGE,  # tokens of prompts beyond their last whole page, which open() does not look for
    LOGGED,  # events written to the log so far (events.py)
) = range(27)

# reg, after the scalars: the heads of the lists of chunks 1, 2 and 3 (free_runs.py) at FREE_LISTS + list
FREE_LISTS: Final = LOGGED

# reg, after those: for each of the 33 lists of frames its oldest frame, newest frame, length and bonus
FIRST_LIST: Final = 32
NUM_REGISTERS: Final = FIRST_LIST + 4 * (FENCED + 1)

# reg, after those, once a tenant has a quota: a block for each account (accounts.py). It begins with the ends of lists 0 .. 31, then
(
    USED,  # frames charged to the account that are not free
    EVICTABLE,  # of these, the frames on its lists
    HARD,  # limits; -1 for none
    SOFT,
    PROTECTED,
    EVICTED,  # the account's share of EVICTIONS, ASKED and MATCHED
    ASKED_BY,
    MATCHED_BY,
    NEED,  # scratch of a plan: frames that it needs, and frames that it gives up (quotas.py)
    GIVES,
) = range(4 * NUM_LISTS, 4 * NUM_LISTS + 10)
ACCOUNT: Final = 4 * NUM_LISTS + 12
"""Registers of a block: a multiple of 4, so that the four figures of a list lie in one line of the processor's cache."""


FRAME: Final = np.dtype(
    [
        ("refs", np.uint16),  # page-table entries that name the frame (I2); a row names it once
        ("account", np.uint16),  # who is charged for it; of a free one, who was
        ("pins", np.uint16),  # copies under way that read it, and 1 if it is fenced
        ("status", np.uint8),
        ("published", np.uint8),  # 1 if the index finds it; a page of group g: 1 + g
        ("uses", np.uint8),  # times it was matched since it was taken; stays at 255
        ("place", np.uint8),  # 1 + the list it is on, or NOWHERE
        ("rank", np.uint8),  # the list it was ranked for when it was dropped
        ("floor", np.uint8),  # 1 + the highest list that a successor of it was put on, 0 for none (I9)
        ("generation", np.uint32),  # bumped when taken (I8)
        (
            "parent",
            np.int32,
        ),  # of a published frame: the frame of the page before, or root_parent(root); of a companion: its leader
        ("parent_generation", np.uint32),
        ("fingerprint", np.uint32),  # of a published frame: keyed hash of its whole prefix
        ("chain", np.int32),  # next published frame in the same bucket
        ("newer", np.int32),  # links of the list it is on
        ("older", np.int32),
        ("entered", np.int32),  # the clock when it entered the list; of a fenced one, the epoch
    ],
    align=True,
)

CHUNK_FRAMES: Final = 64
ALL_FREE: Final = np.uint64(2**64 - 1)

CHUNK: Final = np.dtype(
    [
        ("bits", np.uint64),  # bit i is set while frame 64 * chunk + i is free
        ("newer", np.int32),  # links of the list it is on
        ("older", np.int32),
    ],
    align=True,
)

SPACE: Final = np.dtype(
    [
        ("length", np.int64),  # committed tokens
        ("planned", np.int64),  # committed and outstanding tokens
        ("stamp", np.int64),  # of the last plan that named it
        ("seed", np.uint32),  # fingerprint of the empty prefix: which root
        ("num_pages", np.int32),
        ("complete", np.int32),  # leading pages that are published
        ("first_hole", np.int32),  # the first punched page, or NO_HOLE
        ("outstanding", np.int32),  # plans not yet settled
        ("root", np.int32),
        ("generation", np.uint32),
        ("advice", np.int8),  # what advise() said: list - NORMAL
        ("status", np.uint8),
        ("no_publish", np.uint8),  # 1 if its pages are not published: it holds pages from before forget()
        ("spare", np.int32),  # nothing of this row: an entry of the stack of unused asids
    ],
    align=True,
)

NO_HOLE: Final = np.iinfo(np.int32).max
MAX_SPACES: Final = (
    2**16 - 2
)  # so that the references to a frame, and its pins, at most one a space and a fence, fit uint16


class State(NamedTuple):
    """The arrays. Shapes: F frames, S block_size, A rows of the page table, P its width, R roots, N buckets."""

    frames: Records  # FRAME [F]
    tokens: I32  # [F, S] the ids whose KV the frame holds
    chunks: Records  # CHUNK [ceil(F / 64)]
    bucket: I32  # [N] heads of the index; the largest power of two that is at most 23/32 F
    ghosts: I32  # [G] fingerprints of evicted pages, each at its own place until another one takes it; a power of two, at most F/4
    spaces: Records  # SPACE [A]
    table: I32  # [A, P]
    roots: I32  # [R, 3] open spaces and published first pages under the root; its first successor, as below; who is charged
    kin: I32  # [F, 3] first successor, next and previous successor of the same page, newest first; [0, 3] unless matching by token
    reg: I64  # [NUM_REGISTERS], and ACCOUNT more for each account
    log: I32  # [E, 3 + S] the last events (events.py); [0, 3 + S] if nobody wants them
    groups: I64  # [layer groups, 4] window (0: sees all) and sinks; scratch of layer_groups.usable_pages


def list_registers(reg: I64) -> I64:
    """[33, 4] view: oldest, newest, length and bonus of each list, those of account 0."""
    return reg[FIRST_LIST:NUM_REGISTERS].reshape(FENCED + 1, 4)


def account_registers(reg: I64) -> I64:
    """[N, ACCOUNT] view: the block of each account; N = 0 as long as nobody has a quota."""
    return reg[NUM_REGISTERS:].reshape(-1, ACCOUNT)


def with_account(state: State) -> State:
    """The same state with one account more; the first time with two, as all that is there belongs to account 0."""
    block = np.zeros(ACCOUNT, np.int64)
    block[: 4 * NUM_LISTS].reshape(NUM_LISTS, 4)[:, :2] = NIL
    block[[HARD, SOFT]] = -1
    blocks = [block]
    if len(state.reg) == NUM_REGISTERS:
        everybody = block.copy()
        everybody[USED], everybody[EVICTABLE] = len(state.frames) - state.reg[NUM_FREE], state.reg[NUM_EVICTABLE]
        everybody[[EVICTED, ASKED_BY, MATCHED_BY]] = state.reg[[EVICTIONS, ASKED, MATCHED]]
        blocks = [everybody, block]
    return state._replace(reg=np.concatenate([state.reg, *blocks]))


def _unused_spaces(first: int, count: int, num_groups: int) -> Records:
    records = np.zeros(count, SPACE).view(np.recarray)
    records["first_hole"] = NO_HOLE
    records["spare"][: count // num_groups] = _leading(first, count, num_groups)
    return records


def _leading(first: int, count: int, num_groups: int) -> I32:
    """The rows of group 0 among `count` rows from `first` on, last one first."""
    return np.arange(first + count - num_groups, first - 1, -num_groups, dtype=np.int32)


def _unused_roots(count: int) -> I32:
    return np.tile(np.array([0, NIL, 0], np.int32), (count, 1))


def _on_lines(rows: int, width: int) -> I32:
    """Zeros [rows, width] that begin with a line of the processor's cache, so that a row of 16 does not lie across two."""
    memory = np.zeros(rows * width + 16, np.int32)
    skipped = -memory.ctypes.data % 64 // 4
    return memory[skipped : skipped + rows * width].reshape(rows, width)


def _power_of_two(at_most: int) -> int:
    return 1 << max(3, at_most.bit_length() - 1)


def _free_chunks(num_frames: int, reg: I64) -> Records:
    """All frames free: chunk 0 is taken first, and a last one of fewer than 64 when there is no other."""
    chunks = np.zeros(-(-num_frames // CHUNK_FRAMES), CHUNK).view(np.recarray)
    whole, rest = divmod(num_frames, CHUNK_FRAMES)
    chunks["bits"][:whole] = ALL_FREE
    chunks["older"][:whole] = np.arange(1, whole + 1)
    chunks["newer"][:whole] = np.arange(-1, whole - 1)
    scarce, roomy, full = range(FREE_LISTS + 1, FREE_LISTS + 4)
    reg[[scarce, roomy, full]] = NIL
    if whole:
        chunks["older"][whole - 1] = NIL
        reg[full] = 0
    if rest:
        chunks["bits"][whole] = np.uint64(2**rest - 1)
        chunks["older"][whole] = chunks["newer"][whole] = NIL
        reg[roomy if rest >= 16 else scarce] = whole
    return chunks


def new_state(
    num_frames: int, groups: I64, *, block_size: int, publishing: bool, by_token: bool = False, events: int = 0
) -> State:
    """A pool of free frames and an empty page table. O(num_frames), but for zeros, which cost when they are first touched."""
    rows, width = 16 * len(groups), 16  # of the table, which grows
    reg = np.zeros(NUM_REGISTERS, np.int64)
    reg[NUM_FREE], reg[NUM_SPARE] = num_frames, 16
    list_registers(reg)[:, :2] = NIL
    reg[KEY] = secrets.randbits(63)
    reg[PUBLISHING] = publishing
    reg[EPOCH] = reg[PASSED] = -1
    return State(
        frames=np.zeros(num_frames, FRAME).view(np.recarray),
        tokens=_on_lines(num_frames, block_size),
        chunks=_free_chunks(num_frames, reg),
        bucket=np.full(_power_of_two(23 * num_frames // 32), NIL, np.int32),
        ghosts=np.zeros(_power_of_two(num_frames // 4), np.int32),
        spaces=_unused_spaces(0, rows, len(groups)),
        table=np.full((rows, width), HOLE, np.int32),
        roots=_unused_roots(16),
        kin=np.full((num_frames if by_token else 0, 3), NIL, np.int32),
        reg=reg,
        log=np.zeros((events, 3 + block_size), np.int32),
        groups=groups,
    )


def with_more_rows(state: State) -> State:
    """The same state with room for twice as many spaces. The old table is left as it was, for plans that hold it."""
    old, height = len(state.spaces), int(state.reg[NUM_SPARE])
    more = old // len(state.groups)
    spaces = np.concatenate([state.spaces, _unused_spaces(old, old, len(state.groups))]).view(np.recarray)
    spaces["spare"][height : height + more] = _leading(old, old, len(state.groups))
    state.reg[NUM_SPARE] += more
    return state._replace(
        spaces=spaces,
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
    return state._replace(roots=np.concatenate([state.roots, _unused_roots(len(state.roots))]))
