"""State: every integer of the memory manager, in a handful of arrays.

There is no Python object per frame or page. `frames` holds one record of 44 bytes per frame, so all fields that one
operation needs of a frame lie in one or two cache lines. With the index, the prefix hashes of evicted pages and a bit
for each free frame, a frame costs at most 48 bytes beside its token ids. `spaces` holds one record per row of the page
table, and `reg` the scalars and the ends of the lists. The arrays are few because the compiled functions pass the whole
`State` to one another, which costs time per array. `state.frames["refs"]` is a plain strided numpy view. The records
are recarrays, so that the same functions run uncompiled too (NUMBA_DISABLE_JIT=1): their own slow twin.

This file knows layout and growth; it must not know any rule about the meaning of the numbers.
"""

from __future__ import annotations

import mmap
import secrets
import sys
from contextlib import suppress
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
CLOSING: Final = 2  # released while a plan is outstanding: the frames go back when the last plan is settled
HELD: Final = 3  # maps the frames of a pin; no space
FOLLOWING: Final = 4  # the row of layer group 1 or later; the row of group 0 has the status of the space

HOLE: Final = -1  # a page behind a window

NIL: Final = -1  # no frame

# lists of frames: 0 .. 31 hold evictable frames (eviction_order.py), FENCED those that wait for an epoch (frames.py)
DEMOTED: Final = 0
NORMAL: Final = 1  # the policy gives lists 1 .. 31 their meaning
NUM_LISTS: Final = 32
FENCED: Final = 32

# added to the `rank` of a cached frame that is pinned, and that goes before its prefix when it is unpinned (frames.py)
BEHIND_WINDOW: Final = 128

# `place` of a frame: 1 + its list. The system hands out new memory as zeros, so 0 must mean that it is on no list
NOWHERE: Final = 0
AMONG_FENCED: Final = 1 + FENCED

# reg: the scalars, numbered in this order
(
    NUM_FREE,
    NUM_EVICTABLE,  # frames that are cached and not pinned: the frames on lists 0 .. 31
    NUM_CACHED,
    NUM_RETIRED,
    NUM_UNUSED_ASIDS,  # height of the stack of unused asids
    TICK,  # number of the last plan: the manager's clock; also the test whether a plan names a space twice
    KEY,  # key of the hash, drawn per process
    PUBLISHING,  # 1 if full pages are published
    MATCHED,  # tokens that open() found
    ASKED,  # tokens that open() looked for
    EVICTIONS,
    COPIES,
    DEDUPLICATED,  # pages that commit found published already
    PEAK,  # the most frames mapped at once
    EPOCH,  # the newest epoch opened by retire()
    PASSED,  # the newest epoch that has passed; frames are fenced while it is older than EPOCH
    CACHED_FENCED,  # cached frames that wait for an epoch and for nothing else
    RULE,  # the ranking rule of the policy (eviction_order.py)
    USED_LISTS,  # 1 + the highest list that the rule uses
    INFLATION,  # 1 if the policy's clock is the value of the last victim, 0 if it is TICK
    CLOCK,  # the value of the last victim
    SCALE,  # a parameter of the rule
    MISSED_EVICTED,  # tokens that open() did not find because the first missing page was evicted
    MISSED_NEW,  # tokens that open() did not find for another reason: the index does not remember the page
    PINNED,  # frames of pins; a frame of several pins counts once for each
    BELOW_PAGE,  # tokens of prompts beyond their last whole page, which open() does not look for
    LOGGED,  # events written to the log so far (events.py)
) = range(27)

# reg, after the scalars: the heads of the lists of chunks 1, 2 and 3 (free_runs.py) at FREE_LISTS + list
FREE_LISTS: Final = LOGGED

# reg, after the heads: rows of LONG pages or more that were closed, and whose memory was not given back since
CLOSED_LONG: Final = FREE_LISTS + 4

# reg, after that: entries of the queue in `State.checkpoints`
NUM_LOST: Final = CLOSED_LONG + 1

