"""A step: plan, then commit or abort, for the whole batch at once. Compiled functions over `State`.

    plan     count first: frames for new pages and for copies of shared tails; take them only if the pool has them all
    (run)    the caller makes the copies, then writes and reads KV; the sources of copies stay pinned
    commit   store the tokens and publish full pages; planned tokens that are rejected give their frames back, or stay
             planned: then the step begins behind the kept ones, and stays outstanding until its end
    abort    give the new frames back; a space keeps its copy of a shared tail if the copy was made

A space may have several outstanding plans. Commit settles them oldest first, abort newest first.
Every function returns a code. On any code but OK nothing was changed.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pagedkv.core.compiled import compiled, inlined, inner
from pagedkv.core.pool import eviction, frames, free_runs, quotas
from pagedkv.core.pool.accounts import of_space
from pagedkv.core.state import (
    ABORTED,
    CLOSING,
    COMMITTED,
    COPIES,
    HEAD,
    I32,
    I64,
    NUM_COPIES,
    NUM_EVICTABLE,
    NUM_FREE,
    NUM_REGISTERS,
    OPEN,
    OUTSTANDING,
    PARTLY,
    STATUS,
    TICK,
    State,
)
from pagedkv.core.tables import page_tables

# codes, and the meaning of `where` beside them
OK: Final = 0
SHORT: Final = 1  # too few frames; where = how many are needed
NARROW: Final = 2  # the table must grow; where = how many pages wide
NOT_OPEN: Final = 3  # where = index in the batch, down to TOO_LONG
NEGATIVE: Final = 4
TWICE: Final = 5
OUT_OF_ORDER: Final = 6
TOO_MANY: Final = 7
NOT_NEWEST: Final = 8
TOO_LONG: Final = 9
SETTLED: Final = 10  # the plan was committed or aborted already
OVER_QUOTA: Final = 20  # where = the account
PROTECTED_SHARES: Final = 21  # where = how many frames are needed, more than protected shares let be evicted

MOST_TOKENS: Final = 2**31 - 1  # of a sequence and of a step: kernels take both lengths as int32


@inlined
def _choose_copies(s: State, asids: I32, counts: I64, split: I32, copied: I32) -> int:
    """Set split[i * G + g] for each tail that must be copied before it is written (I3), and return how many there are.

    A tail must be copied if it is shared, published, or the source of an earlier plan's copy, which abort would give
    back. Tails are counted as if copied in turn: of r spaces that map a tail, k writers make min(k, r - 1) copies.
    copied: int32 [B * G], scratch.
    """
    size, num_groups = s.tokens.shape[1], len(s.groups)
    copies = 0
    for i in range(len(asids)):
        if counts[i] and s.spaces[asids[i]].planned < s.spaces[asids[i]].num_pages * size:
            for group in range(num_groups):
                tail = s.table[asids[i] + group, s.spaces[asids[i]].num_pages - 1]
                if s.frames[tail].refs > 1 or s.frames[tail].published or s.frames[tail].pins > 0:
                    s.frames[tail].refs -= 1
                    copied[copies] = tail
                    split[i * num_groups + group] = 1
                    copies += 1
    for tail in copied[:copies]:
        s.frames[tail].refs += 1
    return copies


@inner
def _measure(s: State, asids: I32, counts: I64, split: I32, scratch: I32) -> tuple[int, int, int, int]:
    """Count what a plan needs, without changing the pool.

    Returns: (code, where, copies, tokens); where = frames needed if the code is OK
    Modifies: split [B * G], 1 for each tail that must be copied; scratch [B * G]; TICK and the stamps of the spaces
    """
    size = s.tokens.shape[1]
    s.reg[TICK] += 1
    needed = width = tokens = 0
    for i in range(len(asids)):
        asid = asids[i]
        if asid < 0 or asid >= len(s.spaces) or s.spaces[asid].status != OPEN:
            return NOT_OPEN, i, 0, 0
        if counts[i] < 0:
            return NEGATIVE, i, 0, 0
        if s.spaces[asid].stamp == s.reg[TICK]:
            return TWICE, i, 0, 0
        # so no sum below overflows
        if counts[i] > MOST_TOKENS - s.spaces[asid].planned or counts[i] > MOST_TOKENS - tokens:
            return TOO_LONG, i, 0, 0
        s.spaces[asid].stamp = s.reg[TICK]
        pages = int(s.spaces[asid].num_pages)
        if s.spaces[asid].planned + counts[i] > pages * size:  # most decode steps skip the division
            more = (s.spaces[asid].planned + counts[i] + size - 1) // size - pages
            needed += more * len(s.groups)
            pages += more
        width = max(width, pages)
        tokens += counts[i]
    copies = _choose_copies(s, asids, counts, split, scratch)
    if needed + copies > s.reg[NUM_FREE] + s.reg[NUM_EVICTABLE]:
        return SHORT, needed + copies, 0, 0
    if len(s.reg) > NUM_REGISTERS:
        account = quotas.measure(s, asids, counts, split)
        if account >= 0:
            return OVER_QUOTA, account, 0, 0
        if quotas.givable(s) < needed + copies - s.reg[NUM_FREE]:
            return PROTECTED_SHARES, needed + copies, 0, 0
    if width > s.table.shape[1]:
        return NARROW, width, 0, 0
    return OK, needed + copies, copies, tokens


@inner
def _split_tail(s: State, asid: int, group: int) -> tuple[int, int, int]:
    """Give `asid` a tail of its own, and pin the old one until the plan is settled.

    Returns: (source, target, 1 if the prefix of the source is pinned with it)
    """
    page = s.spaces[asid].num_pages - 1
    source = s.table[asid + group, page]
    stays_cached = page_tables.may_stay_cached(s, asid, group, page)
    # behind a hole this space does not map the prefix, which must not be evicted before the source
    chained = stays_cached and page > s.spaces[asid].first_hole
    frames.pin(s, source)
    if chained:
        parent = s.frames[source].parent
        while parent >= 0:
            frames.pin(s, parent)
            parent = s.frames[parent].parent
    frames.drop(s, source, stays_cached, page, s.spaces[asid].advice)
    if chained:
        page_tables.touch_prefix(s, s.frames[source].parent)  # its fence must not fall before that of the source
    target, _ = free_runs.take(s.chunks, s.reg, s.table[asid + group, page - 1] if page > 0 else -1, 1)
    frames.claim(s.frames, s.reg, target, of_space(s, asid))
    if group == 0:  # the group whose frames hold token ids
        for i in range(s.spaces[asid].planned - page * s.tokens.shape[1]):
            s.tokens[target, i] = s.tokens[source, i]
    s.table[asid + group, page] = target
    return source, target, 1 if chained else 0


@inner
def _unpin_source(s: State, source: int, chained: int) -> None:
    parent = s.frames[source].parent if chained else -1
    frames.unpin(s, source)
    while parent >= 0:
        frames.unpin(s, parent)
        parent = s.frames[parent].parent


@compiled
def num_tokens(counts: I64, most: int) -> int:
    """Return the sum of `counts`; 0 if one of them is negative or the sum is above `most`: then no plan can succeed."""
    total = 0
    for count in counts:
        if count < 0 or count > most - total:
            return 0
        total += count
    return total


@compiled
def plan_step(s: State, asids: I32, counts: I64, longs: I64, ints: I32) -> tuple[int, int]:
    """Map frames for `counts` new tokens of each space: for all spaces, or for none on any code but OK.

    longs, ints: the arrays of a `Step`, zeros. Returns: (code, where)
    """
    batch, num_groups = len(asids), len(s.groups)
    split, splits = ints[2 * batch + 1 : _first_split(s, asids)], ints[_first_split(s, asids) :]
    code, where, num_copies, tokens = _measure(s, asids, counts, split, splits)
    if code != OK:
        split[:] = 0  # the caller may plan again with the same arrays
        return code, where
    if len(longs) != HEAD + (num_groups + 1) * tokens + batch:
        return SHORT, where  # `tokens` is above what the pool can hold, so `num_tokens` was 0: not reached
    if len(s.reg) > NUM_REGISTERS:
        quotas.reclaim(s, where)
    else:
        eviction.reclaim(s, where)
    _split_tails(s, asids, split, splits)
    _map_tokens(s, asids, counts, longs, ints)
    longs[STATUS], longs[NUM_COPIES] = OUTSTANDING, num_copies
    return OK, where


@inner
def _split_tails(s: State, asids: I32, split: I32, splits: I32) -> None:
    """Split the tails that `split` names: companions before their leaders, so that their sources go first (I9).

    Modifies: splits, four numbers for each tail: source, target, row, 1 if the prefix of the source is pinned with it
    """
    c, num_groups = 0, len(s.groups)
    for i in range(len(asids)):
        for group in range(num_groups - 1, -1, -1):
            if split[i * num_groups + group]:
                splits[c], splits[c + 1], splits[c + 3] = _split_tail(s, asids[i], group)
                splits[c + 2] = asids[i] + group
                c += 4
    s.reg[COPIES] += c // 4


@inner
def _map_tokens(s: State, asids: I32, counts: I64, longs: I64, ints: I32) -> None:
    """Map frames for the new tokens of each space; there are enough. Modifies: the parts of a `Step`."""
    num_groups = len(s.groups)
    tokens = (len(longs) - HEAD - len(asids)) // (num_groups + 1)
    slots, positions = longs[HEAD : HEAD + num_groups * tokens], longs[HEAD + num_groups * tokens :]
    starts, cu_seqlens, seq_lens = positions[tokens:], ints, ints[len(asids) + 1 :]
    t = 0
    for i in range(len(asids)):
        start = s.spaces[asids[i]].planned
        end = start + counts[i]
        for group in range(len(s.groups)):
            row = asids[i] + group
            _map_row(s, row, start, slots[group * tokens + t : group * tokens + t + counts[i]])
            s.spaces[row].planned = end
            s.spaces[row].outstanding += 1
        for position in range(start, end):
            positions[t] = position
            t += 1
        starts[i], seq_lens[i], cu_seqlens[i + 1] = start, end, t
    frames.note_peak(s.frames, s.reg)


@inlined
def _map_row(s: State, row: int, start: int, slots: I64) -> None:
    """Map frames for the tokens of a row from position `start` on. Modifies: slots, one for each token."""
    size, page = s.tokens.shape[1], int(s.spaces[row].num_pages)
    t, left = 0, page * size - start  # slots left in the tail (I5)
    frame = run = 0  # next frame of the run just taken, and how many are left of it
    account = of_space(s, row)
    while t < len(slots):
        if left == 0:
            if run == 0:
                last = s.table[row, page - 1] if page > 0 else -1
                frame, run = free_runs.take(s.chunks, s.reg, last, (len(slots) - t + size - 1) // size)
            frames.claim(s.frames, s.reg, frame, account)
            s.table[row, page] = frame
            frame, run = frame + 1, run - 1
            page += 1
            left = size
        first = np.int64(s.table[row, page - 1] + 1) * size - left
        count = min(left, len(slots) - t)
        for i in range(count):
            slots[t + i] = first + i
        t += count
        left -= count
    s.spaces[row].num_pages = page


@inner
def _settle(s: State, asid: int) -> None:
    """Close `asid` or publish its pages, now that one plan fewer is outstanding."""
    if s.spaces[asid].status == CLOSING:
        page_tables.close_space(s, asid)
    else:
        page_tables.publish_pages(s, asid)


@inlined
def _store(s: State, asid: int, start: int, token_ids: I32) -> None:
    """Write `token_ids` to the frames of `asid`, from position `start` on."""
    size = s.tokens.shape[1]
    page, t = start // size, 0
    offset = start - page * size
    while t < len(token_ids):
        frame, count = s.table[asid, page], min(size - offset, len(token_ids) - t)
        for i in range(count):
            s.tokens[frame, offset + i] = token_ids[t + i]
        t += count
        page, offset = page + 1, 0


@compiled
def commit_step(
    s: State, asids: I32, longs: I64, ints: I32, accepted: I64, token_ids: I32, named: bool, keep: bool, restoring: bool
) -> tuple[int, int]:
    """Commit the first `accepted[i]` planned tokens of each space, and give the rest back.

    named:  whether token_ids are the tokens' ids; if not, only pages before these tokens are published.
    keep:   whether the rest stays planned instead.
    restoring: whether group 0 gives back no page behind its window.
    Shapes: token_ids int32 [sum(accepted)], in plan order; longs, ints: the arrays of the plan's `Step`
    Returns: (code, where)
    """
    if longs[STATUS] != OUTSTANDING and longs[STATUS] != PARTLY:
        return SETTLED, 0
    starts, ends, splits = longs[len(longs) - len(asids) :], ints[len(asids) + 1 :], ints[_first_split(s, asids) :]
    size = s.tokens.shape[1]
    for i in range(len(asids)):
        planned = ends[i] - starts[i]
        if planned > 0 and s.spaces[asids[i]].length != starts[i]:
            return OUT_OF_ORDER, i
        if accepted[i] < 0 or accepted[i] > planned:
            return TOO_MANY, i
        if accepted[i] < planned and s.spaces[asids[i]].planned != ends[i] and not keep:
            return NOT_NEWEST, i
    for c in range(longs[NUM_COPIES]):
        _unpin_source(s, splits[4 * c], splits[4 * c + 3])
    if keep:
        left = 0
        for i in range(len(asids)):
            left += ends[i] - starts[i] - accepted[i]
        keep = left > 0
    ended = 0 if keep else 1
    t, sliding = 0, False
    for group in range(len(s.groups)):
        sliding |= s.groups[group, 0] > 0 and (len(s.checkpoints) == 0 or restoring)  # else states/steps.py does
    for i in range(len(asids)):
        asid = np.int64(asids[i])  # one type, so that each function it is passed to is compiled once
        _store(s, asid, starts[i], token_ids[t : t + accepted[i]])
        t += accepted[i]
        if not named and accepted[i]:
            s.spaces[asid].named = min(s.spaces[asid].named, starts[i] // size)
        length = s.spaces[asid].length + accepted[i]
        rejected = starts[i] + accepted[i] < ends[i] and not keep
        for row in range(asid, asid + len(s.groups)):
            s.spaces[row].length = length
            s.spaces[row].outstanding -= ended
            if rejected:
                s.spaces[row].planned = length
        if rejected:
            page_tables.drop_tail(s, asid, (length + size - 1) // size)
        if s.spaces[asid].status == CLOSING or length >= (s.spaces[asid].complete + 1) * size:
            _settle(s, asid)
        if sliding and s.spaces[asid].status == OPEN and accepted[i]:
            page_tables.slide_windows(s, asid, starts[i], length, restoring)
    if keep:
        for i in range(len(asids)):
            starts[i] += accepted[i]
        longs[STATUS], longs[NUM_COPIES] = PARTLY, 0
    else:
        longs[STATUS] = COMMITTED
    return OK, 0


@inlined
def _first_split(s: State, asids: I32) -> int:
    """Return where in `Step.ints` the splits begin."""
    return 2 * len(asids) + 1 + len(asids) * len(s.groups)


@compiled
def abort_step(s: State, asids: I32, longs: I64, ints: I32, copied: bool) -> tuple[int, int]:
    """Undo a plan: lengths are as before, and the frames for new tokens are given back. Return (code, where).

    Of a plan that is committed in part, the rest is undone.

    copied: whether the caller made the plan's copies. If so, each space keeps its copy of a tail, as KV may have been
            written there. If not, the space maps the source of the copy again, with the other spaces that map the
            source, and the target is freed.
    """
    if longs[STATUS] != OUTSTANDING and longs[STATUS] != PARTLY:
        return SETTLED, 0
    starts, ends, splits = longs[len(longs) - len(asids) :], ints[len(asids) + 1 :], ints[_first_split(s, asids) :]
    size = s.tokens.shape[1]
    for i in range(len(asids)):
        if ends[i] > starts[i] and s.spaces[asids[i]].planned != ends[i]:
            return NOT_NEWEST, i
    for i in range(len(asids)):
        if ends[i] > starts[i]:
            for row in range(asids[i], asids[i] + len(s.groups)):
                s.spaces[row].planned = starts[i]
            page_tables.drop_tail(s, np.int64(asids[i]), (starts[i] + size - 1) // size)
    for c in range(longs[NUM_COPIES]):
        source, target, row = splits[4 * c], splits[4 * c + 1], splits[4 * c + 2]
        if not copied:
            page = s.spaces[row].num_pages - 1
            frames.share(s.frames, s.reg, source)
            s.table[row, page] = source
            frames.drop(s, target, False, page, 0)
        _unpin_source(s, source, splits[4 * c + 3])
    for i in range(len(asids)):
        asid = np.int64(asids[i])
        for row in range(asid, asid + len(s.groups)):
            s.spaces[row].outstanding -= 1
        _settle(s, asid)
    longs[STATUS] = ABORTED
    return OK, 0


@compiled
def evict_frames(s: State, count: int) -> int:
    """Evict up to `count` frames in the policy's order, and return how many were evicted."""
    return quotas.evict_frames(s, count, s.ghosts[:0])
