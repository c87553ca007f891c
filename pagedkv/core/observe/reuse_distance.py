"""Reuse distances: how far apart the uses of a page are, and so the hit rate of an LRU pool of any size.

An LRU pool of C frames would find a page if fewer than C other pages were used since its last use. That number is the
reuse distance: the place of the page in the LRU stack (Mattson et al., 1970). This file follows the stack for a sample
only: the pages whose prefix hash begins with `shift` zero bits. Real distances are those in the sample times 2**shift
(spatial sampling: Waldspurger et al., SHARDS, FAST 2015). The distances of a prompt are taken when it is opened. Its
pages enter the stack then, and again when its space is released, each time the last page first, so that a prefix is
used after its suffix. A full sample drops its least recently used page.

    records [K]   prefix hash, time of last use    tree [2K + 1]   Fenwick tree: how many times are in use up to each
    at [2K + 1]   time -> record                   hits [K]        uses by distance

Times are numbered anew when they run out. A sampled page costs O(log K), any other a comparison, beside the hash of
each. This file knows prefix hashes and no frames.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from pagedkv.core.compiled import compiled, inlined, inner
from pagedkv.core.prefix import index
from pagedkv.core.prefix.roots import Root
from pagedkv.core.state import I32, I64, KEY, NIL, Records, State

_RECORD: Final = np.dtype([("prefix_hash", np.uint32), ("chain", np.int32), ("time", np.int32)], align=True)

NOW: Final = 0  # the time of the last use
NUM_RECORDS: Final = 1  # records in use
FIRST_TIME: Final = 2  # a time that no record is before
PAGES_ASKED: Final = 3  # whole pages of all prompts
PAGES_SAMPLED: Final = 4  # of these, how many belong to the sample
SHIFT: Final = 5  # the sample has one page of 2**SHIFT


class Sample(NamedTuple):
    """The arrays of a sample of K pages."""

    records: Records  # _RECORD [K]
    heads: I32  # [a power of two, K or more] first record of each chain, by the low bits of the prefix hash
    tree: I32  # [2K + 1]
    at: I32  # [2K + 1]
    hits: I64  # [K]
    reg: I64  # [6] NOW to SHIFT


def new_sample(pages: int, reach: int) -> Sample:
    """Return an empty sample of up to `pages` pages that stand for at least `reach` pages."""
    reg = np.zeros(6, np.int64)
    reg[FIRST_TIME] = 1
    reg[SHIFT] = max(0, (-(-reach // pages) - 1).bit_length())
    return Sample(
        records=np.zeros(pages, _RECORD).view(np.recarray),
        heads=np.full(1 << (pages - 1).bit_length(), NIL, np.int32),
        tree=np.zeros(2 * pages + 1, np.int32),
        at=np.full(2 * pages + 1, NIL, np.int32),
        hits=np.zeros(pages, np.int64),
        reg=reg,
    )


@inlined
def _is_sampled(sample: Sample, prefix_hash: int) -> bool:
    return prefix_hash >> (32 - sample.reg[SHIFT]) == 0


@inlined
def _find(sample: Sample, prefix_hash: int) -> int:
    record = sample.heads[prefix_hash & (len(sample.heads) - 1)]
    while record >= 0 and sample.records[record].prefix_hash != prefix_hash:
        record = sample.records[record].chain
    return record


@inlined
def _add(tree: I32, time: int, count: int) -> None:
    while time < len(tree):
        tree[time] += count
        time += time & -time


@inlined
def _up_to(tree: I32, time: int) -> int:
    total = 0
    while time > 0:
        total += tree[time]
        time -= time & -time
    return total


@inner
def _renumber(sample: Sample) -> None:
    """Number the times anew from 1, in the same order. O(K), after K uses or more."""
    now = 0
    for time in range(1, len(sample.at)):
        record = sample.at[time]
        sample.at[time] = NIL
        sample.tree[time] = 0
        if record >= 0:
            now += 1
            sample.at[now] = record
            sample.records[record].time = now
    for time in range(1, now + 1):
        _add(sample.tree, time, 1)
    sample.reg[NOW], sample.reg[FIRST_TIME] = now, 1


@inlined
def _forget_oldest(sample: Sample) -> int:
    """Free the least recently used record, and return it."""
    while sample.at[sample.reg[FIRST_TIME]] < 0:
        sample.reg[FIRST_TIME] += 1
    record = sample.at[sample.reg[FIRST_TIME]]
    sample.at[sample.reg[FIRST_TIME]] = NIL
    _add(sample.tree, sample.reg[FIRST_TIME], -1)
    head = np.int64(sample.records[record].prefix_hash) & (len(sample.heads) - 1)
    here = sample.heads[head]
    if here == record:
        sample.heads[head] = sample.records[record].chain
    else:
        while sample.records[here].chain != record:
            here = sample.records[here].chain
        sample.records[here].chain = sample.records[record].chain
    sample.reg[NUM_RECORDS] -= 1
    return record


@inner
def record_use(sample: Sample, prefix_hash: int) -> None:
    """Record that the page of this prefix hash is used now."""
    if not _is_sampled(sample, prefix_hash):
        return
    if sample.reg[NOW] == len(sample.at) - 1:
        _renumber(sample)
    record = _find(sample, prefix_hash)
    if record >= 0:
        sample.at[sample.records[record].time] = NIL
        _add(sample.tree, sample.records[record].time, -1)
    else:
        record = sample.reg[NUM_RECORDS] if sample.reg[NUM_RECORDS] < len(sample.records) else _forget_oldest(sample)
        head = prefix_hash & (len(sample.heads) - 1)
        sample.records[record].prefix_hash = prefix_hash
        sample.records[record].chain = sample.heads[head]
        sample.heads[head] = record
        sample.reg[NUM_RECORDS] += 1
    sample.reg[NOW] += 1
    sample.records[record].time = sample.reg[NOW]
    sample.at[sample.reg[NOW]] = record
    _add(sample.tree, sample.reg[NOW], 1)


@compiled
def record_prompt(
    sample: Sample, key: int, seed: int, size: int, ids: I32, prefix_hashes: I64, roots: I32, root: int, counted: bool
) -> None:
    """Count the distance of each whole page of a prompt that could be matched, if `counted`, and record its use.

    Shapes: ids int32 [n]; prefix_hashes int64 [pages], scratch; roots: the roots of the State
    root, seed: the prompt's root, and the prefix hash of its empty prefix.
    """
    prefix_hash = seed
    for page in range(len(prefix_hashes)):
        before = index.salted(roots, prefix_hash, index.salt_at(roots, root, page))
        prefix_hash = index.prefix_hash_of(key, before, ids[page * size : (page + 1) * size])
        prefix_hashes[page] = prefix_hash
        if counted and _is_sampled(sample, prefix_hash):
            sample.reg[PAGES_SAMPLED] += 1
            record = _find(sample, prefix_hash)
            if record >= 0:
                sample.hits[sample.reg[NUM_RECORDS] - _up_to(sample.tree, sample.records[record].time)] += 1
    sample.reg[PAGES_ASKED] += len(prefix_hashes) if counted else 0
    for page in range(len(prefix_hashes) - 1, -1, -1):
        record_use(sample, prefix_hashes[page])


@compiled
def record_release(s: State, sample: Sample, asid: int) -> None:
    """Record a use of the published pages of `asid`, which is released: they were in use until now."""
    for page in range(min(s.spaces[asid].complete, s.spaces[asid].first_hole) - 1, -1, -1):
        record_use(sample, np.int64(s.frames[s.table[asid, page]].prefix_hash))


class ReuseSampler:
    """The sample of one manager, and the hit rates that it predicts."""

    def __init__(self, pages: int, num_frames: int) -> None:
        self.sample: Sample = new_sample(pages, 4 * num_frames)

    def record_prompt(self, s: State, root: Root, ids: I32, *, counted: bool = True) -> None:
        """Record a prompt (int32 [n]) that is opened under `root`.

        counted: whether the hit rates know its distances.
        """
        size = s.tokens.shape[1]
        prefix_hashes = np.empty(max(0, len(ids) - 1) // size, np.int64)
        record_prompt(self.sample, int(s.reg[KEY]), root.seed, size, ids, prefix_hashes, s.roots, root.number, counted)

    def counts(self) -> I64:
        """Return int64 [K + 2]: uses by distance in the sample, then the pages asked for, then those in the sample."""
        reg = self.sample.reg
        return np.concatenate([self.sample.hits, reg[[PAGES_ASKED, PAGES_SAMPLED]]])

    @property
    def reach(self) -> int:
        """Frames of the largest pool for which the sample predicts a hit rate."""
        return int(len(self.sample.records) << int(self.sample.reg[SHIFT]))

    def hit_rate(self, num_frames: int, counts: I64) -> float:
        """Return the share of the pages asked for that an LRU pool of `num_frames` would have matched.

        counts: int64 [K + 2], from `counts()`, or the difference of two of them.

        A few popular pages, in the sample or not, move all rates alike. The correction adds or removes pages of
        distance 0 until the sample has its expected share of the pages (SHARDS-adj).
        """
        asked, sampled, scale = int(counts[-2]), int(counts[-1]), 1 << int(self.sample.reg[SHIFT])
        if asked == 0:
            return 0.0
        near = int(np.searchsorted((np.arange(len(counts) - 2) + 0.5) * scale, num_frames))
        return min(1.0, max(0.0, 1.0 + (int(counts[:near].sum()) - sampled) * scale / asked))
