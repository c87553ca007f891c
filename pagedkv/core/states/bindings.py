"""Bindings: which recurrent state belongs to which space, and which to which page. Compiled functions over two pools.

    s   State of the pages. `s.checkpoints[frame]` is the state bound to the page in `frame`.
    t   State of the state frames: the same records and lists. `t.tokens[state]` is (frame, generation) of its page.
    h   Held: a row for each space, and the distance of each checkpoint to the one before it on its path.

A state frame is written once, by the step that took it, and never again. A space holds one reference to the state after
its first `ready` tokens. A checkpoint is a state that is bound to a published page; it is the state after the last
token of that page. Without references it is cached until the policy evicts it (t), or until its page goes (s).

Many functions free pages or close spaces without knowing states. They append the frame or the asid to a queue behind
`s.checkpoints`. `follow_losses` handles the queue before any other change to a state.

Laws: I10 a space has a state exactly if ready > 0, and ready <= length. I12 references of a state are the spaces and
outstanding steps that name it. I13 a checkpoint is bound to one published page. I15 a checkpoint is never a reason for
OutOfFrames. I11 and I14 are those of steps.py; check.py proves all.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from pagedkv.core.compiled import compiled, inlined, inner
from pagedkv.core.pool import eviction, frames, free_runs
from pagedkv.core.pool.accounts import of_space
from pagedkv.core.prefix import index
from pagedkv.core.state import CACHED, EPOCH, HOLE, I32, I64, KEY, NIL, NUM_FREE, NUM_LOST, OPEN, PASSED, Records, State
from pagedkv.core.tables import page_tables
from pagedkv.core.tables.forget import forget_pages

MOST_PLACES: Final = 64
"""Places of one prompt that are kept. If there are more message starts, the last ones are kept."""

_OTHER_PLACES: Final = 20  # of these, room for distances, the branch point and the end of the prompt

ROW: Final = np.dtype(
    [
        ("ready", np.int64),  # tokens after which `state` is the state; the next step computes from here on
        ("prompt_end", np.int64),  # tokens of the prompt with which the space was opened
        ("state", np.int32),  # the state frame of the space, or NIL
        ("rolled", np.int32),  # the last checkpoint of its output, or NIL; the next one replaces it
        ("rolled_generation", np.uint32),
        ("num_places", np.int32),  # places of the prompt beyond `ready`, when they were listed
        ("next_place", np.int64),  # the first place beyond `ready`, or NO_PLACE
        ("spare", np.int32),  # a frame reserved for the state that the next step writes, or NIL
    ],
    align=True,
)

# totals
SKIPPED: Final = 0  # states that were to be saved inside a step, without a frame for them
REPLAYED: Final = 1  # committed tokens whose KV was known
COMPUTED: Final = 2  # committed tokens, replayed ones included
PUBLISHED: Final = 3  # checkpoints made
COPIED: Final = 4  # state frames copied by copy_states, for kernels that change a state in place
NUM_TOTALS: Final = 5

# columns of `rules`, see Places; distances follow
GRID: Final = 0
ROLLING: Final = 1
BRANCHES: Final = 2
NEAR: Final = 3  # tokens before the end that are a place if message starts are known
DISTANCES: Final = 4

NO_PLACE: Final = 2**62

_ROOT: Final = 0


class Held(NamedTuple):
    """The arrays beside the two pools. Shapes: A rows of the page table, N state frames, M MOST_PLACES."""

    rows: Records  # ROW [A]
    places: I32  # [A, M] ascending positions of a prompt at which its state is kept
    gaps: I64  # [N] tokens from the checkpoint before it, of a checkpoint: the cost of computing it again
    totals: I64  # [NUM_TOTALS]
    rules: I64  # [DISTANCES + n] when a state is kept, see Places
    boundaries: I32  # token ids with which a message begins


class Pools(NamedTuple):
    """The two pools and what is held, with which most functions begin: `s, t, h = m`."""

    pages: State
    states: State
    held: Held


@inlined
def _bound_state(s: State, t: State, frame: int) -> int:
    """Return the state bound to the page in `frame`, or NIL. An evicted state leaves its number in `checkpoints`."""
    state: int = s.checkpoints[frame]
    if (
        state >= 0
        and t.frames[state].published
        and t.tokens[state, 0] == frame
        and t.tokens[state, 1] == np.int32(s.frames[frame].generation & 0x7FFFFFFF)
    ):
        return state
    return NIL


@inlined
def drop(t: State, h: Held, state: int) -> None:
    """Remove a reference to `state`. Without any, a checkpoint is cached and every other state frame is free."""
    if frames.drop_reference(t.frames, t.reg, state, True, h.gaps[state], 0):
        frames.free(t, state)


@inlined
def take(s: State, t: State, asid: int) -> int:
    """Return a state frame with one reference, for a space. The caller has checked that one is free or evictable.

    If tenants have quotas, it has made one free.
    """
    if t.reg[NUM_FREE] == 0:
        eviction.evict(t, np.int64(0))
    state, _ = free_runs.take(t.chunks, t.reg, NIL, np.int64(1))
    frames.claim(t.frames, t.reg, state, np.int64(of_space(s, asid)))
    return state


@inner
def unbind(t: State, state: int) -> None:
    """Unpublish `state`: no page leads to it any more. Without references it is free."""
    index.remove(t, state)
    if t.frames[state].status == CACHED:
        frames.free_cached(t, state)


@inlined
def is_behind(s: State, t: State) -> bool:
    """Return whether follow_losses has work to do."""
    return bool(s.reg[NUM_LOST] or s.reg[PASSED] != t.reg[PASSED] or s.reg[EPOCH] != t.reg[EPOCH])


@inner
def follow_losses(m: Pools) -> None:
    """Open and pass the epochs of `s` in `t`, unbind states whose pages are gone, and drop those of closed spaces."""
    s, t, h = m
    t.reg[EPOCH] = s.reg[EPOCH]
    if s.reg[PASSED] > t.reg[PASSED]:
        frames.pass_epoch(t, s.reg[PASSED])
    for i in range(s.reg[NUM_LOST]):
        entry = np.int64(s.checkpoints[len(s.frames) + i])
        if entry < 0:
            set_state(t, h, -1 - entry, NIL, 0)
            _drop_spare(t, h, -1 - entry)
            continue
        state = np.int64(-2 - s.checkpoints[entry])
        s.checkpoints[entry] = NIL
        if t.frames[state].published and t.tokens[state, 0] == entry:
            unbind(t, state)
    s.reg[NUM_LOST] = 0


@compiled
def settle_losses(m: Pools) -> None:
    """Call follow_losses, from Python."""
    follow_losses(m)


@inner
def set_state(t: State, h: Held, asid: int, state: int, ready: int) -> None:
    """Give a space `state`, to which it has a reference already, in place of the one that it holds."""
    before = np.int64(h.rows[asid].state)
    h.rows[asid].state = state
    h.rows[asid].ready = ready
    _find_next_place(h, asid)
    if before != NIL:
        drop(t, h, before)


@inlined
def _drop_spare(t: State, h: Held, asid: int) -> None:
    """Free the spare frame of a space, if it has one."""
    spare = np.int64(h.rows[asid].spare)
    if spare != NIL:
        h.rows[asid].spare = NIL
        drop(t, h, spare)


@compiled
def drop_spares(m: Pools) -> None:
    """Free the spare frames of all spaces, because another space needs a frame. O(rows)"""
    _, t, h = m
    for asid in range(len(h.rows)):
        _drop_spare(t, h, asid)


@inlined
def advance_state(t: State, h: Held, asid: int, state: int, ready: int) -> None:
    """Give a space the state that a step has written. Its frame before is the one that the next step writes.

    So a running space alternates between two frames, and takes none from the pool. While an epoch is open, work in
    flight may still read the frame before, and it waits for the epoch.
    """
    before, waits = np.int64(h.rows[asid].state), t.reg[EPOCH] > t.reg[PASSED]
    h.rows[asid].state = state
    h.rows[asid].ready = ready
    if ready >= h.rows[asid].next_place:
        _find_next_place(h, asid)
    if before == NIL:
        return
    record = t.frames[before]
    if h.rows[asid].spare == NIL and record.refs == 1 and record.published == 0 and not waits:
        h.rows[asid].spare = before
        t.frames[before].generation += 1  # as if it were taken now: a tier may still read what it held
    else:
        drop(t, h, before)


@inner
def _find_next_place(h: Held, asid: int) -> None:
    """Set the first place of a space beyond `ready`: one of its prompt, or a page of its output."""
    ready, end, grid = h.rows[asid].ready, h.rows[asid].prompt_end, h.rules[GRID]
    place = np.int64(NO_PLACE)
    if h.rules[ROLLING]:
        place = (max(ready, end) // grid + 1) * grid
    for i in range(h.rows[asid].num_places - 1, -1, -1):
        if h.places[asid, i] > ready:
            place = np.int64(h.places[asid, i])
    h.rows[asid].next_place = place


@inner
def _last_checkpoint(s: State, t: State, pages: I32) -> tuple[int, int]:
    """Return (the state of the last of `pages` that has one, pages up to it), or (NIL, 0). pages: frames, int32 [P]."""
    for page in range(len(pages) - 1, -1, -1):
        if pages[page] != HOLE:
            state = _bound_state(s, t, pages[page])
            if state != NIL:
                return state, page + 1
    return NIL, 0


@compiled
def last_of(m: Pools, found: I32) -> int:
    """Return up to which of the frames `found` of a prefix (int32 [pages]) there is a state: their number."""
    s, t, _ = m
    return _last_checkpoint(s, t, found)[1]


@inner
def _measure_gap(m: Pools, asid: int, state: int, pages: int) -> None:
    """Set the distance of a checkpoint at the end of `pages` pages from the one before it."""
    s, t, h = m
    _, before = _last_checkpoint(s, t, s.table[asid, : pages - 1])
    h.gaps[state] = (pages - before) * s.tokens.shape[1]


@inner
def resume(m: Pools, asid: int, length: int) -> None:
    """Give a space the state of the last checkpoint in its first `length` tokens, in place of the one that it holds."""
    s, t, h = m
    state, pages = _last_checkpoint(s, t, s.table[asid, : length // s.tokens.shape[1]])
    if state != NIL:
        frames.map_matched(t, state)
        _measure_gap(m, asid, state, pages)
    set_state(t, h, asid, state, pages * s.tokens.shape[1])


@inner
def bind(m: Pools, asid: int, position: int, state: int) -> int:
    """Publish `state`, after `position` tokens of a space, with the page that ends there. Return the state to use.

    That is the state already bound to the page, if any: two rows computed the same state. Nothing is published unless
    the page is; a page with unknown ids is not.
    """
    s, t, h = m
    page = position // s.tokens.shape[1] - 1
    frame = np.int64(s.table[asid, page]) if page < s.spaces[asid].num_pages else np.int64(HOLE)
    if frame == HOLE or s.frames[frame].published != 1 or page >= s.spaces[asid].complete:
        return state
    held: int = _bound_state(s, t, frame)
    if held == NIL:
        _name(s, t, state, frame)
        s.checkpoints[frame] = state
        _measure_gap(m, asid, state, page + 1)
        h.totals[PUBLISHED] += 1
        held = state
    if position > h.rows[asid].prompt_end and held == state:
        _unbind_rolled(t, h, asid)
        h.rows[asid].rolled = held
        h.rows[asid].rolled_generation = t.frames[held].generation
    return held


@inner
def _unbind_rolled(t: State, h: Held, asid: int) -> None:
    """Unpublish the last checkpoint of a space's output unless a prompt has used it: the next one takes its place."""
    rolled = np.int64(h.rows[asid].rolled)
    if rolled == NIL or t.frames[rolled].generation != h.rows[asid].rolled_generation:
        return
    if t.frames[rolled].published and t.frames[rolled].uses == 0:
        unbind(t, rolled)


