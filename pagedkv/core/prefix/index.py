"""The prefix index: from (page before, tokens of this page) to the frame that holds their KV.

A chained hash table threaded through arrays: `bucket [N]` heads, `chain [F]` links. What is hashed is the whole prefix: a page's `fingerprint` is
a keyed hash of the fingerprint before it and of its tokens, so it outlives the frame and tells whether an evicted page comes back. It only
finds candidates; identity is then compared exactly (I4): the parent's frame and generation, and every token. A first page has no parent
but a root, which stands for the tenant and whatever else makes equal tokens different.

    parent(page 0) = root_parent(root) = -2 - root          parent(page i) = frame of page i - 1
    fingerprint(page i)  = hash(fingerprint(page i - 1), tokens of page i)          of page -1: the seed of the space's root

When tokens are matched, not only whole pages, each page also knows its successors (`kin`): a list through arrays that are there only then.

Complexity: O(block_size) a lookup or insertion, O(1) a removal; one to three candidates a bucket.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pagedkv.core.compiled import compiled, inlined, prefetch
from pagedkv.core.prefix.events import log_removed, log_stored
from pagedkv.core.state import I32, State

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: an odd number without pattern
_SHIFT = np.uint64(32)
_LOW = np.int64(0xFFFFFFFF)

AHEAD: Final = 64  # pages on their way from memory at once, when a prompt is looked up


@inlined
def root_parent(root: int) -> int:
    """What stands for `root` where a first page names its parent."""
    return -2 - root


@inlined
def fingerprint_of(key: int, before: int, tokens: I32) -> int:
    """The fingerprint of a page that holds `tokens` (int32 [S]) after a page of fingerprint `before`. `key` is reg[KEY].

    Each token is mixed with a number of its own place, and the sum with what is before: the products do not wait for one another.
    """
    place, mixed = np.uint64(key), np.uint64(0)
    for i in range(len(tokens)):
        place += _MULTIPLIER
        product = (np.uint64(np.int64(tokens[i]) & _LOW) ^ place) * _MULTIPLIER
        mixed += product ^ (product >> _SHIFT)
    mixed = (mixed ^ np.uint64(np.int64(before) & _LOW)) * _MULTIPLIER
    # int() of it would be unsigned to numba, which makes floats of it beside a signed seed
    return np.int64(((mixed ^ (mixed >> _SHIFT)) * _MULTIPLIER) >> _SHIFT)  # type: ignore[return-value]


@inlined
def prefetch_bucket(s: State, fingerprint: int) -> None:
    """A page of this fingerprint is going to be looked up."""
    prefetch(s.bucket, np.int64(fingerprint) & (len(s.bucket) - 1))


@inlined
def prefetch_candidate(s: State, fingerprint: int) -> None:
    """A page of this fingerprint is going to be looked up; its bucket has arrived."""
    frame = s.bucket[fingerprint & (len(s.bucket) - 1)]
    if frame >= 0:
        prefetch(s.frames, frame)
        prefetch(s.frames, frame + 1)  # its record may lie across two lines


@inlined
def prefetch_next(s: State, fingerprint: int) -> None:
    """A page of this fingerprint is going to be compared; the first candidate's record has arrived: is it that, or the one after it?"""
    frame = s.bucket[fingerprint & (len(s.bucket) - 1)]
    if frame >= 0 and s.frames[frame].fingerprint != fingerprint:
        frame = s.frames[frame].chain
        if frame >= 0:
            prefetch(s.frames, frame)
            prefetch(s.frames, frame + 1)
    if frame >= 0:
        prefetch(s.tokens, frame)


@inlined
def find(s: State, parent: int, fingerprint: int, tokens: I32) -> int:
    """The published frame that holds `tokens` (int32 [S]), whose fingerprint is `fingerprint`, after `parent`; -1 if there is none."""
    generation = s.frames[parent].generation if parent >= 0 else np.uint32(0)
    frame = s.bucket[fingerprint & (len(s.bucket) - 1)]
    while frame >= 0:
        record = s.frames[frame]
        if (
            record.fingerprint == fingerprint
            and record.parent == parent
            and record.parent_generation == generation
            and record.published == 1
        ):
            different = np.int32(0)
            for i in range(len(tokens)):
                different |= s.tokens[frame, i] ^ tokens[i]
            if different == 0:
                return frame
        frame = record.chain
    return -1


@inlined
def insert(s: State, frame: int, parent: int, fingerprint: int) -> None:
    """Publish `frame`, which is full and of fingerprint `fingerprint`, after `parent`. The caller has made sure that no published frame is equal."""
    bucket = fingerprint & (len(s.bucket) - 1)
    s.frames[frame].parent = parent
    s.frames[frame].parent_generation = s.frames[parent].generation if parent >= 0 else np.uint32(0)
    s.frames[frame].fingerprint = fingerprint
    s.frames[frame].chain = s.bucket[bucket]
    s.bucket[bucket] = frame
    s.frames[frame].published = 1
    if remembers(s.ghosts, fingerprint):
        s.frames[frame].uses = 1  # it was here before
    if parent < 0:
        s.roots[-2 - parent, 0] += 1
    if len(s.kin):
        _adopt(s.kin, s.roots, frame, parent)
    if len(s.log):
        log_stored(s.log, s.reg, (frame, parent, 0), s.tokens[frame])


