"""Page tables: a row for each address space. Compiled functions over `State`: open, fork, truncate, publish, pin.

A row holds `num_pages` frames (or holes) and three lengths:

    0            complete * S         length             planned
    |── published pages ──|── committed ──|── outstanding ──|          num_pages == ceil(planned / S)   (I5)

Pages are always dropped from the tail, so that a page is evictable before its prefix (I9). If group 0 has a window, a
space may not map the prefix of its pages: a page behind a hole stays cached only if its prefix is still published.

A user's pin and a hint (core/hints.py) are rows too, with status HELD: they map frames, and no plan names them.
"""

from __future__ import annotations

import numpy as np

from pagedkv.core.compiled import allocating, compiled, inlined, inner, prefetch
from pagedkv.core.pool import frames, free_runs
from pagedkv.core.pool.accounts import register
from pagedkv.core.prefix import history, index
from pagedkv.core.state import (
    ALL_NAMED,
    ASKED,
    ASKED_BY,
    BELOW_PAGE,
    CACHED,
    CHARGED,
    CHUNK_FRAMES,
    CLOSED_LONG,
    CLOSING,
    DEDUPLICATED,
    EPOCH,
    FOLLOWING,
    HELD,
    HOLE,
    I32,
    IN_USE,
    KEY,
    LONG,
    MATCHED,
    MATCHED_BY,
    MISSED_EVICTED,
    MISSED_NEW,
    NIL,
    NO_HOLE,
    NUM_REGISTERS,
    NUM_UNUSED_ASIDS,
    OPEN,
    PASSED,
    PINNED,
    PUBLISHING,
    SALTED_PAGE,
    UNUSED,
    State,
)
from pagedkv.core.tables import layer_groups


@inner
def _new_row(s: State, root: int, seed: int) -> int:
    """Take a row for each group off the stack of unused asids, and return the row of group 0."""
    s.reg[NUM_UNUSED_ASIDS] -= 1
    asid = s.spaces[s.reg[NUM_UNUSED_ASIDS]].unused_asid
    for row in range(asid, asid + len(s.groups)):
        s.spaces[row].status = OPEN if row == asid else FOLLOWING
        s.spaces[row].root = root
        s.spaces[row].seed = seed
        s.spaces[row].advice = 0
        s.spaces[row].no_publish = 0
        s.spaces[row].named = ALL_NAMED
        s.spaces[row].complete = 0
        s.spaces[row].outstanding = 0
        s.spaces[row].first_hole = NO_HOLE
        _set_length(s, row, 0, 0)
    s.roots[root, IN_USE] += 1
    return asid


@inlined
def _set_length(s: State, row: int, length: int, num_pages: int) -> None:
    s.spaces[row].length = length
    s.spaces[row].planned = length
    s.spaces[row].num_pages = num_pages


