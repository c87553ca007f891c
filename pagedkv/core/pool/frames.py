"""Frames: the status of each frame, and the calls that change it. It knows no sequences and no tensors.

            take                  drop to 0, published
   FREE ───────────▶ MAPPED ───────────────────────────▶ CACHED
    ▲                 │  ▲                                │  │
    └─────────────────┘  └──────────── share ─────────────┘  │
    ▲   drop to 0 (by way of RETIRED while pinned)           │
    └────────────────── evict (eviction.py) ─────────────────┘

I1, I2 and I7 hold at every return. free_runs.py chooses which free frame a space gets. The cached frames that are not
pinned are on the lists of eviction_order.py.

Fences. While an epoch is open, work in flight may still read a frame that is dropped. Such a frame gets a pin, and is
on the list FENCED, with the newest epoch as its `entered` time, until that epoch has passed. If the frame is mapped
again, it stays fenced; if it is dropped again, it moves to the end of the list. So the list is in order of epochs, and
pages leave it before their prefix. Each operation is O(1) a frame, for a pool of any size.

A function that runs for each frame of a step is inlined: a call passes the 80 words of `State` on the stack.
"""

from __future__ import annotations

from pagedkv.core.compiled import compiled, inlined, inner
from pagedkv.core.pool import free_runs
from pagedkv.core.pool.accounts import count
from pagedkv.core.pool.eviction_order import (
    MASK,
    OLDEST,
    delist,
    enlist,
    enlist_before,
    enter,
    leave,
    raise_floor,
    rank,
)
from pagedkv.core.prefix import index
from pagedkv.core.state import (
    AMONG_FENCED,
    BEHIND_WINDOW,
    CACHED,
    CACHED_FENCED,
    EPOCH,
    FENCED,
    FIRST_LIST,
    FREE,
    I64,
    MAPPED,
    NIL,
    NUM_CACHED,
    NUM_FREE,
    NUM_RETIRED,
    PASSED,
    PEAK,
    RETIRED,
    USED,
    Records,
    State,
)


@inlined
def vacate(records: Records, reg: I64, frame: int) -> None:
    """Mark `frame`, which is not published, as free. The caller adds it to the free runs by free_runs.put."""
    records[frame].status = FREE
    count(records, reg, frame, USED, -1)


@inner
def _unpublish_companions(s: State, leader: int) -> None:
    """Unpublish the companions of `leader`, which is about to be freed. Free the cached ones; retire those with pins.

    Eviction frees companions before their leader (I9). So a companion is still published here only if the leader is
    freed because a hole cut both off from their prefix.
    """
    for group in range(1, len(s.groups)):
        frame = index.find_companion(s, leader, group)
        if frame < 0:
            continue
        index.remove(s, frame)
        if s.frames[frame].status == CACHED:
            free_cached(s, frame)


@inner
def free_cached(s: State, frame: int) -> bool:
    """Free the cached `frame`, which the index does not find any more; retire it while it has pins.

    Returns: whether the frame is free
    """
    s.reg[NUM_CACHED] -= 1
    if s.frames[frame].pins > 0:
        s.reg[CACHED_FENCED] -= s.frames[frame].place == AMONG_FENCED
        s.frames[frame].status = RETIRED
        s.reg[NUM_RETIRED] += 1
        return False
    delist(s.frames, s.reg, frame)
    vacate(s.frames, s.reg, frame)
    free_runs.put(s.chunks, s.reg, frame, 1)
    return True


@inner
def free(s: State, frame: int) -> None:
    """Free `frame`, which no page table maps and no work reads."""
    if s.frames[frame].published:
        if len(s.groups) > 1 and s.frames[frame].published == 1:
            _unpublish_companions(s, frame)
        index.remove(s, frame)
    vacate(s.frames, s.reg, frame)
    free_runs.put(s.chunks, s.reg, frame, 1)