# -- spaces ------------------------------------------------------------------------------------------------------------


@compiled
def open_row(m: Pools, asid: int, token_ids: I32) -> None:
    """Give a space that was opened with the prompt `token_ids` (int32 [n]) its last checkpoint, and list its places."""
    s, _, h = m
    follow_losses(m)
    resume(m, asid, s.spaces[asid].length)
    h.rows[asid].prompt_end = len(token_ids)
    h.rows[asid].rolled = NIL
    h.rows[asid].num_places = 0
    _list_places(s, h, asid, token_ids)
    _find_next_place(h, asid)


@inlined
def include(found: I32, n: int, position: int) -> int:
    """Add a position to the first `n` of `found`, which stay in order, each once. Return how many there are."""
    at = n
    while at > 0 and found[at - 1] > position:
        at -= 1
    if at > 0 and found[at - 1] == position:
        return n
    for i in range(n, at, -1):
        found[i] = found[i - 1]
    found[at] = position
    return n + 1


@inlined
def _add_place(h: Held, asid: int, position: int) -> None:
    """Add a position, rounded down to the grid, to the places of a space; they stay in order, and are listed once."""
    place = position // h.rules[GRID] * h.rules[GRID]
    count = np.int64(h.rows[asid].num_places)
    if h.rows[asid].ready < place <= h.rows[asid].prompt_end and count < MOST_PLACES:
        h.rows[asid].num_places = include(h.places[asid], count, place)