# reg, after that: for each of the 33 lists of frames its oldest frame, newest frame, length and bonus
FIRST_LIST: Final = 32
NUM_REGISTERS: Final = FIRST_LIST + 4 * (FENCED + 1)

# reg, after the lists, once a tenant has a quota: a block for each account (accounts.py). A block begins with the ends
# of the account's lists 0 .. 31; then these registers follow
(
    USED,  # frames charged to the account that are not free
    EVICTABLE,  # frames on the account's lists
    HARD,  # hard limit in frames; -1 for none
    SOFT,  # soft limit in frames; -1 for none
    PROTECTED,  # frames that are not evicted for other accounts
    EVICTED,  # the account's share of EVICTIONS
    ASKED_BY,  # the account's share of ASKED
    MATCHED_BY,  # the account's share of MATCHED
    NEED,  # scratch of a plan: frames that the account needs (quotas.py)
    GIVES,  # scratch of a plan: frames that the account gives up (quotas.py)
) = range(4 * NUM_LISTS, 4 * NUM_LISTS + 10)
ACCOUNT: Final = 4 * NUM_LISTS + 12
"""Registers of a block: a multiple of 4, so that the four figures of a list lie in one cache line."""

# the head of Step.longs (handles.py)
STATUS: Final = 0
NUM_COPIES: Final = 1
HEAD: Final = 2

# status of a step; 0: not planned. The compiled functions compare and set it, so a plan is settled once
OUTSTANDING: Final = 1
COMMITTED: Final = 2
ABORTED: Final = 3
PARTLY: Final = 4  # outstanding, and a part of its tokens is committed


FRAME: Final = np.dtype(
    [
        ("refs", np.uint16),  # page-table entries that name the frame (I2); a row names a frame once
        ("account", np.uint16),  # the account charged for the frame; of a free frame, the last one
        ("pins", np.uint16),  # copies under way that read the frame; plus 1 if it is fenced
        ("status", np.uint8),
        ("published", np.uint8),  # 1 + the layer group if the index finds the frame, else 0
        ("uses", np.uint8),  # matches since the frame was taken; at most 255
        ("place", np.uint8),  # 1 + the list that the frame is on, or NOWHERE
        ("rank", np.uint8),  # the list that the policy chose when the frame was last dropped; plus BEHIND_WINDOW
        ("floor", np.uint8),  # 1 + the highest list that a page after this one was put on; 0 for none (I9)
        ("generation", np.uint32),  # grows by 1 each time the frame is taken (I8)
        # of a published frame: the frame of the page before, or root_parent(root); of a companion: its leader
        ("parent", np.int32),
        ("parent_generation", np.uint32),
        ("prefix_hash", np.uint32),  # of a published frame: keyed hash of its whole prefix
        ("chain", np.int32),  # next published frame in the same bucket
        ("newer", np.int32),  # next frame of the list, towards the newest
        ("older", np.int32),  # next frame of the list, towards the oldest
        ("entered", np.int32),  # the clock when the frame entered its list; of a fenced frame, the epoch
    ],
    align=True,
)

CHUNK_FRAMES: Final = 64
ALL_FREE: Final = np.uint64(2**64 - 1)

CHUNK: Final = np.dtype(
    [
        ("bits", np.uint64),  # bit i is set while frame 64 * chunk + i is free
        ("newer", np.int32),  # links of the list that the chunk is on
        ("older", np.int32),
    ],
    align=True,
)

