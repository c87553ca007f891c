"""Address spaces: rows of the page table. Compiled functions over `State`: open, fork, truncate, punch, release, publish.

A row holds `num_pages` frames (or holes) and three lengths:

    0            complete * S         length             planned
    |── published pages ──|── committed ──|── outstanding ──|          num_pages == ceil(planned / S)   (I5)

Pages are always dropped from the tail, so that a page is evictable before its prefix (I9). Pages behind a punched one are not left
cached, as their prefix may be gone; unless others have left a successor of theirs cached, which shows that it is not.

A user's pin is a row too (HELD), which maps what it protects; nobody plans on it.
"""

from __future__ import annotations

import numpy as np

from pagedkv.core.compiled import allocating, compiled, inlined, prefetch
from pagedkv.core.pool import frames, free_runs
from pagedkv.core.pool.accounts import register
from pagedkv.core.prefix import index
from pagedkv.core.state import (
    ASKED,
    ASKED_BY,
    BELOW_PAGE,
    CACHED,
    CHUNK_FRAMES,
    CLOSING,
    DEDUPLICATED,
    FOLLOWING,
    HELD,
    HOLE,
    I32,
    KEY,
    MATCHED,
    MATCHED_BY,
    MISSED_EVICTED,
    MISSED_NEW,
    NO_HOLE,
    NUM_REGISTERS,
    NUM_UNUSED_ASIDS,
    OPEN,
    PINNED,
    PUBLISHING,
    UNUSED,
    State,
)
from pagedkv.core.tables import layer_groups


@compiled
def _new_row(s: State, root: int, seed: int) -> int:
    """A row for each group; names the first."""
    s.reg[NUM_UNUSED_ASIDS] -= 1
    asid = s.spaces[s.reg[NUM_UNUSED_ASIDS]].unused_asid
    for row in range(asid, asid + len(s.groups)):
        s.spaces[row].status = OPEN if row == asid else FOLLOWING
        s.spaces[row].root = root
        s.spaces[row].seed = seed
        s.spaces[row].advice = 0
        s.spaces[row].no_publish = 0
        s.spaces[row].complete = 0
        s.spaces[row].outstanding = 0
        s.spaces[row].first_hole = NO_HOLE
        _set_length(s, row, 0, 0)
    s.roots[root, 0] += 1
    return asid


@inlined
def _set_length(s: State, row: int, length: int, num_pages: int) -> None:
    s.spaces[row].length = length
    s.spaces[row].planned = length
    s.spaces[row].num_pages = num_pages