@inner
def _list_places(s: State, h: Held, asid: int, token_ids: I32) -> None:
    """List where a state is kept while the prompt is computed. O(tokens to be computed)."""
    end, ready = len(token_ids), h.rows[asid].ready
    for position in range(end - 1, ready if len(h.boundaries) else end - 1, -1):
        for token in h.boundaries:
            if token_ids[position] == token and h.rows[asid].num_places < MOST_PLACES - _OTHER_PLACES:
                _add_place(h, asid, position)
    known = h.rows[asid].num_places > 0
    if h.rules[BRANCHES] and s.spaces[asid].length > ready:
        _add_place(h, asid, s.spaces[asid].length)
    _add_place(h, asid, end - 1)
    if known:  # the last message is the one to be answered: its start is the page before the end
        _add_place(h, asid, end - h.rules[NEAR])
        return
    _add_place(h, asid, end)
    _add_place(h, asid, end - h.rules[GRID])
    for distance in h.rules[DISTANCES:]:
        _add_place(h, asid, end - distance)


@compiled
def fork_row(m: Pools, asid: int) -> int:
    """Fork a space together with its state, of which the child gets a reference. Return the child."""
    follow_losses(m)
    return _fork(m, asid)


@inner
def _fork(m: Pools, asid: int) -> int:
    """Fork a space with its state. The queue of losses must be empty."""
    s, t, h = m
    child: int = page_tables.fork_space(s, asid)
    state = np.int64(h.rows[asid].state)
    if state != NIL:
        t.frames[state].refs += 1  # mapped already
    h.rows[child].state = state
    h.rows[child].ready = h.rows[asid].ready
    h.rows[child].prompt_end = h.rows[asid].prompt_end
    h.rows[child].rolled = NIL
    h.rows[child].next_place = h.rows[asid].next_place
    h.rows[child].num_places = h.rows[asid].num_places
    for i in range(h.rows[asid].num_places):
        h.places[child, i] = h.places[asid, i]
    return child


