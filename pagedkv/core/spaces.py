"""Address spaces: rows of the page table. Compiled functions over `State`: open, fork, truncate, punch, release, publish.

A row holds `num_pages` frames (or holes) and three lengths:

    0            complete * S         length             planned
    |── published pages ──|── committed ──|── outstanding ──|          num_pages == ceil(planned / S)   (I5)

Pages are always dropped from the tail, so that a page is evictable before its prefix (I9). Pages behind a punched one are never left
cached: their prefix may be gone.
"""

from __future__ import annotations

from numba import njit

from pagedkv.core import frames, index
from pagedkv.core.state import (
    ASKED,
    CLOSING,
    DEDUPLICATED,
    HOLE,
    I32,
    MATCHED,
    NO_HOLE,
    NUM_SPARE,
    OPEN,
    PUBLISHING,
    UNUSED,
    State,
)


@njit(cache=True)
def _new_row(s: State, root: int) -> int:
    s.reg[NUM_SPARE] -= 1
    asid = s.spare[s.reg[NUM_SPARE]]
    s.spaces[asid].status = OPEN
    s.spaces[asid].root = root
    s.root_refs[root] += 1
    s.spaces[asid].length = 0
    s.spaces[asid].planned = 0
    s.spaces[asid].num_pages = 0
    s.spaces[asid].complete = 0
    s.spaces[asid].outstanding = 0
    s.spaces[asid].first_hole = NO_HOLE
    return asid


@njit(cache=True)
def open_space(s: State, root: int, token_ids: I32) -> int:
    """A new row that maps the longest published prefix of `token_ids` (int32 [n]), short of its last token. O(pages matched)."""
    asid = _new_row(s, root)
    size = s.tokens.shape[1]
    whole = max(0, (len(token_ids) - 1) // size)
    s.reg[ASKED] += whole * size
    parent = index.root_parent(root)
    pages = 0
    while pages < whole:
        frame = index.find(s, parent, token_ids[pages * size : (pages + 1) * size])
        if frame < 0:
            break
        frames.share(s, frame)
        s.table[asid, pages] = frame
        parent = frame
        pages += 1
    s.reg[MATCHED] += pages * size
    s.spaces[asid].num_pages = pages
    s.spaces[asid].complete = pages
    s.spaces[asid].length = pages * size
    s.spaces[asid].planned = pages * size
    return asid


@njit(cache=True)
def fork_space(s: State, asid: int) -> int:
    """A new row that shares every frame of `asid`, which has no outstanding plan. O(pages)."""
    child = _new_row(s, s.spaces[asid].root)
    for page in range(s.spaces[asid].num_pages):
        frame = s.table[asid, page]
        s.table[child, page] = frame
        if frame != HOLE:
            frames.share(s, frame)
    s.spaces[child].num_pages = s.spaces[asid].num_pages
    s.spaces[child].complete = s.spaces[asid].complete
    s.spaces[child].first_hole = s.spaces[asid].first_hole
    s.spaces[child].length = s.spaces[asid].length
    s.spaces[child].planned = s.spaces[asid].length
    return child


@njit(cache=True)
def drop_tail(s: State, asid: int, num_pages: int) -> None:
    """Unmap the pages of `asid` from `num_pages` on, last one first."""
    for page in range(s.spaces[asid].num_pages - 1, num_pages - 1, -1):
        frame = s.table[asid, page]
        s.table[asid, page] = HOLE
        if frame != HOLE:
            frames.drop(s, frame, page < s.spaces[asid].first_hole)
    s.spaces[asid].num_pages = min(s.spaces[asid].num_pages, num_pages)


@njit(cache=True)
def truncate_space(s: State, asid: int, length: int) -> None:
    """Forget the tokens of `asid` from `length` on; no plan is outstanding."""
    size = s.tokens.shape[1]
    drop_tail(s, asid, (length + size - 1) // size)
    s.spaces[asid].length = length
    s.spaces[asid].planned = length
    s.spaces[asid].complete = min(s.spaces[asid].complete, length // size)
    if s.spaces[asid].first_hole >= s.spaces[asid].num_pages:
        s.spaces[asid].first_hole = NO_HOLE


@njit(cache=True)
def punch_space(s: State, asid: int, first: int, last: int) -> None:
    """Unmap the pages first .. last-1 of `asid`, leaving holes. They are full and committed."""
    for page in range(last - 1, first - 1, -1):
        frame = s.table[asid, page]
        if frame != HOLE:
            s.table[asid, page] = HOLE
            frames.drop(s, frame, page < s.spaces[asid].first_hole)
    s.spaces[asid].first_hole = min(s.spaces[asid].first_hole, first)


@njit(cache=True)
def close_space(s: State, asid: int) -> None:
    """Unmap everything and give the row back; while a plan is outstanding only say so, and the last one settled does it."""
    if s.spaces[asid].outstanding > 0:
        s.spaces[asid].status = CLOSING
        return
    drop_tail(s, asid, 0)
    s.root_refs[s.spaces[asid].root] -= 1
    s.spaces[asid].status = UNUSED
    s.spare[s.reg[NUM_SPARE]] = asid
    s.reg[NUM_SPARE] += 1


@njit(cache=True)
def publish_pages(s: State, asid: int) -> None:
    """Publish the committed full pages of `asid`. Where an equal page is known already, map that one and give ours back.

    So an identity has one frame, a prefix is one chain, and prompts that were computed twice at the same time share afterwards.
    """
    if s.reg[PUBLISHING] == 0 or s.spaces[asid].first_hole != NO_HOLE:
        return
    parent = index.root_parent(s.spaces[asid].root)
    if s.spaces[asid].complete > 0:
        parent = s.table[asid, s.spaces[asid].complete - 1]
    for page in range(s.spaces[asid].complete, s.spaces[asid].length // s.tokens.shape[1]):
        frame = s.table[asid, page]
        if not s.frames[frame].published:
            known = index.find(s, parent, s.tokens[frame])
            if known >= 0:
                frames.share(s, known)
                s.table[asid, page] = known
                frames.drop(s, frame, False)
                s.reg[DEDUPLICATED] += 1
                frame = known
            else:
                index.insert(s, frame, parent)
        s.spaces[asid].complete = page + 1
        parent = frame
