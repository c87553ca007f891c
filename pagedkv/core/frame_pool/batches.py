"""Batches: the compiled calls of FramePool, for many frames at once. They know frames and keys, and no page table.

Each function begins with a pass that only looks: it returns the index of the first frame that the call cannot serve,
or ALL. Then a second pass changes the pool, and cannot fail. A frame that a batch names twice is seen by a count in the
frame's own record, which the first pass takes back.

A key is a row of `tokens`, and each named frame a first page under root 0. So the prefix index compares keys exactly.
Keys arrive as one row of bytes, key after key, each filled up with zeros to whole words of 4 bytes.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pagedkv.core.compiled import compiled, inlined, inner
from pagedkv.core.frame_pool.packed import Packed, unpacked, words_of
from pagedkv.core.pool import eviction, frames, free_runs, quotas
from pagedkv.core.prefix import index
from pagedkv.core.state import (
    CACHED,
    FREE,
    I32,
    I64,
    KEY,
    MAPPED,
    NUM_EVICTABLE,
    NUM_FREE,
    NUM_REGISTERS,
    TICK,
    U8,
    State,
)
from pagedkv.core.tables.steps import OK, OVER_QUOTA, PROTECTED_SHARES, SHORT

ALL: Final = -1
"""The result of a batch that was served; any other result is the index of the frame that could not be."""

MOST_FRAMES: Final = 2**31

MOST_REFERENCES: Final = 2**16 - 1
"""The most references of a frame, which are counted in 16 bits."""

KEEP_NAMED: Final = 1
KEEP_ALL: Final = 2

_ROOT: Final = 0
_BEFORE: Final = 0  # prefix hash of the empty prefix
_MARK: Final = 64  # added to `published` of a frame while the first pass of `publish` has seen it


@compiled
def take(packed: Packed, taken: I32, after: int, account: int) -> int:
    """Map len(taken) frames once, in runs; the first run begins after frame `after` if a free frame is there.

    Returns: OK, or the code of steps.py that says why there are too few. Modifies: taken (int32 [n])
    """
    s = unpacked(packed)
    code = _make_room(s, len(taken), account)
    if code == OK:
        got, last = 0, after
        while got < len(taken):
            first, count = free_runs.take(s.chunks, s.reg, last, len(taken) - got)
            for i in range(count):
                frames.claim(s.frames, s.reg, first + i, account)
                taken[got + i] = first + i
            got += count
            last = first + count - 1
        _end_taking(s)
    return code


@compiled
def take_one(packed: Packed, after: int, account: int) -> int:
    """Do the same for one frame. Return its number, or the code less 2**31 if there is none."""
    s = unpacked(packed)
    code = _make_room(s, np.int64(1), account)
    if code != OK:
        return code - MOST_FRAMES
    frame, _ = free_runs.take(s.chunks, s.reg, after, np.int64(1))
    frames.claim(s.frames, s.reg, frame, account)
    _end_taking(s)
    return frame


@inlined
def _end_taking(s: State) -> None:
    frames.note_peak(s.frames, s.reg)
    s.reg[TICK] += 1


@inlined
def _make_room(s: State, wanted: int, account: int) -> int:
    """Evict until `wanted` frames are free for `account`, or return the code of the reason why that cannot be."""
    if wanted > s.reg[NUM_FREE] + s.reg[NUM_EVICTABLE]:
        return SHORT
    if len(s.reg) == NUM_REGISTERS:
        eviction.reclaim(s, wanted)
        return OK
    if quotas.measure_one(s, account, wanted) >= 0:
        return OVER_QUOTA
    if quotas.givable(s) < wanted - s.reg[NUM_FREE]:
        return PROTECTED_SHARES
    quotas.reclaim(s, wanted)
    return OK


@compiled
def take_these(packed: Packed, wanted: I32, account: int) -> tuple[int, int]:
    """Map each of the free frames `wanted` once. Return (OK or OVER_QUOTA, ALL or the index of a frame not free)."""
    s = unpacked(packed)
    for i in range(len(wanted)):
        frame = np.int64(wanted[i])
        if frame < 0 or frame >= len(s.frames) or s.frames[frame].status != FREE:
            _set_status(s, wanted[:i], FREE)
            return OK, i
        s.frames[frame].status = MAPPED
    _set_status(s, wanted, FREE)
    if len(s.reg) > NUM_REGISTERS:
        if quotas.measure_one(s, account, len(wanted)) >= 0:
            return OVER_QUOTA, ALL
        quotas.reclaim(s, np.int64(0))
    for i in range(len(wanted)):
        frame = np.int64(wanted[i])
        free_runs.take_this(s.chunks, s.reg, frame)
        frames.claim(s.frames, s.reg, frame, account)
    _end_taking(s)
    return OK, ALL


@inner
def _set_status(s: State, some: I32, status: int) -> None:
    for frame in some:
        s.frames[frame].status = status


@inlined
def _add_references(s: State, some: I32, change: int) -> None:
    for frame in some:
        s.frames[frame].refs = int(s.frames[frame].refs) + change


@compiled
def share(packed: Packed, shared: I32) -> int:
    """Add a reference to each frame, which is not free, and count the use. Return ALL or the index of a refusal."""
    s = unpacked(packed)
    for i in range(len(shared)):
        frame = np.int64(shared[i])
        refused = frame < 0 or frame >= len(s.frames)
        if refused or s.frames[frame].status == FREE or s.frames[frame].refs == MOST_REFERENCES:
            _add_references(s, shared[:i], -1)
            return i
        s.frames[frame].refs += 1
    _add_references(s, shared, -1)
    for i in range(len(shared)):
        frames.map_matched(s, np.int64(shared[i]))
    return ALL


@compiled
def drop(packed: Packed, dropped: I32, keep: int, positions: I64) -> int:
    """Remove a reference from each frame, in this order. Return ALL or the index of a frame that lacks the reference.

    keep: KEEP_NAMED or KEEP_ALL. Shapes: positions int64 [n], or [0] for position 0 of all
    """
    s = unpacked(packed)
    for i in range(len(dropped)):
        frame = np.int64(dropped[i])
        if frame < 0 or frame >= len(s.frames) or s.frames[frame].refs == 0:
            _add_references(s, dropped[:i], 1)
            return i
        s.frames[frame].refs -= 1
    _add_references(s, dropped, 1)
    for i in range(len(dropped)):
        frame = np.int64(dropped[i])
        position = positions[i] if len(positions) else np.int64(0)
        _drop(s, frame, keep, position)
    return ALL


@compiled
def drop_one(packed: Packed, frame: int, keep: int) -> int:
    """Do the same for one frame at position 0. Return ALL, or 0 if the frame lacks the reference."""
    s = unpacked(packed)
    if frame < 0 or frame >= len(s.frames) or s.frames[frame].refs == 0:
        return 0
    _drop(s, frame, keep, np.int64(0))
    return ALL


@inlined
def _drop(s: State, frame: int, keep: int, position: int) -> None:
    if keep == KEEP_ALL and s.frames[frame].published == 0:
        s.frames[frame].parent = index.root_parent(_ROOT)  # as that of a named frame: no page is before it
    if frames.drop_reference(s.frames, s.reg, frame, keep, position, 0):
        frames.free(s, frame)


@inlined
def _hash(s: State, key: I32) -> int:
    return index.prefix_hash_of(s.reg[KEY], np.int64(_BEFORE), key)


@inlined
def _look_ahead(s: State, keys: I32, found: I32) -> None:
    """Write the prefix hash of each key to `found`, less 2**31, and prefetch what `index.find` will read."""
    for i in range(len(keys)):
        prefix_hash = _hash(s, keys[i])
        index.prefetch_bucket(s, prefix_hash)
        found[i] = prefix_hash - 2**31
    for i in range(len(keys)):
        index.prefetch_candidate(s, np.int64(found[i]) + 2**31)
    for i in range(len(keys)):
        index.prefetch_next(s, np.int64(found[i]) + 2**31)


@compiled
def find(packed: Packed, row: U8, found: I32) -> None:
    """Write the frame of each key in `row` to `found` (int32 [n]); -1 if no frame has it. Nothing else is changed."""
    s = unpacked(packed)
    keys = words_of(row, s.tokens.shape[1])
    for first in range(0, len(keys), index.AHEAD):
        last = min(first + index.AHEAD, len(keys))
        _look_ahead(s, keys[first:last], found[first:last])
        for i in range(first, last):
            found[i] = index.find(s, index.root_parent(_ROOT), np.int64(found[i]) + 2**31, keys[i])


@compiled
def publish(packed: Packed, named: I32, row: U8, held: I32, twins: bool) -> int:
    """Name each frame by its key in `row`; without `twins`, only if no frame has that key.

    Returns: ALL, or the index of a frame that is not mapped, has another key, or was named before in this batch.
    Modifies: held (int32 [n]), the frame that has each key
    """
    s = unpacked(packed)
    keys = words_of(row, s.tokens.shape[1])
    for i in range(len(named)):
        frame = np.int64(named[i])
        if not _can_have(s, frame, keys[i]):
            _mark(s, named[:i], -_MARK)
            return i
        s.frames[frame].published += _MARK
    _mark(s, named, -_MARK)
    for first in range(0, len(named), index.AHEAD):
        last = min(first + index.AHEAD, len(named))
        _look_ahead(s, keys[first:last], held[first:last])
        for i in range(first, last):
            held[i] = _name(s, np.int64(named[i]), keys[i], np.int64(held[i]) + 2**31, twins)
    return ALL


@inlined
def _can_have(s: State, frame: int, key: I32) -> bool:
    """Return whether `frame` is mapped, has no other name than `key`, and was not seen before in this batch."""
    if frame < 0 or frame >= len(s.frames) or s.frames[frame].status != MAPPED or s.frames[frame].published >= _MARK:
        return False
    return s.frames[frame].published == 0 or _has_key(s, frame, key)


@inlined
def _has_key(s: State, frame: int, key: I32) -> bool:
    different = np.int32(0)
    for i in range(len(key)):
        different |= s.tokens[frame, i] ^ key[i]
    return bool(different == 0)


@inlined
def _mark(s: State, some: I32, change: int) -> None:
    for frame in some:
        s.frames[frame].published = int(s.frames[frame].published) + change


@inlined
def _name(s: State, frame: int, key: I32, prefix_hash: int, twins: bool) -> int:
    """Publish `frame` under `key`, and return the frame that has the key."""
    if s.frames[frame].published:
        return frame
    if not twins:
        existing = index.find(s, index.root_parent(_ROOT), prefix_hash, key)
        if existing >= 0:
            return existing
    for i in range(len(key)):
        s.tokens[frame, i] = key[i]
    index.insert(s, frame, index.root_parent(_ROOT), prefix_hash)
    return frame


@compiled
def unpublish(packed: Packed, some: I32) -> int:
    """Take the names of the frames away, and free those that nothing but the name kept.

    Returns: ALL, or the index of a frame beyond the pool
    """
    s = unpacked(packed)
    for i in range(len(some)):
        if some[i] < 0 or some[i] >= len(s.frames):
            return i
    for i in range(len(some)):
        frame = np.int64(some[i])
        if s.frames[frame].published:
            index.remove(s, frame)
        if s.frames[frame].status == CACHED:
            frames.free_cached(s, frame)
    return ALL


@compiled
def victims(packed: Packed, found: I32, reg: I64) -> int:
    """Write the frames that are evicted next to `found`, in that order, and return how many they are.

    reg: int64 [registers], a copy of `State.reg`. The order is found by the code that evicts; then all is put back.
    """
    s = unpacked(packed)
    count = quotas.evict_frames(s, len(found), found) if len(found) else 0
    eviction.put_back(s, found[:count], reg)
    return count


@compiled
def settle(packed: Packed, references: I32) -> tuple[int, int]:
    """Drop the references that each frame has beyond references[frame].

    Returns: (ALL, how many), or (a frame that has fewer references, 0): then nothing was changed
    """
    s = unpacked(packed)
    for frame in range(len(s.frames)):
        if references[frame] < 0 or references[frame] > s.frames[frame].refs:
            return frame, 0
    dropped = 0
    for frame in range(len(s.frames)):
        while references[frame] < s.frames[frame].refs:
            frames.drop(s, frame, KEEP_NAMED, 0, 0)
            dropped += 1
    return ALL, dropped