@inlined
def claim(records: Records, reg: I64, frame: int, account: int) -> None:
    """Mark a frame from free_runs.take as mapped once, and charge it to `account`."""
    records[frame].account = account
    count(records, reg, frame, USED, 1)
    records[frame].refs = 1
    records[frame].status = MAPPED
    records[frame].uses = 0
    records[frame].floor = 0
    records[frame].generation += 1


@inlined
def note_peak(records: Records, reg: I64) -> None:
    """Update PEAK. To be called after frames were mapped."""
    mapped = len(records) - reg[NUM_FREE] - reg[NUM_CACHED] - reg[NUM_RETIRED]
    reg[PEAK] = max(reg[PEAK], mapped)


@inlined
def share(records: Records, reg: I64, frame: int) -> None:
    """Add a reference to `frame`, which is mapped, cached or retired."""
    records[frame].refs += 1
    if records[frame].status == CACHED:
        if records[frame].pins == 0:
            delist(records, reg, frame)
        elif records[frame].place == AMONG_FENCED:
            reg[CACHED_FENCED] -= 1
        reg[NUM_CACHED] -= 1
        note_peak(records, reg)
    elif records[frame].status == RETIRED:
        reg[NUM_RETIRED] -= 1
        note_peak(records, reg)
    records[frame].status = MAPPED


@inlined
def map_matched(s: State, frame: int) -> None:
    """Add a reference to `frame`, which a prompt matched, and count the use."""
    share(s.frames, s.reg, frame)
    s.frames[frame].uses = min(255, int(s.frames[frame].uses) + 1)


@inner
def _fence(records: Records, reg: I64, frame: int) -> None:
    if records[frame].place == AMONG_FENCED:
        leave(records, reg, frame)
    else:
        records[frame].pins += 1
    records[frame].entered = reg[EPOCH] & MASK
    enter(records, reg, frame, FENCED)


@inner
def drop(s: State, frame: int, keep: int, page: int, advice: int) -> None:
    """Remove a reference to `frame`, page number `page` of a space with that `advice`.

    Without any reference left, a published frame becomes cached if `keep` is 1 (or True), and any frame if `keep` is 2.
    Every other frame is retired while it has pins, else freed.
    keep: whether the page's whole prefix stays mapped or cached, so that a prompt can still find the frame.
    """
    if drop_reference(s.frames, s.reg, frame, keep, page * s.tokens.shape[1], advice):
        free(s, frame)


@inlined
def drop_reference(records: Records, reg: I64, frame: int, keep: int, position: int, advice: int) -> bool:
    """Do the same as `drop`, but return True instead of freeing the frame: the caller must free it.

    position: the position of the first token of the frame's page.
    """
    records[frame].refs -= 1
    if records[frame].refs > 0:
        return False
    fenced = reg[EPOCH] > reg[PASSED]
    if fenced:
        _fence(records, reg, frame)
    if keep > (records[frame].published == 0):
        records[frame].status = CACHED
        records[frame].rank = rank(records, reg, frame, position, advice)
        reg[NUM_CACHED] += 1
        reg[CACHED_FENCED] += fenced
        if records[frame].pins == 0:
            enlist(records, reg, frame)
        else:
            raise_floor(records, frame)
    elif records[frame].pins > 0:
        records[frame].status = RETIRED
        reg[NUM_RETIRED] += 1
    else:
        return True
    return False


@inner
def drop_behind_window(s: State, frame: int, page: int, advice: int) -> None:
    """Remove a reference to `frame`, page number `page`, whose prefix the space may not map any more.

    Without any reference left, the frame becomes cached if its prefix is published. It is then evicted just before its
    prefix: while a sequence runs on, a page behind its window is not worth more than the page before it.
    """
    if s.frames[frame].refs > 1:
        s.frames[frame].refs -= 1
        return
    before = index.nearest_evictable(s, frame) if s.frames[frame].published else index.PREFIX_GONE
    if before == index.PREFIX_IN_USE and s.frames[frame].pins == 0 and s.reg[EPOCH] == s.reg[PASSED]:
        drop(s, frame, True, page, advice)
    elif before == index.PREFIX_GONE:
        drop(s, frame, False, page, advice)
    else:
        s.frames[frame].refs = 0
        s.frames[frame].status = CACHED
        s.frames[frame].rank = rank(s.frames, s.reg, frame, page * s.tokens.shape[1], advice)
        s.reg[NUM_CACHED] += 1
        if s.reg[EPOCH] > s.reg[PASSED]:
            _fence(s.frames, s.reg, frame)
            s.reg[CACHED_FENCED] += 1
        if s.frames[frame].pins > 0:
            s.frames[frame].rank += BEHIND_WINDOW
        else:
            _enlist_behind_window(s, frame, before)