SPACE: Final = np.dtype(
    [
        ("length", np.int64),  # committed tokens
        ("planned", np.int64),  # committed and outstanding tokens
        ("stamp", np.int64),  # TICK of the last plan that named the space
        ("seed", np.uint32),  # prefix hash of the empty prefix of the root
        ("num_pages", np.int32),
        ("complete", np.int32),  # leading pages that are published; of an unused row, its pages when it was closed
        ("first_hole", np.int32),  # the first hole, or NO_HOLE
        ("named", np.int32),  # leading pages that may be published, or ALL_NAMED: the ids of the next page are unknown
        ("outstanding", np.int32),  # plans that are not settled
        ("root", np.int32),
        ("generation", np.uint32),
        ("advice", np.int8),  # DEMOTED - NORMAL after advise(space, "demote"), else 0
        ("status", np.uint8),
        ("no_publish", np.uint8),  # 1 after forget(): the space holds forgotten pages, and publishes none
        ("unused_asid", np.int32),  # entry i of the stack of unused asids is kept in row i; it says nothing about row i
    ],
    align=True,
)

# columns of `roots`
IN_USE: Final = 0  # open spaces of the root, plus published pages: its first pages, or those with its salts
CHARGED: Final = 1  # account charged
SALTED_PAGE: Final = 2  # the page with its salts; -1 for the root of a tenant without salts
ROOT_BEFORE: Final = 3  # the root of the tenant with the salts of earlier pages; NIL if there is none
SALT_SEED: Final = 4  # a keyed digest of its salts, which is mixed into the prefix hash of its page

NO_HOLE: Final = np.iinfo(np.int32).max
ALL_NAMED: Final = np.iinfo(np.int32).max
MAX_SPACES: Final = 2**16 - 2
"""The most rows of the page table: `refs` and `pins` are uint16. A frame gets at most one reference and one pin from
each row, and one pin from a fence."""


class State(NamedTuple):
    """The arrays. Shapes: F frames, S block_size, A rows of the page table, P its width, R roots, N buckets."""

    frames: Records  # FRAME [F]
    tokens: I32  # [F, S] the token ids whose KV the frame holds
    chunks: Records  # CHUNK [ceil(F / 64)]
    bucket: I32  # [N] heads of the index; N is the largest power of two up to 23/32 F
    ghosts: I32  # [G] prefix hashes of evicted pages; a newer one overwrites; G is a power of two, at most F/4
    spaces: Records  # SPACE [A]
    table: I32  # [A, P]; entries behind the pages of a row mean nothing
    roots: I32  # [R, 5], see below
    salts: I32  # [F], of a published frame: 1 + the root whose salts lie in its page, or 0; [0] until a salt is used
    reg: I64  # [NUM_REGISTERS], and ACCOUNT more for each account
    log: I32  # [E, 4 + S] the last events (events.py); [0, 4 + S] if none are kept
    groups: I64  # [layer groups, 5] window (0: sees all), sinks, two columns of scratch (layer_groups.py), keep
    # [2 F + MAX_SPACES]: the recurrent state that is bound to the page in each frame, or NIL, then a queue of NUM_LOST
    # entries (states/bindings.py); [0] without recurrent states
    checkpoints: I32
    history: I32  # [N, 4, 2] tokens that followed a prefix before (prefix/history.py); [0, 4, 2] if none are noted


class FrameViews(NamedTuple):
    """Records of all frames [F]. They change with the pool; after a resize they are those of the old pool.

    generation: rises when a frame is taken. published: not 0 while a prompt can find the page in the frame.
    uses:       how often the page was used again. refs: page-table entries that name the frame (I2).
    pins:       not 0 while a copy or an open epoch may read the frame.
    """

    generation: npt.NDArray[np.uint32]
    published: npt.NDArray[np.uint8]
    uses: npt.NDArray[np.unsignedinteger]
    refs: npt.NDArray[np.unsignedinteger]
    pins: npt.NDArray[np.unsignedinteger]


def frame_views(state: State) -> FrameViews:
    """Return views of the records of all frames."""
    return FrameViews(*(state.frames[name] for name in FrameViews._fields))


def list_registers(reg: I64) -> I64:
    """int64 [33, 4], a view: oldest, newest, length and bonus of each list of account 0."""
    return reg[FIRST_LIST:NUM_REGISTERS].reshape(FENCED + 1, 4)


