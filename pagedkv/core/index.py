"""The prefix index: from (page before, tokens of this page) to the frame that holds their KV.

A chained hash table threaded through arrays: `bucket [N]` heads, `chain [F]` links. The hash is keyed per process and only finds
candidates; identity is then compared exactly (I4): the parent's frame and generation, and every token. A first page has no parent but a
root, which stands for the tenant and whatever else makes equal tokens different.

    parent(page 0) = root_parent(root) = -2 - root          parent(page i) = frame of page i - 1

Complexity: O(block_size) a lookup, insertion or removal; about one candidate a bucket, as there are at least as many buckets as frames.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pagedkv.core.state import I32, KEY, State

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: an odd number without pattern
_SHIFT = np.uint64(32)
_LOW = np.int64(0xFFFFFFFF)


@njit(cache=True)
def root_parent(root: int) -> int:
    """What stands for `root` where a first page names its parent."""
    return -2 - root


@njit(cache=True)
def _generation_of(s: State, parent: int) -> int:
    return s.frames[parent].generation if parent >= 0 else 0


@njit(cache=True)
def _bucket(s: State, parent: int, generation: int, tokens: I32) -> np.int64:
    mixed = np.uint64(s.reg[KEY]) ^ (np.uint64(np.int64(parent) & _LOW) << _SHIFT) ^ np.uint64(generation)
    for token in tokens:
        mixed = (mixed ^ np.uint64(np.int64(token) & _LOW)) * _MULTIPLIER
        mixed ^= mixed >> _SHIFT
    return np.int64(mixed & np.uint64(len(s.bucket) - 1))


@njit(cache=True)
def find(s: State, parent: int, tokens: I32) -> int:
    """The published frame that holds `tokens` (int32 [S]) after `parent`; -1 if there is none."""
    generation = _generation_of(s, parent)
    frame = s.bucket[_bucket(s, parent, generation, tokens)]
    while frame >= 0:
        if s.frames[frame].parent == parent and s.frames[frame].parent_generation == generation:
            same = True
            for i in range(len(tokens)):
                if s.tokens[frame, i] != tokens[i]:
                    same = False
                    break
            if same:
                return frame
        frame = s.frames[frame].chain
    return -1


@njit(cache=True)
def insert(s: State, frame: int, parent: int) -> None:
    """Publish `frame`, which is full, after `parent`. The caller has made sure that no published frame is equal."""
    generation = _generation_of(s, parent)
    bucket = _bucket(s, parent, generation, s.tokens[frame])
    s.frames[frame].parent = parent
    s.frames[frame].parent_generation = generation
    s.frames[frame].chain = s.bucket[bucket]
    s.bucket[bucket] = frame
    s.frames[frame].published = 1
    if parent < 0:
        s.root_refs[-2 - parent] += 1


@njit(cache=True)
def remove(s: State, frame: int) -> None:
    """Make the published `frame` unfindable."""
    parent = s.frames[frame].parent
    bucket = _bucket(s, parent, s.frames[frame].parent_generation, s.tokens[frame])
    here = s.bucket[bucket]
    if here == frame:
        s.bucket[bucket] = s.frames[frame].chain
    else:
        while s.frames[here].chain != frame:
            here = s.frames[here].chain
        s.frames[here].chain = s.frames[frame].chain
    s.frames[frame].published = 0
    if parent < 0:
        s.root_refs[-2 - parent] -= 1
