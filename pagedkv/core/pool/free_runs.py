"""Runs: which frames are free, and which of them a space gets. Compiled functions over `chunks` and `reg`; nothing else is known here.

The pool is cut into chunks of 64 frames, one word each: bit i is set while frame 64 * chunk + i is free. A chunk stands on one of three
lists, by what its word says and nothing else, linked through `newer` and `older`; one without a free frame stands on none:

    WHOLE   all 64 are free          ROOMY   one of its four groups of 16 is          SCARCE   some are

A space takes the frame after its last one as long as that is free: its frames form runs, and a run is one stream to a kernel and one copy
to a tier. Where a run must begin anew it begins in a whole chunk; else in a free group, so that whoever began in another group goes on
undisturbed; else in the longest gap of a scarce chunk. So sequences that grow in turn do not braid. Everything is O(1) a run, whatever the
size of the pool.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pagedkv.core.compiled import compiled, inlined
from pagedkv.core.state import ALL_FREE, FREE_LISTS, HOLE, I32, I64, NIL, NUM_FREE, Records

SCARCE: Final = 1
ROOMY: Final = 2
WHOLE: Final = 3

_ONE = np.uint64(1)
_NONE = np.uint64(0)
_BEGINNINGS = np.uint64(0x0001000100010001)  # of the four groups of 16


@inlined
def _in_a_row(bits: np.uint64, most: int) -> np.uint64:
    """Where `most` (a power of two) free frames in a row begin."""
    length = 1
    while length < most:
        bits &= bits >> np.uint64(length)
        length *= 2
    return bits


@inlined
def _kind(bits: np.uint64) -> int:
    if bits == ALL_FREE:
        return WHOLE
    if bits == _NONE:
        return 0
    return ROOMY if _in_a_row(bits, 16) & _BEGINNINGS != _NONE else SCARCE


@inlined
def _lowest(bits: np.uint64) -> int:
    """The place of the lowest bit of `bits`, which is not 0."""
    place, width = 0, 32
    while width > 0:
        if bits & ((_ONE << np.uint64(width)) - _ONE) == _NONE:
            bits >>= np.uint64(width)
            place += width
        width //= 2
    return place


@compiled
def _move(chunks: Records, reg: I64, chunk: int, source: int, target: int) -> None:
    """From one list to the head of another; list 0 is none."""
    if source:
        newer, older = chunks[chunk].newer, chunks[chunk].older
        if newer == NIL:
            reg[FREE_LISTS + source] = older
        else:
            chunks[newer].older = older
        if older != NIL:
            chunks[older].newer = newer
    if target:
        head = reg[FREE_LISTS + target]
        chunks[chunk].newer = NIL
        chunks[chunk].older = head
        if head != NIL:
            chunks[head].newer = chunk
        reg[FREE_LISTS + target] = chunk


@inlined
def put(chunks: Records, reg: I64, first: int, count: int) -> None:
    """`count` frames in a row from `first` on, all of one chunk, are free."""
    chunk = first >> 6
    before = chunks[chunk].bits
    after = before | ((ALL_FREE >> np.uint64(64 - count)) << np.uint64(first & 63))
    chunks[chunk].bits = after
    reg[NUM_FREE] += count
    source, target = _kind(before), _kind(after)
    if source != target:
        _move(chunks, reg, chunk, source, target)


@compiled
def _begin(chunks: Records, reg: I64) -> int:
    """Where a run had better begin. There is a free frame."""
    chunk = int(reg[FREE_LISTS + WHOLE])
    if chunk != NIL:
        return chunk << 6
    chunk = int(reg[FREE_LISTS + ROOMY])
    if chunk != NIL:
        return (chunk << 6) + int(_lowest(_in_a_row(chunks[chunk].bits, 16) & _BEGINNINGS))
    chunk = int(reg[FREE_LISTS + SCARCE])
    bits, length = chunks[chunk].bits, 8
    while _in_a_row(bits, length) == _NONE:
        length //= 2
    return (chunk << 6) + int(_lowest(_in_a_row(bits, length)))


def runs_in(pages: I32) -> I32:
    """int32 [R, 2]: the first frame and the length of each run of frames that follow one another in `pages` (int32 [P]); holes are none."""
    named = np.where(pages == HOLE, np.int32(-3), pages)  # neither -1 nor -2: frame 0 follows no hole
    begins = np.flatnonzero((pages != HOLE) & (np.diff(named, prepend=np.int32(-3)) != 1))
    ends = np.flatnonzero((pages != HOLE) & (np.diff(named, append=np.int32(-3)) != 1))
    return np.stack([pages[begins], ends - begins + 1], axis=1).astype(np.int32)


@compiled
def take(chunks: Records, reg: I64, last: int, wanted: int) -> tuple[int, int]:
    """(first, count): up to `wanted` frames in a row, of one chunk, after `last` if that can be; they are free no more. There is one."""
    first = last + 1
    chunk = first >> 6
    if last < 0 or chunk >= len(chunks) or (chunks[chunk].bits >> np.uint64(first & 63)) & _ONE == _NONE:
        first = _begin(chunks, reg)
        chunk = first >> 6
    before = chunks[chunk].bits
    bit = _ONE << np.uint64(first & 63)
    after, count = before, 0
    while count < wanted and after & bit != _NONE:  # past the last one the bit is 0
        after ^= bit
        bit <<= _ONE
        count += 1
    chunks[chunk].bits = after
    reg[NUM_FREE] -= count
    source, target = _kind(before), _kind(after)
    if source != target:
        _move(chunks, reg, chunk, source, target)
    return first, count