def account_registers(reg: I64) -> I64:
    """int64 [N, ACCOUNT], a view: the block of each account; N = 0 until a tenant has a quota."""
    return reg[NUM_REGISTERS:].reshape(-1, ACCOUNT)


def copied(state: State) -> State:
    """Return a copy of every array."""
    table = _table_like(state, *state.table.shape)
    return State._make([table if array is state.table else array.copy() for array in state])


def with_account(state: State) -> State:
    """Return the state with one more account; the first time with two, since account 0 owns all frames so far."""
    block = np.zeros(ACCOUNT, np.int64)
    block[: 4 * NUM_LISTS].reshape(NUM_LISTS, 4)[:, :2] = NIL
    block[[HARD, SOFT]] = -1
    blocks = [block]
    if len(state.reg) == NUM_REGISTERS:
        shared = block.copy()
        shared[USED], shared[EVICTABLE] = len(state.frames) - state.reg[NUM_FREE], state.reg[NUM_EVICTABLE]
        shared[[EVICTED, ASKED_BY, MATCHED_BY]] = state.reg[[EVICTIONS, ASKED, MATCHED]]
        blocks = [shared, block]
    return state._replace(reg=np.concatenate([state.reg, *blocks]))


def _unused_spaces(first: int, count: int, num_groups: int) -> Records:
    records = np.zeros(count, SPACE).view(np.recarray)
    records["first_hole"] = NO_HOLE
    records["named"] = ALL_NAMED
    records["unused_asid"][: count // num_groups] = _leading(first, count, num_groups)
    return records


def _leading(first: int, count: int, num_groups: int) -> I32:
    """int32 [count / num_groups]: the rows of group 0 among `count` rows from `first` on, last one first."""
    return np.arange(first + count - num_groups, first - 1, -num_groups, dtype=np.int32)


def _unused_roots(count: int) -> I32:
    return np.tile(np.array([0, 0, -1, NIL, 0], np.int32), (count, 1))


def _on_lines(rows: int, width: int) -> I32:
    """int32 [rows, width]: zeros that begin at a cache line, so that a row of 16 does not lie across two lines."""
    memory = np.zeros(rows * width + 16, np.int32)
    skipped = -memory.ctypes.data % 64 // 4
    return memory[skipped : skipped + rows * width].reshape(rows, width)


LAZY_BYTES: Final = 2**22
"""Bytes of a page table from which on memory is taken when it is written, and given back when a long row is closed."""

LONG: Final = 4 * mmap.PAGESIZE // 4
"""Pages of a long row, whose entries take four pages of the system's memory."""


def _new_table(rows: int, width: int) -> I32:
    """int32 [rows, width]: holes, or zeros that take memory when they are written, a page of the system at a time.

    One long sequence makes the table wide, and the rows of the short ones beside it stay empty behind their pages.
    """
    if 4 * rows * width < LAZY_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.full((rows, width), HOLE, np.int32)
    reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    try:
        memory = mmap.mmap(-1, 4 * rows * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve)
    except OSError as error:
        raise MemoryError(f"a page table of {rows} rows and {width} pages: {error}") from None
    with suppress(OSError, AttributeError):  # numpy asks for huge pages, of which the first entry of a row takes one
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int32).reshape(rows, width)


def _table_like(state: State, rows: int, width: int) -> I32:
    """Return a table of that shape, at least as large, with the pages of `state`. O(pages)."""
    old, num_pages, step = state.table, state.spaces["num_pages"], mmap.PAGESIZE // 4
    table = _new_table(rows, width)
    for first in range(0, old.shape[1], step):
        used = np.flatnonzero(num_pages[: len(old)] > first)
        part = slice(first, min(first + step, old.shape[1]))
        table[used, part] = old[used, part]
    return table


