"""The prefix index: from (page before, tokens of this page) to the frame that holds their KV.

It is a chained hash table in arrays: `bucket [N]` heads, `chain [F]` links. The hash covers the whole prefix: the
`prefix_hash` of a page is a keyed hash of the prefix hash before it and of its tokens. A prefix hash outlives its
frame, so it tells whether an evicted page comes back. The hash only finds candidates. Identity is then compared exactly
(I4): the parent's frame and generation, every token, and the salts of the page. The parent of a first page is a root,
which stands for the tenant.

    parent(page 0) = root_parent(root) = -2 - root          parent(page i) = frame of page i - 1
    prefix hash(page i)  = hash(prefix hash(page i - 1) ^ seed of its salts, tokens of page i)    of page -1: the seed
                                                                                                  of the root

Complexity: O(block_size) a lookup or insertion, O(1) a removal; one to three candidates a bucket.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pagedkv.core.compiled import inlined, inner, prefetch
from pagedkv.core.prefix.events import log_removed, log_stored
from pagedkv.core.state import CACHED, I32, IN_USE, NIL, NUM_LOST, ROOT_BEFORE, SALT_SEED, SALTED_PAGE, State

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: an odd number without pattern
_SHIFT = np.uint64(32)
_LOW = np.int64(0xFFFFFFFF)

AHEAD: Final = 64  # pages that are prefetched together when a prompt is looked up


@inlined
def root_parent(root: int) -> int:
    """Return the number below -1 that stands for `root` as the parent of a first page."""
    return -2 - root


@inlined
def first_root(roots: I32, root: int) -> int:
    """Return the root of the same tenant without salts."""
    while roots[root, ROOT_BEFORE] != NIL:
        root = roots[root, ROOT_BEFORE]
    return root


@inlined
def salt_at(roots: I32, root: int, page: int) -> int:
    """Return 1 + the root whose salts lie in `page` of a space with `root`, or 0 if the page has no salt."""
    while roots[root, SALTED_PAGE] > page:
        root = roots[root, ROOT_BEFORE]
    return root + 1 if roots[root, SALTED_PAGE] == page else 0


@inlined
def _salt_of(salts: I32, frame: int) -> int:
    """Return the salt of a published frame, as `salt_at` returns it for its page."""
    return salts[frame] if len(salts) else 0


@inlined
def salted(roots: I32, before: int, salt: int) -> int:
    """Return the prefix hash `before` of a page, mixed with the salts of the page."""
    mixed = np.int64(before)
    if salt > 0:
        mixed ^= np.int64(roots[salt - 1, SALT_SEED]) & _LOW
    return mixed  # type: ignore[return-value]


@inlined
def prefix_hash_of(key: int, before: int, tokens: I32) -> int:
    """Return the prefix hash of a page with `tokens` (int32 [S]) after a page with prefix hash `before`.

    key: reg[KEY]. Each token is mixed with a number of its position, and their sum with `before`, so that the products
         do not wait for one another.
    """
    place, mixed = np.uint64(key), np.uint64(0)
    for i in range(len(tokens)):
        place += _MULTIPLIER
        product = (np.uint64(np.int64(tokens[i]) & _LOW) ^ place) * _MULTIPLIER
        mixed += product ^ (product >> _SHIFT)
    mixed = (mixed ^ np.uint64(np.int64(before) & _LOW)) * _MULTIPLIER
    # with int() numba takes the result for unsigned, and makes floats of it beside a signed seed
    return np.int64(((mixed ^ (mixed >> _SHIFT)) * _MULTIPLIER) >> _SHIFT)  # type: ignore[return-value]


@inlined
def prefetch_bucket(s: State, prefix_hash: int) -> None:
    """Prefetch the bucket of a prefix hash that will be looked up."""
    prefetch(s.bucket, np.int64(prefix_hash) & (len(s.bucket) - 1))


@inlined
def prefetch_candidate(s: State, prefix_hash: int) -> None:
    """Prefetch the record of the first candidate. The bucket must have arrived."""
    frame = s.bucket[prefix_hash & (len(s.bucket) - 1)]
    if frame >= 0:
        prefetch(s.frames, frame)
        prefetch(s.frames, frame + 1)  # the record may lie across two cache lines


@inlined
def prefetch_next(s: State, prefix_hash: int) -> None:
    """Prefetch the tokens of the first candidate if its prefix hash fits, else record and tokens of the second.

    The record of the first candidate must have arrived.
    """
    frame = s.bucket[prefix_hash & (len(s.bucket) - 1)]
    if frame >= 0 and s.frames[frame].prefix_hash != prefix_hash:
        frame = s.frames[frame].chain
        if frame >= 0:
            prefetch(s.frames, frame)
            prefetch(s.frames, frame + 1)
    if frame >= 0:
        prefetch(s.tokens, frame)


@inlined
def find(s: State, parent: int, prefix_hash: int, tokens: I32, salt: int = 0) -> int:
    """Return the published frame that holds `tokens` (int32 [S], with this prefix hash) after `parent`, or -1.

    salt: the page's salt, as `salt_at` returns it.
    """
    generation = s.frames[parent].generation if parent >= 0 else np.uint32(0)
    frame = s.bucket[prefix_hash & (len(s.bucket) - 1)]
    while frame >= 0:
        record = s.frames[frame]
        if (
            record.prefix_hash == prefix_hash
            and record.parent == parent
            and record.parent_generation == generation
            and record.published == 1
            and _salt_of(s.salts, frame) == salt
        ):
            different = np.int32(0)
            for i in range(len(tokens)):
                different |= s.tokens[frame, i] ^ tokens[i]
            if different == 0:
                return frame
        frame = record.chain
    return -1


@inlined
def insert(s: State, frame: int, parent: int, prefix_hash: int, salt: int = 0) -> None:
    """Publish the full `frame` with its prefix hash after `parent`. The caller has looked for an equal page."""
    bucket = prefix_hash & (len(s.bucket) - 1)
    s.frames[frame].parent = parent
    s.frames[frame].parent_generation = s.frames[parent].generation if parent >= 0 else np.uint32(0)
    s.frames[frame].prefix_hash = prefix_hash
    s.frames[frame].chain = s.bucket[bucket]
    s.bucket[bucket] = frame
    s.frames[frame].published = 1
    if remembers(s.ghosts, prefix_hash):
        s.frames[frame].uses = 1  # the page was evicted not long ago
    if parent < 0:
        s.roots[-2 - parent, IN_USE] += 1
    if len(s.salts):
        s.salts[frame] = salt
    if salt > 0:
        s.roots[salt - 1, IN_USE] += 1
    if len(s.log):
        log_stored(s.log, s.reg, (frame, parent, 0, salt), s.tokens[frame])


@inlined
def _companion_hash(leader_hash: int, group: int) -> int:
    """Return the prefix hash of the companion in `group` of a leader with that prefix hash."""
    return leader_hash ^ ((group * 0x9E3779B9) & 0xFFFFFFFF)


@inlined
def find_companion(s: State, leader: int, group: int) -> int:
    """Return the published companion of `leader` in `group`, or -1. Exact without a comparison of tokens."""
    prefix_hash = _companion_hash(np.int64(s.frames[leader].prefix_hash), group)
    frame = s.bucket[prefix_hash & (len(s.bucket) - 1)]
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
    """Publish `frame` as the companion of `leader` in `group`. The caller has checked that none is published."""
    prefix_hash = _companion_hash(np.int64(s.frames[leader].prefix_hash), group)
    bucket = prefix_hash & (len(s.bucket) - 1)
    s.frames[frame].parent = leader
    s.frames[frame].parent_generation = s.frames[leader].generation
    s.frames[frame].prefix_hash = prefix_hash
    s.frames[frame].chain = s.bucket[bucket]
    s.bucket[bucket] = frame
    s.frames[frame].published = 1 + group
    if len(s.salts):
        s.salts[frame] = 0  # its leader has the salts
    if len(s.log):
        log_stored(s.log, s.reg, (frame, leader, group, 0), s.tokens[leader])


@inner
def remove(s: State, frame: int) -> None:
    """Unpublish `frame`: no prompt finds it any more."""
    bucket = np.int64(s.frames[frame].prefix_hash) & (len(s.bucket) - 1)
    here = s.bucket[bucket]
    if here == frame:
        s.bucket[bucket] = s.frames[frame].chain
    else:
        for _ in range(len(s.frames)):  # bounded: a broken index must not hang here; check() will name the frame
            if here < 0 or s.frames[here].chain == frame:
                break
            here = s.frames[here].chain
        if here >= 0:
            s.frames[here].chain = s.frames[frame].chain
    s.frames[frame].published = 0
    parent = s.frames[frame].parent
    if parent < 0:
        s.roots[-2 - parent, IN_USE] -= 1
    salt = np.int64(_salt_of(s.salts, frame))
    if salt > 0:
        s.roots[salt - 1, IN_USE] -= 1
    if len(s.log):
        log_removed(s.log, s.reg, frame)
    if len(s.checkpoints) and s.checkpoints[frame] >= 0:
        note_loss(s, frame)
        s.checkpoints[frame] = -2 - s.checkpoints[frame]


@inlined
def note_loss(s: State, entry: int) -> None:
    """Queue a frame that lost its page, or -1 - asid of a space that was closed, for states/bindings.py."""
    s.checkpoints[len(s.frames) + s.reg[NUM_LOST]] = entry
    s.reg[NUM_LOST] += 1


@inner
def remember(s: State, frame: int) -> None:
    """Keep the prefix hash of `frame`, which is about to be evicted, until another one takes its place in `ghosts`."""
    if s.frames[frame].published != 1:
        return  # a companion is missed together with its leader; a frame of a FramePool may have no name
    prefix_hash = np.int64(s.frames[frame].prefix_hash)
    s.ghosts[prefix_hash & (len(s.ghosts) - 1)] = (prefix_hash >> 2) + 1


@inlined
def remembers(ghosts: I32, prefix_hash: int) -> bool:
    """Return True if a page of this prefix hash was evicted recently. Rarely wrong: 30 bits of a hash are compared."""
    return ghosts[prefix_hash & (len(ghosts) - 1)] == (prefix_hash >> 2) + 1


@inlined
def _is_page_before(s: State, parent: int, frame: int) -> bool:
    """Return whether frame `parent` still holds the page after which `frame` was published, and is published."""
    return s.frames[parent].published > 0 and s.frames[parent].generation == s.frames[frame].parent_generation


PREFIX_IN_USE: Final = -1
PREFIX_GONE: Final = -2


@inner
def nearest_evictable(s: State, frame: int) -> int:
    """Return the last page before the published `frame` that is evictable, PREFIX_IN_USE if there is none, or
    PREFIX_GONE if a page before it is not published any more.

    The prefix of an evictable page is whole (I9), so the search ends there.
    """
    while True:
        parent = s.frames[frame].parent
        if parent < 0:
            return PREFIX_IN_USE
        if not _is_page_before(s, parent, frame):
            return PREFIX_GONE
        if s.frames[parent].status == CACHED and s.frames[parent].pins == 0:
            return parent
        frame = parent


@inner
def reaches_root(s: State, frame: int) -> bool:
    """Return True if the whole prefix of the published `frame` is still published. O(pages of the prefix)."""
    while True:
        parent = s.frames[frame].parent
        if parent < 0:
            return True
        if not _is_page_before(s, parent, frame):
            return False
        frame = parent