@inlined
def companion_fingerprint(leader_fingerprint: int, group: int) -> int:
    """The fingerprint of the page of `group` whose leader has that fingerprint."""
    return leader_fingerprint ^ ((group * 0x9E3779B9) & 0xFFFFFFFF)


@inlined
def find_companion(s: State, leader: int, group: int) -> int:
    """The published frame of `group` whose leader is the published frame `leader`; -1 if there is none. Exact without comparing tokens."""
    fingerprint = companion_fingerprint(np.int64(s.frames[leader].fingerprint), group)
    frame = s.bucket[fingerprint & (len(s.bucket) - 1)]
    while frame >= 0:
        record = s.frames[frame]
        if (
            record.parent == leader
            and record.parent_generation == s.frames[leader].generation
            and record.published == 1 + group
        ):
            return frame
        frame = record.chain
    return -1


@inlined
def insert_companion(s: State, frame: int, leader: int, group: int) -> None:
    """Publish `frame` as the companion of `leader` in `group`. The caller has made sure that there is none."""
    fingerprint = companion_fingerprint(np.int64(s.frames[leader].fingerprint), group)
    bucket = fingerprint & (len(s.bucket) - 1)
    s.frames[frame].parent = leader
    s.frames[frame].parent_generation = s.frames[leader].generation
    s.frames[frame].fingerprint = fingerprint
    s.frames[frame].chain = s.bucket[bucket]
    s.bucket[bucket] = frame
    s.frames[frame].published = 1 + group
    if len(s.log):
        log_stored(s.log, s.reg, (frame, leader, group), s.tokens[leader])


@compiled
def remove(s: State, frame: int) -> None:
    """Make the published `frame` unfindable."""
    bucket = np.int64(s.frames[frame].fingerprint) & (len(s.bucket) - 1)
    here = s.bucket[bucket]
    if here == frame:
        s.bucket[bucket] = s.frames[frame].chain
    else:
        for _ in range(len(s.frames)):  # were the index broken, check() would name the frame, and nobody hang here
            if here < 0 or s.frames[here].chain == frame:
                break
            here = s.frames[here].chain
        if here >= 0:
            s.frames[here].chain = s.frames[frame].chain
    s.frames[frame].published = 0
    parent = s.frames[frame].parent
    if len(s.kin) and (
        parent < 0 or (s.frames[parent].published and s.frames[parent].generation == s.frames[frame].parent_generation)
    ):
        _disown(s.kin, s.roots, frame, parent)  # else the page before is gone, and the list of its successors with it
    if parent < 0:
        s.roots[-2 - parent, 0] -= 1
    if len(s.log):
        log_removed(s.log, s.reg, frame)


@inlined
def _adopt(kin: I32, roots: I32, frame: int, parent: int) -> None:
    first = kin[parent, 0] if parent >= 0 else roots[-2 - parent, 1]
    kin[frame, 0], kin[frame, 1], kin[frame, 2] = -1, first, -1
    if first >= 0:
        kin[first, 2] = frame
    if parent >= 0:
        kin[parent, 0] = frame
    else:
        roots[-2 - parent, 1] = frame


@inlined
def _disown(kin: I32, roots: I32, frame: int, parent: int) -> None:
    following, before = kin[frame, 1], kin[frame, 2]
    if following >= 0:
        kin[following, 2] = before
    if before >= 0:
        kin[before, 1] = following
    elif parent >= 0:
        kin[parent, 0] = following
    else:
        roots[-2 - parent, 1] = following


@compiled
def find_part(s: State, parent: int, tokens: I32) -> tuple[int, int]:
    """(frame, length): the successor of `parent` that begins with most of `tokens`, of the 32 published last; (-1, 0) if none does."""
    best, longest = -1, 0
    frame = s.kin[parent, 0] if parent >= 0 else s.roots[-2 - parent, 1]
    for _ in range(32):
        if frame < 0:
            break
        common = 0
        while common < len(tokens) and common < s.tokens.shape[1] and s.tokens[frame, common] == tokens[common]:
            common += 1
        if common > longest:
            best, longest = frame, common
        frame = s.kin[frame, 1]
    return best, longest


@compiled
def remember(s: State, frame: int) -> None:
    """`frame` is about to be evicted: keep its fingerprint, until one with the same place needs it."""
    if s.frames[frame].published > 1:
        return  # a companion is missed with its page
    fingerprint = np.int64(s.frames[frame].fingerprint)
    s.ghosts[fingerprint & (len(s.ghosts) - 1)] = (fingerprint >> 2) + 1


@inlined
def remembers(ghosts: I32, fingerprint: int) -> bool:
    """Whether a page of this fingerprint was evicted not long ago. May be wrong, rarely: 30 bits of a hash are compared."""
    return ghosts[fingerprint & (len(ghosts) - 1)] == (fingerprint >> 2) + 1


@compiled
def reaches_root(s: State, frame: int) -> bool:
    """Whether the whole prefix of the published `frame` is still published. O(its pages)."""
    while True:
        parent = s.frames[frame].parent
        if parent < 0:
            return True
        if s.frames[parent].published == 0 or s.frames[parent].generation != s.frames[frame].parent_generation:
            return False
        frame = parent