@compiled
def reorder_rows(m: Pools, forked: I32, released: I32) -> None:
    """Fork each space of `forked`, whose entries become the children, and then release the spaces of `released`."""
    s = m.pages
    follow_losses(m)
    for i in range(len(forked)):
        forked[i] = _fork(m, np.int64(forked[i]))
    for asid in released:
        page_tables.release_space(s, np.int64(asid))
    follow_losses(m)


@compiled
def truncate_row(m: Pools, asid: int, length: int) -> None:
    """Drop the tokens of a space from `length` on. It goes on from the last checkpoint, if it had a later state."""
    s, _, h = m
    follow_losses(m)
    page_tables.truncate_space(s, asid, length)
    follow_losses(m)
    if h.rows[asid].ready > length:
        resume(m, asid, length)


@compiled
def pin_row(m: Pools, asid: int, pages: I32, most: int, with_state: bool) -> int:
    """Pin the first `most` pages of a space, or `pages` if asid is NIL, and perhaps a checkpoint. Return the row."""
    s, t, h = m
    follow_losses(m)
    row = page_tables.pin_space(s, asid, most) if asid >= 0 else page_tables.pin_frames(s, pages)
    follow_losses(m)
    state, count = _last_checkpoint(s, t, s.table[row, : s.spaces[row].num_pages if with_state else 0])
    if state != NIL:
        frames.share(t.frames, t.reg, state)
    set_state(t, h, row, state, count * s.tokens.shape[1])
    h.rows[row].rolled = NIL
    h.rows[row].num_places = 0
    return row


@compiled
def forget_all(m: Pools) -> int:
    """Unpublish every page and every checkpoint; spaces keep the states that they hold. See tables.forget."""
    s, t, _ = m
    follow_losses(m)
    freed: int = forget_pages(s)
    for frame in range(len(s.frames)):
        s.checkpoints[frame] = NIL
    for state in range(len(t.frames)):
        if t.frames[state].published:
            unbind(t, np.int64(state))
    return freed


@compiled
def rebind(old: State, new: State, t: State, moves: I32) -> None:
    """Carry the bindings of pages over to a resized pool: frame moves[i, 0] of `old` is moves[i, 1] in `new`.

    Modifies: new.checkpoints, t
    """
    for frame in range(min(len(old.frames), len(new.frames))):
        new.checkpoints[frame] = old.checkpoints[frame]
    for i in range(len(moves)):
        source, target = np.int64(moves[i, 0]), np.int64(moves[i, 1])
        state = np.int64(_bound_state(old, t, source))
        new.checkpoints[target] = state
        if state != NIL:
            index.remove(t, state)
            _name(new, t, state, target)


@inlined
def _name(s: State, t: State, state: int, frame: int) -> None:
    """Publish `state` under the page in `frame`."""
    t.tokens[state, 0], t.tokens[state, 1] = frame, np.int32(s.frames[frame].generation & 0x7FFFFFFF)
    index.insert(t, state, index.root_parent(_ROOT), index.prefix_hash_of(t.reg[KEY], np.int64(0), t.tokens[state]))


@inlined
def is_open(s: State, asid: int) -> bool:
    """Return whether `asid` is an open space."""
    return bool(s.spaces[asid].status == OPEN)