@compiled
def open_space(s: State, root: int, seed: int, token_ids: I32, most: int, restoring: bool) -> tuple[int, int]:
    """Open a row that maps the longest published prefix of `token_ids` (int32 [n]), short of the last token.

    most:      how many tokens are mapped at most.
    restoring: whether the prompt counts in no statistic, and group 0 gives back no page behind its window.
    Returns: (asid, generation). O(pages matched).
    """
    asid = _new_row(s, root, seed)
    size = s.tokens.shape[1]
    pages, frame, common, evicted = _match_prefix(s, root, seed, token_ids, most, s.table[asid])
    num_pages, matched = pages, pages * size
    asked = max(0, (len(token_ids) - 1) // size * size)
    if frame >= 0:  # another space sees this page: the first write copies it
        s.table[asid, pages] = frame
        num_pages += 1
        matched += common
    layer_groups.map_companions(s, asid, matched)
    for page in range(num_pages):
        frames.map_matched(s, s.table[asid, page])
    if not restoring:
        _count_prompt(s, root, (asked, max(0, len(token_ids) - 1) - asked, matched), evicted)
    for row in range(asid, asid + len(s.groups)):
        _set_length(s, row, matched, num_pages)
    s.spaces[asid].complete = pages
    if layer_groups.leader_has_window(s) and not restoring:
        slide_windows(s, asid, np.int64(0), np.int64(s.spaces[asid].length), restoring)
    return asid, int(s.spaces[asid].generation)


@inlined
def _count_prompt(s: State, root: int, tokens: tuple[int, int, int], evicted: bool) -> None:
    """Count the tokens of a prompt: (looked for, beyond the last whole page, found)."""
    asked, below_page, matched = tokens
    s.reg[ASKED] += asked
    s.reg[BELOW_PAGE] += below_page
    s.reg[MATCHED] += matched
    if len(s.reg) > NUM_REGISTERS:
        s.reg[register(s.roots[root, CHARGED], ASKED_BY)] += asked
        s.reg[register(s.roots[root, CHARGED], MATCHED_BY)] += matched
    s.reg[MISSED_EVICTED if evicted else MISSED_NEW] += asked - matched


@inner
def _match_prefix(s: State, root: int, seed: int, token_ids: I32, most: int, found: I32) -> tuple[int, int, int, bool]:
    """Find the longest published prefix that every group has, of at most `most` tokens, short of the last token.

    Returns: (whole pages, a frame whose page begins as the next page does or -1, how many tokens they have in common,
             whether the next page was evicted not long ago). A part of a page is found at `most`.
    Modifies: `found` (int32 [at least pages]), which receives the frames of group 0. Nothing else is changed.
    """
    size = s.tokens.shape[1]
    leaders, evicted = _match_leaders(s, root, seed, token_ids, found)
    known = min(leaders * size, most)
    length = layer_groups.usable_length(s, found, known)
    pages, common = length // size, length % size
    frame = found[pages] if common else -1
    found[pages:leaders] = HOLE
    return pages, frame, common, evicted or length < known  # companions were published with their leaders


@compiled
def find_prefix(s: State, root: int, seed: int, token_ids: I32, most: int, found: I32) -> tuple[int, int, int, bool]:
    """Return the result of `_match_prefix`, which compiled functions call."""
    return _match_prefix(s, root, seed, token_ids, most, found)


@inner
def _match_leaders(s: State, root: int, seed: int, token_ids: I32, found: I32) -> tuple[int, bool]:
    size = s.tokens.shape[1]
    parent, prefix_hash = index.root_parent(index.first_root(s.roots, root)), seed
    has_salts = s.roots[root, SALTED_PAGE] >= 0
    # a row is at least as wide as the pool, so no published prefix is longer
    whole = min(max(0, (len(token_ids) - 1) // size), len(found))
    for first in range(0, whole, index.AHEAD):
        last = min(first + index.AHEAD, whole)
        for page in range(first, last):
            if has_salts:
                prefix_hash = index.salted(s.roots, prefix_hash, index.salt_at(s.roots, root, page))
            prefix_hash = index.prefix_hash_of(s.reg[KEY], prefix_hash, token_ids[page * size : (page + 1) * size])
            index.prefetch_bucket(s, prefix_hash)
            found[page] = prefix_hash - 2**31  # uint32 as int32
        for page in range(first, last):
            index.prefetch_candidate(s, int(found[page]) + 2**31)
        for page in range(first, last):
            index.prefetch_next(s, int(found[page]) + 2**31)
        for page in range(first, last):
            prefix_hash = int(found[page]) + 2**31
            salt = index.salt_at(s.roots, root, page) if has_salts else 0
            frame = index.find(s, parent, prefix_hash, token_ids[page * size : (page + 1) * size], salt)
            if frame < 0:
                found[page:last] = HOLE  # as before: the prefix hashes were scratch
                return page, index.remembers(s.ghosts, prefix_hash)
            found[page] = frame
            parent = frame
    return whole, False


@compiled
def fork_space(s: State, asid: int) -> int:
    """Open a row that shares every frame of `asid`, which has no outstanding plan, and return it. O(pages)."""
    child = _new_row(s, s.spaces[asid].root, s.spaces[asid].seed)
    for group in range(len(s.groups)):
        row, new = asid + group, child + group
        for page in range(s.spaces[row].num_pages):
            frame = s.table[row, page]
            s.table[new, page] = frame
            if frame != HOLE:
                s.frames[frame].refs += 1  # mapped already
        s.spaces[new].advice = s.spaces[row].advice
        s.spaces[new].complete = s.spaces[row].complete
        s.spaces[new].no_publish = s.spaces[row].no_publish
        s.spaces[new].named = s.spaces[row].named
        s.spaces[new].first_hole = s.spaces[row].first_hole
        _set_length(s, new, s.spaces[row].length, s.spaces[row].num_pages)
    return child


@inlined
def may_stay_cached(s: State, asid: int, group: int, page: int) -> bool:
    """Return whether the frame of `page` may stay cached after the space unmaps it: is its whole prefix there?

    The prefix of a companion is its leader and the pages before the leader; a hole in its own row does not matter.
    """
    if page < s.spaces[asid].first_hole:
        return True
    frame = s.table[asid + group, page]
    return s.frames[frame].published > 0 and index.nearest_evictable(s, frame) != index.PREFIX_GONE


@inner
def touch_prefix(s: State, parent: int) -> None:
    """Move each cached frame of the prefix that ends in `parent` to the newest end of its list, the last frame first.

    To be called after a page behind this prefix was cached: the page is then evicted before its prefix (I9).
    """
    while parent >= 0:
        if s.frames[parent].status == CACHED:
            frames.touch(s, parent)
        parent = s.frames[parent].parent


@inner
def drop_tail(s: State, asid: int, num_pages: int) -> None:
    """Unmap the pages of `asid` from `num_pages` on: companions before their leaders, and the last page first."""
    if layer_groups.leader_has_window(s) and s.spaces[asid].first_hole != NO_HOLE:
        _drop_behind_hole(s, asid, num_pages)
    for group in range(len(s.groups) - 1, -1, -1):
        _drop_row(s, asid, group, num_pages)
    for row in range(asid, asid + len(s.groups)):
        s.spaces[row].num_pages = min(s.spaces[row].num_pages, num_pages)


@inner
def _drop_behind_hole(s: State, asid: int, num_pages: int) -> None:
    """Unmap the pages of `asid` from `num_pages` on that lie behind its first hole, each page after its prefix."""
    last = NIL
    for group in range(len(s.groups)):
        for page in range(max(num_pages, s.spaces[asid].first_hole), s.spaces[asid + group].num_pages):
            frame = s.table[asid + group, page]
            _give_back(s, asid, group, page)
            if group == 0 and frame != HOLE and s.frames[frame].status == CACHED:
                last = frame
    while last >= 0:  # the sequence ends here: its whole prefix was used now
        for group in range(1, len(s.groups)):
            companion = index.find_companion(s, last, group)
            if companion >= 0 and s.frames[companion].status == CACHED:
                frames.touch(s, companion)
        if s.frames[last].status == CACHED:
            frames.touch(s, last)
        last = s.frames[last].parent


@inlined
def _drop_row(s: State, asid: int, group: int, num_pages: int) -> None:
    advice, size, row = s.spaces[asid].advice, s.tokens.shape[1], asid + group
    first = count = 0  # a run of free frames, put back at once
    for page in range(s.spaces[row].num_pages - 1, num_pages - 1, -1):
        frame = s.table[row, page]
        if frame == HOLE:
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
    """Drop the tokens of `asid` from `length` on. No plan is outstanding; no window sees a page that was given back."""
    size = s.tokens.shape[1]
    pages = (length + size - 1) // size
    drop_tail(s, asid, pages)
    if length == 0:
        s.spaces[asid].no_publish = 0  # no page from before forget() is left
    for row in range(asid, asid + len(s.groups)):
        _set_length(s, row, length, pages)
        s.spaces[row].complete = min(s.spaces[row].complete, length // size)
        if s.spaces[row].first_hole >= pages:
            s.spaces[row].first_hole = NO_HOLE
    if s.spaces[asid].named == ALL_NAMED:
        return
    if s.spaces[asid].first_hole != NO_HOLE:
        s.spaces[asid].named = min(s.spaces[asid].named, length // size)  # the prefix behind the window may be gone
    elif length <= np.int64(s.spaces[asid].named) * size:
        s.spaces[asid].named = ALL_NAMED  # no token without an id is left


@inlined
def slide_windows(s: State, asid: int, before: int, length: int, restoring: bool) -> None:
    """Unmap the pages behind the windows of `asid`, which no query sees again, except those to keep.

    length:    the position of the next query: the space's length, or `ready` with recurrent states.
    before:    the same position before this commit.
    restoring: whether group 0 keeps all pages: a page that was given back could be evicted for the next one.
    """
    for group in range(len(s.groups) - 1, 0 if restoring else -1, -1):
        row = asid + group
        if s.groups[group, 0] > 0:
            first = layer_groups.num_sink_pages(s, group)
            if s.spaces[row].first_hole != NO_HOLE:  # earlier pages were given back earlier
                first = max(first, layer_groups.first_kept_page(s, group, before))
            last = min(layer_groups.first_kept_page(s, group, length), s.spaces[row].num_pages)
            if first < last:
                _leave_behind(s, asid, group, first, last)


@inner
def _leave_behind(s: State, asid: int, group: int, first: int, last: int) -> None:
    """Unmap the pages first .. last-1 of `asid`, which lie behind the window of `group`."""
    behind = max(first, s.spaces[asid].first_hole) if layer_groups.leader_has_window(s) else last
    for page in range(behind, last):
        _give_back(s, asid, group, page)
    for page in range(min(behind, last) - 1, first - 1, -1):
        frame = s.table[asid + group, page]
        if frame != HOLE:
            s.table[asid + group, page] = HOLE
            frames.drop(s, frame, True, page, s.spaces[asid].advice)
    s.spaces[asid + group].first_hole = min(s.spaces[asid + group].first_hole, first)


@inner
def _give_back(s: State, asid: int, group: int, page: int) -> None:
    """Unmap a page whose prefix the space may not map any more; a hole stays one."""
    frame = s.table[asid + group, page]
    if frame != HOLE:
        s.table[asid + group, page] = HOLE
        frames.drop_behind_window(s, frame, page, s.spaces[asid].advice)


@inner
def close_space(s: State, asid: int) -> None:
    """Unmap every page and give the row back. While a plan is outstanding, mark the row CLOSING for the last plan."""
    if s.spaces[asid].outstanding > 0:
        s.spaces[asid].status = CLOSING
        return
    num_pages = s.spaces[asid].num_pages
    s.reg[CLOSED_LONG] += num_pages >= LONG
    drop_tail(s, asid, np.int64(0))  # a literal 0 would be one more type to compile for
    s.roots[s.spaces[asid].root, IN_USE] -= 1
    for row in range(asid, asid + len(s.groups)):
        s.spaces[row].status = UNUSED
        s.spaces[row].complete = num_pages
    s.spaces[s.reg[NUM_UNUSED_ASIDS]].unused_asid = asid
    s.reg[NUM_UNUSED_ASIDS] += 1
    if len(s.checkpoints):
        index.note_loss(s, -1 - asid)


@compiled
def release_space(s: State, asid: int) -> None:
    """Make every handle of `asid` stale (I8), and close it."""
    s.spaces[asid].generation = (int(s.spaces[asid].generation) + 1) & 0xFFFFFFFF
    close_space(s, asid)


@compiled
def retire_spaces(s: State, epoch: int, passed: int, asids: I32) -> None:
    """Open `epoch`, while the epochs after `passed` have not passed, and release `asids` under it."""
    s.reg[EPOCH], s.reg[PASSED] = epoch, passed
    for asid in asids:
        release_space(s, np.int64(asid))


@compiled
def reorder_spaces(s: State, forked: I32, released: I32) -> None:
    """Fork each space of `forked`, whose entries become the children, and then release the spaces of `released`."""
    for i in range(len(forked)):
        forked[i] = fork_space(s, np.int64(forked[i]))
    for asid in released:
        release_space(s, np.int64(asid))


@inner
def _publishable(s: State, asid: int, complete: int, full: int) -> int:
    """Return up to which of its `full` pages a space with a hole can publish, of which `complete` are published.

    No prompt would find a page whose prefix was evicted behind the window. It and all later ones are never published.
    """
    before = s.table[asid, complete - 1] if complete > 0 else HOLE
    last = complete
    if before != HOLE and index.nearest_evictable(s, before) != index.PREFIX_GONE:
        while last < full and s.table[asid, last] != HOLE:
            last += 1
    if last < full:
        s.spaces[asid].named = last
    return last


@inner
def publish_pages(s: State, asid: int) -> None:
    """Publish the committed full pages of `asid`. If an equal page is published already, map that page and free ours.

    So an identity has one frame, a prefix is one chain, and two prompts that were computed at the same time share
    afterwards. No page is exchanged while a plan of the space is outstanding.
    """
    if s.reg[PUBLISHING] == 0 or s.spaces[asid].no_publish:
        return
    root = np.int64(s.spaces[asid].root)
    has_salts = s.roots[root, SALTED_PAGE] >= 0
    parent, prefix_hash = index.root_parent(index.first_root(s.roots, root)), int(s.spaces[asid].seed)
    complete = int(s.spaces[asid].complete)
    full = min(s.spaces[asid].length // s.tokens.shape[1], np.int64(s.spaces[asid].named))
    if s.spaces[asid].first_hole < full:
        full = _publishable(s, asid, complete, full)
    if full > complete > 0:
        parent = s.table[asid, complete - 1]
        prefix_hash = int(s.frames[parent].prefix_hash)
    noted = prefix_hash
    for page in range(complete, full):  # hash all pages first, as _match_leaders does
        frame = s.table[asid, page]
        if not s.frames[frame].published:
            if has_salts:
                prefix_hash = index.salted(s.roots, prefix_hash, index.salt_at(s.roots, root, page))
            s.frames[frame].prefix_hash = index.prefix_hash_of(s.reg[KEY], prefix_hash, s.tokens[frame])
            index.prefetch_bucket(s, s.frames[frame].prefix_hash)
            prefetch(s.ghosts, np.int64(s.frames[frame].prefix_hash) & (len(s.ghosts) - 1))
        prefix_hash = int(s.frames[frame].prefix_hash)
    for page in range(complete + 1, full):  # the prefetch for a single page would come too late
        index.prefetch_candidate(s, int(s.frames[s.table[asid, page]].prefix_hash))
    for page in range(complete + 1, full):
        index.prefetch_next(s, int(s.frames[s.table[asid, page]].prefix_hash))
    for page in range(complete, full):
        frame = s.table[asid, page]
        if not s.frames[frame].published:
            prefix_hash = int(s.frames[frame].prefix_hash)
            salt = index.salt_at(s.roots, root, page) if has_salts else 0
            existing = index.find(s, parent, prefix_hash, s.tokens[frame], salt)
            if existing >= 0 and s.spaces[asid].outstanding > 0:
                return  # an outstanding plan reads our page, perhaps through an older table; the last one publishes it
            if existing >= 0:
                frames.share(s.frames, s.reg, existing)
                s.table[asid, page] = existing
                frames.drop(s, frame, False, page, 0)
                s.reg[DEDUPLICATED] += 1
                frame = existing
            else:
                index.insert(s, frame, parent, prefix_hash, salt)
                if len(s.history):
                    first = np.int64(index.first_root(s.roots, root))
                    history.note(s, first, np.int64(index.salted(s.roots, noted, salt)), s.tokens[frame])
        noted = int(s.frames[frame].prefix_hash)
        if len(s.groups) > 1 and not layer_groups.publish_companions(s, asid, page):
            return
        s.spaces[asid].complete = page + 1
        parent = frame


@compiled
def pin_space(s: State, asid: int, most: int) -> int:
    """Open a HELD row that maps the committed full pages of `asid`, at most `most`, and return it. O(pages).

    The row publishes its pages at once. A space may not yet have done so while a plan is outstanding, but a pin must
    hold the frames that prompts find: a page that is published already is shared, not held twice.
    """
    pin = _new_row(s, s.spaces[asid].root, s.spaces[asid].seed)
    pages = min(s.spaces[asid].length // s.tokens.shape[1], most)
    for group in range(len(s.groups)):
        row = asid + group
        s.spaces[pin + group].first_hole = s.spaces[row].first_hole if s.spaces[row].first_hole < pages else NO_HOLE
        for page in range(pages):
            frame = s.table[row, page]
            s.table[pin + group, page] = frame
            if frame != HOLE:
                frames.share(s.frames, s.reg, frame)
    _hold(s, pin, pages)
    s.spaces[pin].complete = min(s.spaces[asid].complete, pages)
    s.spaces[pin].no_publish, s.spaces[pin].named = s.spaces[asid].no_publish, s.spaces[asid].named
    publish_pages(s, pin)
    s.spaces[pin].complete = s.spaces[pin].no_publish = 0  # a pin publishes no further page
    s.spaces[pin].named = ALL_NAMED
    return pin


@inlined
def _hold(s: State, asid: int, pages: int) -> None:
    s.spaces[asid].status = HELD
    for row in range(asid, asid + len(s.groups)):
        _set_length(s, row, pages * s.tokens.shape[1], pages)
    s.reg[PINNED] += frames_in(s, asid, pages)


@compiled
def frames_in(s: State, asid: int, pages: int) -> int:
    """Return how many frames the first `pages` pages of a space have in all groups; a hole has none."""
    count = 0
    for row in range(asid, asid + len(s.groups)):
        for page in range(pages):
            count += s.table[row, page] != HOLE
    return count


@allocating
def prefix_closure(s: State, wanted: I32) -> tuple[int, I32]:
    """Return (-1, `wanted` and the frames of their whole prefixes, prefixes first).

    If a frame of `wanted` is not published under a whole prefix: (that frame, no frames).
    """
    seen = np.zeros(len(s.frames), np.uint8)
    closure = np.empty(len(s.frames), np.int32)
    count = 0
    for frame in wanted:
        if s.frames[frame].published == 0 or not index.reaches_root(s, frame):
            return frame, closure[:0]
        first = count
        while frame >= 0 and seen[frame] == 0:
            seen[frame] = 1
            closure[count] = frame
            count += 1
            frame = s.frames[frame].parent
        for i in range((count - first) // 2):  # numba takes 1 s to compile the assignment of a slice
            closure[first + i], closure[count - 1 - i] = closure[count - 1 - i], closure[first + i]
    return -1, closure[:count]


@compiled
def pin_frames(s: State, closure: I32) -> int:
    """Open a HELD row that maps `closure` (one frame or more, prefixes first), and return it. The table is wide."""
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
    """Unmap the frames of a HELD row, and give the row back. Its handle is stale."""
    s.reg[PINNED] -= frames_in(s, row, s.spaces[row].num_pages)
    release_space(s, row)