@compiled
def open_space(s: State, root: int, seed: int, advice: int, token_ids: I32) -> tuple[int, int]:
    """A new row that maps the longest published prefix of `token_ids` (int32 [n]), short of its last token, and its generation.

    O(pages matched).
    """
    asid = _new_row(s, root, seed)
    size = s.tokens.shape[1]
    pages, gone = match_prefix(s, root, seed, token_ids, s.table[asid])
    parent = s.table[asid, pages - 1] if pages else index.root_parent(root)
    layer_groups.map_companions(s, asid, pages)
    for page in range(pages):
        frames.map_matched(s, s.table[asid, page])
    held, matched = pages, pages * size
    asked = max(0, (len(token_ids) - 1) // size * size)
    if len(s.successors):
        asked = max(0, len(token_ids) - 1)
        frame, common = index.find_part(s, parent, token_ids[matched:asked])
        if frame >= 0:  # others see this page: the first write copies it
            frames.map_matched(s, frame)
            s.table[asid, pages] = frame
            held += 1
            matched += common
    s.reg[ASKED] += asked
    s.reg[BELOW_PAGE] += max(0, len(token_ids) - 1) - asked
    s.reg[MATCHED] += matched
    if len(s.reg) > NUM_REGISTERS:
        s.reg[register(s.roots[root, 2], ASKED_BY)] += asked
        s.reg[register(s.roots[root, 2], MATCHED_BY)] += matched
    s.reg[MISSED_EVICTED if gone else MISSED_NEW] += asked - matched
    for row in range(asid, asid + len(s.groups)):
        s.spaces[row].advice = advice
        _set_length(s, row, matched, held)
    s.spaces[asid].complete = pages
    return asid, int(s.spaces[asid].generation)


@compiled
def match_prefix(s: State, root: int, seed: int, token_ids: I32, found: I32) -> tuple[int, bool]:
    """(pages, whether the next one was evicted not long ago): the longest published prefix that no group lacks, short of the last token.

    Its frames are written into `found`, which is as long as a known prefix can be; nothing else is changed.
    """
    leaders, gone = _match_leaders(s, root, seed, token_ids, found)
    pages = layer_groups.covered(s, found, leaders)
    found[pages:leaders] = HOLE
    return pages, gone or pages < leaders  # companions were published with their leaders


@compiled
def _match_leaders(s: State, root: int, seed: int, token_ids: I32, found: I32) -> tuple[int, bool]:
    size = s.tokens.shape[1]
    parent, fingerprint = index.root_parent(root), seed
    # a row is at least as wide as the pool: no known prefix is longer
    whole = min(max(0, (len(token_ids) - 1) // size), len(found))
    for first in range(0, whole, index.AHEAD):
        last = min(first + index.AHEAD, whole)
        for page in range(first, last):
            fingerprint = index.fingerprint_of(s.reg[KEY], fingerprint, token_ids[page * size : (page + 1) * size])
            index.prefetch_bucket(s, fingerprint)
            found[page] = fingerprint - 2**31  # fits
        for page in range(first, last):
            index.prefetch_candidate(s, int(found[page]) + 2**31)
        for page in range(first, last):
            index.prefetch_next(s, int(found[page]) + 2**31)
        for page in range(first, last):
            fingerprint = int(found[page]) + 2**31
            frame = index.find(s, parent, fingerprint, token_ids[page * size : (page + 1) * size])
            if frame < 0:
                found[page:last] = HOLE  # the row is as it was
                return page, index.remembers(s.ghosts, fingerprint)
            found[page] = frame
            parent = frame
    return whole, False


@compiled
def fork_space(s: State, asid: int) -> int:
    """A new row that shares every frame of `asid`, which has no outstanding plan. O(pages)."""
    child = _new_row(s, s.spaces[asid].root, s.spaces[asid].seed)
    for group in range(len(s.groups)):
        row, new = asid + group, child + group
        for page in range(s.spaces[row].num_pages):
            frame = s.table[row, page]
            s.table[new, page] = frame
            if frame != HOLE:
                s.frames[frame].refs += 1  # it is mapped already
        s.spaces[new].advice = s.spaces[row].advice
        s.spaces[new].complete = s.spaces[row].complete
        s.spaces[new].no_publish = s.spaces[row].no_publish
        s.spaces[new].first_hole = s.spaces[row].first_hole
        _set_length(s, new, s.spaces[row].length, s.spaces[row].num_pages)
    return child


@inlined
def keeps(s: State, asid: int, group: int, page: int) -> bool:
    """Whether the frame of `page` may stay cached when the space lets go of it: its prefix is mapped, or certain to be there.

    A companion's prefix is its leader and what is before that; a hole in its own row says nothing.
    """
    if page < s.spaces[asid].first_hole:
        return True
    frame = s.table[asid + group, page]
    # behind a hole. No successor was ever left cached: none of ours can be orphaned, and the walk to the root is saved
    return s.frames[frame].floor > 0 and s.frames[frame].published > 0 and index.reaches_root(s, frame)


@compiled
def touch_prefix(s: State, parent: int) -> None:
    """A page after `parent` was left cached, and its prefix was before: move that behind it (I9)."""
    while parent >= 0:
        if s.frames[parent].status == CACHED:
            frames.touch(s, parent)
        parent = s.frames[parent].parent


@inlined
def _unmap(s: State, asid: int, group: int, page: int) -> None:
    frame = s.table[asid + group, page]
    if frame == HOLE:
        return
    keep = keeps(s, asid, group, page)
    parent = s.frames[frame].parent
    if frames.drop_reference(s.frames, s.reg, frame, keep, page * s.tokens.shape[1], s.spaces[asid].advice):
        frames.free(s, frame)
    s.table[asid + group, page] = HOLE
    if keep and page > s.spaces[asid].first_hole and s.frames[frame].status == CACHED:
        touch_prefix(s, parent)


@compiled
def drop_tail(s: State, asid: int, num_pages: int) -> None:
    """Unmap the pages of `asid` from `num_pages` on: companions before their leaders, in each row the last one first."""
    for group in range(len(s.groups) - 1, -1, -1):
        _drop_row(s, asid, group, num_pages)
    for row in range(asid, asid + len(s.groups)):
        s.spaces[row].num_pages = min(s.spaces[row].num_pages, num_pages)


@inlined
def _drop_row(s: State, asid: int, group: int, num_pages: int) -> None:
    first_hole, advice, size, row = s.spaces[asid].first_hole, s.spaces[asid].advice, s.tokens.shape[1], asid + group
    first = count = 0  # frames in a row, to be put back together
    for page in range(s.spaces[row].num_pages - 1, num_pages - 1, -1):
        frame = s.table[row, page]
        if frame == HOLE or page > first_hole:
            _unmap(s, asid, group, page)
            continue
        s.table[row, page] = HOLE
        if not frames.drop_reference(s.frames, s.reg, frame, True, page * size, advice):
            continue
        if s.frames[frame].published:
            frames.free(s, frame)
            continue
        frames.vacate(s.frames, s.reg, frame)
        if count > 0 and (frame != first - 1 or first % CHUNK_FRAMES == 0):
            free_runs.put(s.chunks, s.reg, first, count)
            count = 0
        first, count = frame, count + 1
    if count > 0:
        free_runs.put(s.chunks, s.reg, first, count)


@compiled
def truncate_space(s: State, asid: int, length: int) -> None:
    """Forget the tokens of `asid` from `length` on; no plan is outstanding, and no window sees what was given back."""
    size = s.tokens.shape[1]
    pages = (length + size - 1) // size
    drop_tail(s, asid, pages)
    if length == 0:
        s.spaces[asid].no_publish = 0  # nothing old is left
    for row in range(asid, asid + len(s.groups)):
        _set_length(s, row, length, pages)
        s.spaces[row].complete = min(s.spaces[row].complete, length // size)
        if s.spaces[row].first_hole >= pages:
            s.spaces[row].first_hole = NO_HOLE


@compiled
def punch_space(s: State, asid: int, first: int, last: int) -> None:
    """Unmap the pages first .. last-1 of `asid`, leaving holes. They are full and committed."""
    for page in range(last - 1, first - 1, -1):
        for group in range(len(s.groups) - 1, -1, -1):
            _unmap(s, asid, group, page)
    for row in range(asid, asid + len(s.groups)):
        s.spaces[row].first_hole = min(s.spaces[row].first_hole, first)


@compiled
def slide(s: State, asid: int, before: int) -> None:
    """Give back what no query will see again, now that `asid` holds more than `before` committed tokens: pages behind the windows."""
    for group in range(len(s.groups) - 1, -1, -1):
        row = asid + group
        if s.groups[group, 0] > 0:
            first = layer_groups.sink_pages(s, group)
            if s.spaces[row].first_hole != NO_HOLE:  # what is before was given back then
                first = max(first, layer_groups.first_seen(s, group, before))
            last = min(layer_groups.first_seen(s, group, s.spaces[row].length), s.spaces[row].num_pages)
            for page in range(last - 1, first - 1, -1):
                _unmap(s, asid, group, page)
            if first < last:
                s.spaces[row].first_hole = min(s.spaces[row].first_hole, first)


@compiled
def close_space(s: State, asid: int) -> None:
    """Unmap everything and give the row back; while a plan is outstanding only say so, and the last one settled does it."""
    if s.spaces[asid].outstanding > 0:
        s.spaces[asid].status = CLOSING
        return
    drop_tail(s, asid, np.int64(0))  # a constant would be compiled for itself
    s.roots[s.spaces[asid].root, 0] -= 1
    for row in range(asid, asid + len(s.groups)):
        s.spaces[row].status = UNUSED
    s.spaces[s.reg[NUM_UNUSED_ASIDS]].unused_asid = asid
    s.reg[NUM_UNUSED_ASIDS] += 1


@compiled
def count_use(s: State, asid: int) -> None:
    """Every page of `asid` counts as matched once more."""
    for row in range(asid, asid + len(s.groups)):
        for page in range(s.spaces[row].num_pages):
            frame = s.table[row, page]
            if frame != HOLE:
                s.frames[frame].uses = min(255, int(s.frames[frame].uses) + 1)


@compiled
def publish_pages(s: State, asid: int) -> None:
    """Publish the committed full pages of `asid`. Where an equal page is known already, map that one and give ours back.

    So an identity has one frame, a prefix is one chain, and prompts that were computed twice at the same time share afterwards; but
    not while a plan of the space is outstanding.
    """
    if s.reg[PUBLISHING] == 0 or s.spaces[asid].first_hole != NO_HOLE or s.spaces[asid].no_publish:
        return
    parent, fingerprint = index.root_parent(s.spaces[asid].root), int(s.spaces[asid].seed)
    complete, full = int(s.spaces[asid].complete), s.spaces[asid].length // s.tokens.shape[1]
    if complete > 0:
        parent = s.table[asid, complete - 1]
        fingerprint = int(s.frames[parent].fingerprint)
    for page in range(complete, full):  # hashed first, as in open
        frame = s.table[asid, page]
        if not s.frames[frame].published:
            s.frames[frame].fingerprint = index.fingerprint_of(s.reg[KEY], fingerprint, s.tokens[frame])
            index.prefetch_bucket(s, s.frames[frame].fingerprint)
            prefetch(s.ghosts, np.int64(s.frames[frame].fingerprint) & (len(s.ghosts) - 1))
        fingerprint = int(s.frames[frame].fingerprint)
    for page in range(complete + 1, full):  # of one page alone nothing would have arrived
        index.prefetch_candidate(s, int(s.frames[s.table[asid, page]].fingerprint))
    for page in range(complete + 1, full):
        index.prefetch_next(s, int(s.frames[s.table[asid, page]].fingerprint))
    for page in range(complete, full):
        frame = s.table[asid, page]
        if not s.frames[frame].published:
            fingerprint = int(s.frames[frame].fingerprint)
            existing = index.find(s, parent, fingerprint, s.tokens[frame])
            if existing >= 0 and s.spaces[asid].outstanding > 0:
                return  # a plan under way reads ours, perhaps through an older table: the last one settled comes back to this
            if existing >= 0:
                frames.share(s.frames, s.reg, existing)
                s.table[asid, page] = existing
                frames.drop(s, frame, False, page, 0)
                s.reg[DEDUPLICATED] += 1
                frame = existing
            else:
                index.insert(s, frame, parent, fingerprint)
        if len(s.groups) > 1 and not layer_groups.publish_companions(s, asid, page):
            return
        s.spaces[asid].complete = page + 1
        parent = frame


@compiled
def pin_space(s: State, asid: int) -> int:
    """A HELD row that maps the committed full pages of `asid`. O(pages)."""
    held = _new_row(s, s.spaces[asid].root, s.spaces[asid].seed)
    pages = s.spaces[asid].length // s.tokens.shape[1]
    for group in range(len(s.groups)):
        row = asid + group
        s.spaces[held + group].first_hole = s.spaces[row].first_hole if s.spaces[row].first_hole < pages else NO_HOLE
        for page in range(pages):
            frame = s.table[row, page]
            s.table[held + group, page] = frame
            if frame != HOLE:
                frames.share(s.frames, s.reg, frame)
    _hold(s, held, pages)
    return held


@inlined
def _hold(s: State, asid: int, pages: int) -> None:
    s.spaces[asid].status = HELD
    for row in range(asid, asid + len(s.groups)):
        _set_length(s, row, pages * s.tokens.shape[1], pages)
    s.reg[PINNED] += frames_in(s, asid, pages)


@compiled
def frames_in(s: State, asid: int, pages: int) -> int:
    """How many frames the first `pages` pages of a space have, in all groups: holes are none."""
    count = 0
    for row in range(asid, asid + len(s.groups)):
        for page in range(pages):
            count += s.table[row, page] != HOLE
    return count


@allocating
def prefix_closure(s: State, wanted: I32) -> tuple[int, I32]:
    """`wanted` and all that is before them, prefixes first; or (the first of them that has no published prefix, nothing)."""
    seen = np.zeros(len(s.frames), np.uint8)
    closure = np.empty(len(s.frames), np.int32)
    count = 0
    for frame in wanted:
        if s.frames[frame].published == 0 or not index.reaches_root(s, frame):
            return frame, closure[:0]
        new = 0
        while frame >= 0 and seen[frame] == 0:
            seen[frame] = 1
            closure[count + new] = frame
            new += 1
            frame = s.frames[frame].parent
        closure[count : count + new] = closure[count : count + new][::-1].copy()
        count += new
    return -1, closure[:count]


@compiled
def pin_frames(s: State, closure: I32) -> int:
    """A HELD row that maps `closure`, prefixes first and at least one, under the root of the first. The table is wide enough."""
    row = _new_row(s, -2 - s.frames[closure[0]].parent, 0)
    for page in range(len(closure)):
        frames.share(s.frames, s.reg, closure[page])
        s.table[row, page] = closure[page]
        for group in range(1, len(s.groups)):
            s.table[row + group, page] = HOLE
            s.spaces[row + group].first_hole = 0
    _hold(s, row, len(closure))
    return row


@compiled
def unpin_row(s: State, row: int) -> None:
    """Unmap what a HELD row protects, and give the row back."""
    s.reg[PINNED] -= frames_in(s, row, s.spaces[row].num_pages)
    close_space(s, row)