@inlined
def _enlist_behind_window(s: State, frame: int, before: int) -> None:
    """Put the cached `frame` on a list. before: what `nearest_evictable` returns for it, but for PREFIX_GONE."""
    if before >= 0:
        enlist_before(s.frames, s.reg, frame, before)
    else:
        enlist(s.frames, s.reg, frame)


@inner
def touch(s: State, frame: int) -> None:
    """Move a cached frame to the end of its list, as if it were mapped and dropped now."""
    if s.frames[frame].pins == 0:
        delist(s.frames, s.reg, frame)
    elif s.frames[frame].rank >= BEHIND_WINDOW and s.frames[frame].pins == 1 and s.reg[EPOCH] > s.reg[PASSED]:
        s.frames[frame].rank -= BEHIND_WINDOW  # its prefix is moved next, and waits for the same epoch
        raise_floor(s.frames, frame)
    if s.reg[EPOCH] > s.reg[PASSED]:
        s.reg[CACHED_FENCED] += s.frames[frame].place != AMONG_FENCED
        _fence(s.frames, s.reg, frame)
    if s.frames[frame].pins == 0:
        enlist(s.frames, s.reg, frame)


@inner
def pin(s: State, frame: int) -> None:
    """Add a pin to `frame`: it is neither evicted nor reused while it has a pin (I7)."""
    if s.frames[frame].pins == 0 and s.frames[frame].status == CACHED:
        delist(s.frames, s.reg, frame)
    s.frames[frame].pins += 1


@inner
def unpin(s: State, frame: int) -> None:
    """Remove a pin. Without any pin left, a cached frame is evictable and a retired frame is free."""
    s.frames[frame].pins -= 1
    if s.frames[frame].pins == 0:
        if s.frames[frame].status == CACHED and s.frames[frame].rank >= BEHIND_WINDOW:
            _unpin_behind_window(s, frame)
        elif s.frames[frame].status == CACHED:
            enlist(s.frames, s.reg, frame)
        elif s.frames[frame].status == RETIRED:
            s.reg[NUM_RETIRED] -= 1
            free(s, frame)


@inner
def _unpin_behind_window(s: State, frame: int) -> None:
    """Put the cached `frame` on a list, or free it if a page before it was evicted while the frame was pinned."""
    s.frames[frame].rank -= BEHIND_WINDOW
    before = index.nearest_evictable(s, frame)
    if before != index.PREFIX_GONE:
        _enlist_behind_window(s, frame, before)
    else:
        s.reg[NUM_CACHED] -= 1
        free(s, frame)


@compiled
def pass_epoch(s: State, epoch: int) -> int:
    """Remove the fences of `epoch` and older epochs, whose work has finished. Return how many frames were fenced."""
    passed = 0
    frame = s.reg[FIRST_LIST + 4 * FENCED + OLDEST]
    while frame != NIL and ((epoch - int(s.frames[frame].entered)) & MASK) <= MASK // 2:
        leave(s.frames, s.reg, frame)
        if s.frames[frame].status == CACHED:
            s.reg[CACHED_FENCED] -= 1
        unpin(s, frame)
        passed += 1
        frame = s.reg[FIRST_LIST + 4 * FENCED + OLDEST]
    s.reg[PASSED] = max(s.reg[PASSED], epoch)
    return passed


def pending(s: State) -> int:
    """Return how many unmapped frames become available when the outstanding plans and open epochs end."""
    return int(s.reg[NUM_RETIRED] + s.reg[CACHED_FENCED])