def return_memory(state: State) -> None:
    """Give the memory of the entries of long rows that were closed back to the system. O(rows), or O(1) for holes."""
    memory, spaces = _memory_of(state.table), state.spaces
    state.reg[CLOSED_LONG] = 0
    if memory is None:
        return
    rows = np.flatnonzero((spaces["status"] == UNUSED) & (spaces["complete"] >= LONG))
    for row in rows.tolist():
        first, last = (bound * state.table.strides[0] for bound in (row, row + 1))
        first += -first % mmap.PAGESIZE
        memory.madvise(mmap.MADV_DONTNEED, first, last - last % mmap.PAGESIZE - first)
    spaces["complete"][rows] = 0


def _memory_of(array: Any) -> Any:
    """Return the mapping that an array lies in, or None."""
    while isinstance(array, np.ndarray | memoryview):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return array if isinstance(array, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") else None


def _power_of_two(at_most: int) -> int:
    return 1 << max(3, at_most.bit_length() - 1)


def _free_chunks(num_frames: int, reg: I64) -> Records:
    """Return the chunks of a free pool. Chunk 0 is taken first, and a last chunk of fewer than 64 frames last."""
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


def new_state(num_frames: int, groups: I64, *, block_size: int, publishing: bool, events: int = 0) -> State:
    """Return a pool of free frames and an empty page table. O(num_frames); zeros cost time at their first touch."""
    rows, width = 16 * len(groups), 16  # of the page table, which grows
    reg = np.zeros(NUM_REGISTERS, np.int64)
    reg[NUM_FREE], reg[NUM_UNUSED_ASIDS] = num_frames, 16
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
        table=_new_table(rows, width),
        roots=_unused_roots(16),
        salts=np.zeros(0, np.int32),
        reg=reg,
        log=np.zeros((events, 4 + block_size), np.int32),
        groups=groups,
        checkpoints=np.zeros(0, np.int32),
        history=history_of(0),
    )


def with_checkpoints(state: State) -> State:
    """Return the state with an array for the recurrent state of each page."""
    return state._replace(checkpoints=np.full(2 * len(state.frames) + MAX_SPACES, NIL, np.int32))


def history_of(num_tokens: int) -> I32:
    """Return an array for about the last `num_tokens` tokens of the past: int32 [N, 4, 2], see prefix/history.py."""
    return np.zeros((_power_of_two(num_tokens) if num_tokens else 0, 4, 2), np.int32)


def with_salts(state: State) -> State:
    """Return the state with an array for the salts of each frame."""
    return state if len(state.salts) else state._replace(salts=np.zeros(len(state.frames), np.int32))


def page_salts(state: State) -> I32:
    """Return int32 [F]: `salts`, a copy; zeros if no salt was used."""
    return state.salts.copy() if len(state.salts) else np.zeros(len(state.frames), np.int32)


def with_more_rows(state: State) -> State:
    """Return a state for twice as many spaces. The old table stays unchanged, for plans that hold it."""
    old, height = len(state.spaces), int(state.reg[NUM_UNUSED_ASIDS])
    more = old // len(state.groups)
    spaces = np.concatenate([state.spaces, _unused_spaces(old, old, len(state.groups))]).view(np.recarray)
    spaces["unused_asid"][height : height + more] = _leading(old, old, len(state.groups))
    table = _table_like(state, 2 * old, state.table.shape[1])
    reg = state.reg.copy()  # so that an interrupt before the state is exchanged changes nothing
    reg[NUM_UNUSED_ASIDS] += more
    return state._replace(spaces=spaces, table=table, reg=reg)


def with_wider_table(state: State, num_pages: int) -> State:
    """Return the state with a page table at least `num_pages` wide, by doubling. The old table stays unchanged."""
    rows, width = state.table.shape
    while width < num_pages:
        width *= 2
    return state._replace(table=_table_like(state, rows, width))


def with_more_roots(state: State) -> State:
    """Return a state for twice as many roots."""
    return state._replace(roots=np.concatenate([state.roots, _unused_roots(len(state.roots))]))
