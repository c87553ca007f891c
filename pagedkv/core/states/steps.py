"""A step with recurrent states: `pagedkv.core.tables.steps` for the pages, and a state in and out for each space.

    measure  how many tokens of the step have no KV yet, and how many states may be saved inside it
    plan     pages and state frames for all spaces, or neither; then frames for saves, as many as are free
    (run)    a kernel reads state_in and writes state_out, and the state after save_offsets[i] tokens to save_frames[i]
    commit   the state of a space is the saved one nearest before its last kept token; places are published
    abort    the frames for new states are free again, and every space has the state that it had

A step computes from `ready` on: tokens below `length` are computed again, and their KV is not written (I14). A frame
that a step writes is never its state_in, and is written once (I11). Every function returns a code of tables/steps.py or
one of those below; on any but OK nothing was changed.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from pagedkv.core.compiled import compiled, inlined, inner
from pagedkv.core.pool import frames, quotas
from pagedkv.core.pool.accounts import of_space, register
from pagedkv.core.state import (
    ABORTED,
    COMMITTED,
    HEAD,
    I32,
    I64,
    NEED,
    NIL,
    NUM_COPIES,
    NUM_EVICTABLE,
    NUM_FREE,
    NUM_LOST,
    NUM_REGISTERS,
    OPEN,
    OUTSTANDING,
    STATUS,
    State,
)
from pagedkv.core.states.bindings import (
    COMPUTED,
    GRID,
    REPLAYED,
    ROLLING,
    SKIPPED,
    Held,
    Pools,
    advance_state,
    bind,
    drop,
    drop_spares,
    follow_losses,
    include,
    is_behind,
    is_open,
    take,
)
from pagedkv.core.tables import page_tables, steps
from pagedkv.core.tables.steps import MOST_TOKENS, NEGATIVE, NOT_OPEN, OK, SETTLED, TOO_LONG, TOO_MANY

# codes, beside those of tables/steps.py
SHORT_STATES: Final = 30  # too few state frames; where = how many are needed
PLANNED: Final = 31  # where = index in the batch of a space that has an outstanding plan
OTHER_TOKENS: Final = 32  # where = index in `token_ids` of a token that differs from the one that its KV belongs to

OVER_STATE_QUOTA: Final = 34  # where = the account

NOT_PLAIN: Final = 33  # the step must be measured before it is planned: it is not a decode step without drafts

_SHARE: Final = 8
"""A sequence saves at most an eighth of the state frames in one step, or two, so that a long prompt does not evict all.
`pagedkv bench states` with 16 states: 768 tokens beyond the least a request; a quarter 910, a half 933, all 2,028."""


@inlined
def _is_place(h: Held, asid: int, position: int) -> bool:
    """Return whether the state after `position` tokens of a space is published."""
    if position < h.rows[asid].next_place or position % h.rules[GRID]:
        return False
    if position > h.rows[asid].prompt_end:
        return bool(h.rules[ROLLING])
    at, end = 0, np.int64(h.rows[asid].num_places)
    while at < end and h.places[asid, at] < position:
        at += 1
    return bool(at < end and h.places[asid, at] == position)


@inlined
def _include(found: I32, n: int, offset: int, count: int) -> int:
    """Add an offset in 1 .. count - 1 to the first `n` of `found`. Return how many there are."""
    return include(found, n, offset) if 0 < offset < count else n


@inlined
def _saves(h: Held, asid: int, count: int, certain: int, found: I32) -> int:
    """Write the offsets in 1 .. count - 1 after which the state is to be saved to `found`; return how many there are.

    They are the places of the prompt, the last page of the output, and the end of the `certain` tokens, which are no
    drafts: a rejected draft then costs no replay. Without that save, the tokens to replay grow with each rejection.
    """
    start, n = np.int64(h.rows[asid].ready), 0
    for i in range(h.rows[asid].num_places):
        n = _include(found, n, h.places[asid, i] - start, count)
    if h.rules[ROLLING]:
        last = (start + count) // h.rules[GRID] * h.rules[GRID]
        if last > h.rows[asid].prompt_end:
            n = _include(found, n, last - start, count)
    return _include(found, n, certain, count)


@inlined
def _thin(offsets: I32, count: int, room: int, kept: int) -> None:
    """Leave `room` of the first `count` offsets, `kept` among them: the one closest to the one before it goes first."""
    while count > room:
        least, smallest = 0, np.int64(MOST_TOKENS)
        for j in range(count):
            gap = offsets[j] - (offsets[j - 1] if j > 0 else 0)
            if gap < smallest and offsets[j] != kept:
                least, smallest = j, np.int64(gap)
        for j in range(least, count - 1):
            offsets[j] = offsets[j + 1]
        count -= 1


@compiled
def measure_rows(m: Pools, rows: tuple[I32, I64, I64], fresh: I64, scratch: I32) -> tuple[int, int, int, int]:
    """Count the tokens of a step whose KV is new, and the states to be saved inside it, before it is planned.

    rows: asids int32 [B], counts int64 [B], and how many of these are certain int64 [B], or [0] if no state can be
          saved inside a step. scratch: int32 [MOST_PLACES + 2].
    Returns: (code, where, new tokens, saves). Modifies: fresh (int64 [B]), the new tokens of each space
    """
    s, _, h = m
    asids, counts, certain = rows
    follow_losses(m)
    total = saves = tokens = 0
    for i in range(len(asids)):
        asid = np.int64(asids[i])
        if asid < 0 or asid >= len(s.spaces) or not is_open(s, asid):
            return NOT_OPEN, i, 0, 0
        if counts[i] < 0:
            return NEGATIVE, i, 0, 0
        if s.spaces[asid].outstanding > 0:
            return PLANNED, i, 0, 0
        if counts[i] > MOST_TOKENS - s.spaces[asid].length or counts[i] > MOST_TOKENS - tokens:
            return TOO_LONG, i, 0, 0
        fresh[i] = max(np.int64(0), h.rows[asid].ready + counts[i] - s.spaces[asid].length)
        total += fresh[i]
        tokens += counts[i]
        if len(certain) and counts[i] > 1:
            saves += _saves(h, asid, counts[i], min(counts[i], certain[i]), scratch)
    return OK, 0, total, saves


class StepArrays(NamedTuple):
    """The arrays of a step, as States lays them out.

    fresh:       the new tokens of each sequence.
    certain:     the tokens of each that are no drafts, or [0] to save none inside.
    pages, step: longs and ints of two Steps, one of the pages and one of the caller. They are the same arrays if no
                 token is computed again.
    numbers:     see StateStep. scratch: as in measure_rows; [0] if the step was not measured.
    """

    asids: I32
    counts: I64
    fresh: I64
    certain: I64
    pages: tuple[I64, I32]
    step: tuple[I64, I32]
    numbers: I32
    scratch: I32


@compiled
def plan_rows(m: Pools, a: StepArrays) -> tuple[int, int]:
    """Plan a step that `measure_rows` has measured, or a plain one: no space has more than one token, none is replayed.

    Returns: (code, where). NOT_PLAIN if the step was not measured, and is not a plain one
    """
    s, t, h = m
    asids, counts, states = a.asids, a.counts, a.numbers
    batch, needed = len(asids), 0
    if len(a.scratch) == 0:
        if is_behind(s, t):
            follow_losses(m)
        for i in range(batch):
            asid = np.int64(asids[i])
            if asid < 0 or asid >= len(s.spaces) or counts[i] < 0 or counts[i] > 1:
                return NOT_PLAIN, i
            space, row = s.spaces[asid], h.rows[asid]
            if space.status != OPEN or space.outstanding > 0 or row.ready != space.length:
                return NOT_PLAIN, i
            needed += counts[i] > 0 and row.spare == NIL
    else:
        for i in range(batch):
            needed += counts[i] > 0 and h.rows[asids[i]].spare == NIL
    has_quotas = len(t.reg) > NUM_REGISTERS
    if has_quotas or needed > t.reg[NUM_FREE] + t.reg[NUM_EVICTABLE]:
        code, where = _find_room(m, asids, counts)
        if code != OK:
            drop_spares(m)
            code, where = _find_room(m, asids, counts)
        if code != OK:
            return code, where
    code, where = steps.plan_step(s, asids, a.fresh, a.pages[0], a.pages[1])
    if code != OK:
        return code, where
    if s.reg[NUM_LOST]:
        follow_losses(m)
    if has_quotas:  # again, as losses have freed states
        _, needed = _find_room(m, asids, counts)
        quotas.reclaim(t, needed)
    for i in range(batch):
        asid = np.int64(asids[i])
        states[i] = h.rows[asid].state
        states[batch + i] = NIL
        if counts[i] > 0:
            states[batch + i] = h.rows[asid].spare if h.rows[asid].spare != NIL else take(s, t, asid)
            h.rows[asid].spare = NIL
    if len(states) > 3 * batch + 1:
        _plan_saves(m, a)
    frames.note_peak(t.frames, t.reg)
    if len(a.step[0]) != len(a.pages[0]):
        _lay_out(s, h, a)
    return OK, where


@inner
def _find_room(m: Pools, asids: I32, counts: I64) -> tuple[int, int]:
    """Return OK and the state frames that a step takes, or the code of the shortage: of the pool, or of a quota.

    If tenants have quotas, quotas.reclaim makes these frames free afterwards.
    """
    s, t, h = m
    needed, room, has_quotas = 0, t.reg[NUM_FREE] + t.reg[NUM_EVICTABLE], len(t.reg) > NUM_REGISTERS
    if has_quotas:
        quotas.share_limits(s, t)
    for i in range(len(asids)):
        if counts[i] > 0 and h.rows[asids[i]].spare == NIL:
            needed += 1
            if has_quotas:
                t.reg[register(of_space(s, np.int64(asids[i])), NEED)] += 1
    if has_quotas:
        account = quotas.set_gives(t)
        if account >= 0:
            return OVER_STATE_QUOTA, account
        room = t.reg[NUM_FREE] + quotas.givable(t)
    return (OK if needed <= room else SHORT_STATES), needed


@inner
def _room_for_saves(m: Pools, asid: int, wanted: int) -> int:
    """Return how many of `wanted` states a space can save now. If tenants have quotas, make the frames free."""
    s, t, _ = m
    room = min(wanted, t.reg[NUM_FREE] + t.reg[NUM_EVICTABLE], max(2, len(t.frames) // _SHARE))
    if len(t.reg) > NUM_REGISTERS:
        account = np.int64(of_space(s, asid))
        quotas.share_limits(s, t)
        while room > 0 and (quotas.measure_one(t, account, room) >= 0 or quotas.givable(t) < room - t.reg[NUM_FREE]):
            room -= 1
        if room > 0:
            quotas.reclaim(t, room)
    return int(room)


@inner
def _plan_saves(m: Pools, a: StepArrays) -> None:
    """Take frames for the states that are saved inside the step, up to the limit of one step. Modifies: a.numbers"""
    s, t, h = m
    asids, counts, states, scratch = a.asids, a.counts, a.numbers, a.scratch
    batch, n = len(asids), 0
    indptr, saves = states[2 * batch : 3 * batch + 1], states[3 * batch + 1 :]
    most = len(saves) // 2
    for i in range(batch):
        if counts[i] > 1:
            wanted = _saves(h, np.int64(asids[i]), counts[i], min(counts[i], a.certain[i]), scratch)
            room = _room_for_saves(m, np.int64(asids[i]), np.int64(wanted))
            h.totals[SKIPPED] += wanted - room
            _thin(scratch, wanted, room, a.certain[i] if a.certain[i] < counts[i] else scratch[wanted - 1])
            for j in range(room):
                saves[n] = scratch[j]
                saves[most + n] = take(s, t, np.int64(asids[i]))
                n += 1
        indptr[i + 1] = n


@inner
def _lay_out(s: State, h: Held, a: StepArrays) -> None:
    """Write the step of the caller: tokens from `ready` on, with slot -1 where the KV is known. Modifies: a.step"""
    asids, counts, fresh, pages = a.asids, a.counts, a.fresh, a.pages
    batch, groups = len(asids), len(s.groups)
    longs, ints = a.step
    tokens = (len(longs) - HEAD - batch) // (groups + 1)
    new = (len(pages[0]) - HEAD - batch) // (groups + 1)
    positions, starts = longs[HEAD + groups * tokens :], longs[len(longs) - batch :]
    at = first = 0
    for i in range(batch):
        start, known = h.rows[asids[i]].ready, counts[i] - fresh[i]
        for group in range(groups):
            for j in range(counts[i]):
                slot = np.int64(-1)
                if j >= known:
                    slot = pages[0][HEAD + group * new + first + j - known]
                longs[HEAD + group * tokens + at + j] = slot
        for j in range(counts[i]):
            positions[at + j] = start + j
        at += int(counts[i])
        first += int(fresh[i])
        starts[i] = start
        ints[1 + i] = at
        ints[batch + 1 + i] = start + counts[i]
    for i in range(2 * batch + 1, len(ints)):  # the copies are those of the step of the pages
        ints[i] = pages[1][i]
    longs[STATUS], longs[NUM_COPIES] = OUTSTANDING, pages[0][NUM_COPIES]


@compiled
def commit_rows(
    m: Pools, a: StepArrays, kept: tuple[I64, I64], ids: tuple[I32, I32], flags: tuple[bool, bool]
) -> tuple[int, int]:
    """Commit the first kept[0][i] tokens of each space, and give the rest back. ids[0]: these tokens.

    kept[1], ids[1]: scratch of the same shapes; [0] if no token of the step is computed again. flags: `named` and
                     `restoring` of tables.steps.commit_step.
    """
    s, t, h = m
    asids, pages, states = a.asids, a.pages, a.numbers
    longs, ints = a.step
    wanted, accepted = kept
    token_ids, new_ids = ids
    named, restoring = flags
    if longs[STATUS] != OUTSTANDING:
        return SETTLED, 0
    if is_behind(s, t):
        follow_losses(m)
    num_new = len(token_ids)
    if len(accepted):
        code, num_new = _pick_new(m, a, kept, ids, named)
        if code != OK:
            return code, num_new
        code, where = steps.commit_step(
            s, asids, pages[0], pages[1], accepted, new_ids[:num_new], named, False, restoring
        )
    else:
        code, where = steps.commit_step(s, asids, pages[0], pages[1], wanted, token_ids, named, False, restoring)
    if code != OK:
        return code, where
    if s.reg[NUM_LOST]:
        follow_losses(m)
    if not restoring:
        h.totals[COMPUTED] += len(token_ids)
        h.totals[REPLAYED] += len(token_ids) - num_new
    slides = _slides(s)
    is_special = slides or restoring or len(states) > 3 * len(asids) + 1
    for i in range(len(asids)):
        asid, before = np.int64(asids[i]), np.int64(h.rows[asids[i]].ready)
        after, state = before + wanted[i], np.int64(states[len(asids) + i])
        whole = wanted[i] == ints[i + 1] - ints[i] > 0
        if whole and not is_special and after < h.rows[asid].next_place and is_open(s, asid):
            advance_state(t, h, asid, state, after)  # nothing to publish: most rows of a decode step
            continue
        _settle_row(m, (i, asid), a, (wanted[i], restoring))
        if slides and is_open(s, asid) and h.rows[asid].ready > before:
            page_tables.slide_windows(s, asid, before, np.int64(h.rows[asid].ready), restoring)
    if s.reg[NUM_LOST]:
        follow_losses(m)
    longs[STATUS] = COMMITTED
    return OK, 0


@inlined
def _slides(s: State) -> bool:
    """Return whether a layer group has a window."""
    slides = False
    for group in range(len(s.groups)):
        slides |= s.groups[group, 0] > 0
    return slides


@inner
def _pick_new(m: Pools, a: StepArrays, kept: tuple[I64, I64], ids: tuple[I32, I32], named: bool) -> tuple[int, int]:
    """Pick the tokens whose KV is new out of those that commit_rows gets. See there for the arguments.

    Returns: (code, where; or how many are new). Modifies: kept[1], the new ones of each space, and ids[1]
    """
    s, _, h = m
    asids, ints = a.asids, a.step[1]
    wanted, accepted = kept
    token_ids, new_ids = ids
    at = count = 0
    for i in range(len(asids)):
        asid = np.int64(asids[i])
        if wanted[i] < 0 or wanted[i] > ints[i + 1] - ints[i]:
            return TOO_MANY, i
        known = int(min(wanted[i], s.spaces[asid].length - h.rows[asid].ready))
        different = _differs(s, asid, h.rows[asid].ready, token_ids[at : at + known]) if named else -1
        if different >= 0:
            return OTHER_TOKENS, at + different
        accepted[i] = wanted[i] - known
        for j in range(accepted[i]):
            new_ids[count + j] = token_ids[at + known + j]
        at += int(wanted[i])
        count += int(accepted[i])
    return OK, count


@inlined
def _differs(s: State, asid: int, start: int, token_ids: I32) -> int:
    """Return the index of the first token that differs from the one recorded after `start`, or -1.

    A token whose id is unknown (-1) or whose page is given back equals every token.
    """
    size = s.tokens.shape[1]
    for j in range(len(token_ids)):
        frame = s.table[asid, (start + j) // size]
        if frame >= 0:
            recorded = s.tokens[frame, (start + j) % size]
            if recorded >= 0 and recorded != token_ids[j]:
                return j
    return -1


@inlined
def _settle_row(m: Pools, row: tuple[int, int], a: StepArrays, kept: tuple[int, bool]) -> None:
    """Publish the states of one space that are places, take the last one that is valid, and drop the others.

    row: index in the batch, and asid. A space that was released meanwhile takes none.
    kept: the tokens that are kept, and whether every state is published: one that a tier has kept is a place.
    """
    s, t, h = m
    i, asid = row
    num_kept, restoring = kept
    batch, states, ints = len(a.asids), a.numbers, a.step[1]
    indptr, saves = states[2 * batch : 3 * batch + 1], states[3 * batch + 1 :]
    start, best, at = int(h.rows[asid].ready), NIL, 0
    lives = is_open(s, asid)
    for j in range(indptr[i], indptr[i + 1] + 1):
        state, offset = int(states[batch + i]), int(ints[i + 1] - ints[i])
        if j < indptr[i + 1]:
            state, offset = int(saves[len(saves) // 2 + j]), int(saves[j])
        if state == NIL:
            continue
        if not lives or offset > num_kept:
            drop(t, h, state)
            continue
        held: int = state
        if restoring or _is_place(h, asid, start + offset):
            held = bind(m, asid, start + offset, state)
            if held != state:
                frames.share(t.frames, t.reg, held)
                drop(t, h, state)
        if best != NIL:
            drop(t, h, best)
        best, at = held, start + offset
    if best != NIL:
        advance_state(t, h, asid, best, at)


@compiled
def abort_rows(m: Pools, a: StepArrays, copied: bool) -> tuple[int, int]:
    """Undo a step: see tables.steps.abort_step. The frames for new states are free again."""
    s, t, h = m
    states = a.numbers
    if a.step[0][STATUS] != OUTSTANDING:
        return SETTLED, 0
    code, where = steps.abort_step(s, a.asids, a.pages[0], a.pages[1], copied)
    if code != OK:
        return code, where
    follow_losses(m)
    batch = len(a.asids)
    for i in range(batch):
        if states[batch + i] != NIL:
            drop(t, h, np.int64(states[batch + i]))
    saves = states[3 * batch + 1 :]
    for j in range(states[3 * batch]):
        drop(t, h, np.int64(saves[len(saves) // 2 + j]))
    follow_losses(m)
    a.step[0][STATUS] = ABORTED
    return OK, 0
