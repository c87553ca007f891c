"""The invariants I1-I9, executable. Plain numpy, written apart from the code it checks: nothing here is compiled or shared with it.

Level 1 looks at the counters, 2 at every frame, 3 at every page, list link and index entry. Each failure names its law and its place.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.state import State
from pagedkv.errors import InvalidRequest, InvariantViolation


def check_state(s: State, level: int) -> None:
    """Raise InvariantViolation at the first broken law. O(frames + pages) at level 3."""
    if level not in (1, 2, 3):
        raise InvalidRequest(f"check level is {level}; it is 1 (counters), 2 (frames) or 3 (everything)")
    _check_counters(s)
    if level >= 2:
        _check_frames(s)
    if level >= 3:
        _check_spaces(s)
        order = _check_lists(s)
        _check_order(s, order)
        _check_index(s)


def _require(holds: object, law: str, message: str) -> None:
    if not holds:
        raise InvariantViolation(f"{law} broken: {message}")


def _none(broken: np.ndarray, law: str, message: str) -> None:
    places = np.flatnonzero(broken)
    _require(len(places) == 0, law, f"{message} (first of {len(places)}: {places[:1].tolist()})")


def _check_counters(s: State) -> None:
    free, cached, retired = (int(s.reg[i]) for i in (st.NUM_FREE, st.NUM_CACHED, st.NUM_RETIRED))
    mapped = len(s.frames) - free - cached - retired
    _require(min(free, mapped, cached, retired) >= 0, "I1", f"free {free} + mapped {mapped} + cached {cached} + retired {retired}")
    _require(0 <= s.reg[st.NUM_EVICTABLE] <= cached, "I7", f"{s.reg[st.NUM_EVICTABLE]} evictable of {cached} cached frames")
    _require(0 <= s.reg[st.NUM_SPARE] <= len(s.spaces), "I8", f"{s.reg[st.NUM_SPARE]} spare rows of {len(s.spaces)}")


def _check_frames(s: State) -> None:
    refs, pins, status, published = (s.frames[name] for name in ("refs", "pins", "status", "published"))
    for kind, counter in ((st.FREE, st.NUM_FREE), (st.CACHED, st.NUM_CACHED), (st.RETIRED, st.NUM_RETIRED)):
        count = int((status == kind).sum())
        _require(count == s.reg[counter], "I1", f"{count} frames have status {kind}, the counter says {s.reg[counter]}")
    free, frame = set(), int(s.reg[st.FREE_TOP])
    while frame != st.NOBODY and frame not in free:
        free.add(frame)
        frame = int(s.frames["newer"][frame])
    _require(frame == st.NOBODY, "I1", f"frame {frame} is on the free list twice")
    _require(sorted(free) == np.flatnonzero(status == st.FREE).tolist(), "I1", "the free list and the free frames differ")
    _none((refs > 0) != (status == st.MAPPED), "I2", "a frame is mapped without references, or referenced without being mapped")
    _none((pins > 0) & (status == st.FREE), "I7", "a pinned frame is free")
    _none((status == st.RETIRED) & (pins == 0), "I7", "a frame is retired and nothing holds it")
    _none((published != 0) & (status == st.FREE), "I4", "a published frame is free")
    _none((status == st.CACHED) & (published == 0), "I4", "a cached frame is not published")


def _check_spaces(s: State) -> None:
    size = s.tokens.shape[1]
    refs = np.zeros(len(s.frames), np.int64)
    written: set[int] = set()
    for asid in np.flatnonzero(s.spaces["status"] != st.UNUSED):
        pages = s.table[asid, : s.spaces["num_pages"][asid]]
        length, planned, done, hole = (int(s.spaces[name][asid]) for name in ("length", "planned", "complete", "first_hole"))
        _require(len(pages) == -(-planned // size), "I5", f"space {asid} has {len(pages)} pages for {planned} tokens")
        owned = length == planned or (length < planned and s.spaces["outstanding"][asid] > 0)
        _require(owned, "I6", f"space {asid}: {planned - length} tokens planned by nobody")
        _require(done <= length // size, "I4", f"space {asid}: {done} pages published of {length // size} full ones")
        np.add.at(refs, pages[pages >= 0], 1)
        _none(pages < st.HOLE, "I5", f"space {asid} names a frame below -1, at page")
        holes = np.flatnonzero(pages == st.HOLE)
        first = int(holes[0]) if len(holes) else st.NO_HOLE
        _require(first == s.spaces["first_hole"][asid], "I5", f"space {asid}: first hole at {first}, recorded {hole}")
        for page in range(length // size, len(pages)) if planned > length else ():
            frame = int(pages[page])
            _require(frame not in written, "I6", f"frame {frame} is written by two plans' spaces")
            written.add(frame)
            mine = s.frames["refs"][frame] == 1 and not s.frames["published"][frame]
            _require(mine, "I3", f"frame {frame} of space {asid} is to be written while shared or published")
    _none(refs != s.frames["refs"], "I2", "refs differ from the page-table entries that name the frame")
    spare = s.spaces["spare"][: s.reg[st.NUM_SPARE]]
    _require(sorted(spare) == np.flatnonzero(s.spaces["status"] == st.UNUSED).tolist(), "I8", "the spare rows are not the unused ones")


def _check_lists(s: State) -> list[list[int]]:
    """The lists as lists, the fenced one last."""
    lists: list[list[int]] = []
    for number, (oldest, newest, length, _) in enumerate(st.list_registers(s.reg).tolist()):
        held: list[int] = []
        frame, behind = oldest, st.NOBODY
        while frame != st.NOBODY and len(held) <= length:
            _require(s.frames["older"][frame] == behind, "I7", f"list {number} is cut at frame {frame}")
            _require(s.frames["place"][frame] == number, "I7", f"frame {frame} on list {number} believes to be elsewhere")
            held.append(frame)
            behind, frame = frame, int(s.frames["newer"][frame])
        _require(newest == behind and len(held) == length, "I7", f"list {number} does not close")
        lists.append(held)
    listed = sorted(frame for held in lists for frame in held)
    _require(listed == np.flatnonzero(s.frames["place"] != st.NOWHERE).tolist(), "I7", "a frame believes to be on a list and is not")
    evictable = sorted(frame for held in lists[: st.NUM_LISTS] for frame in held)
    expected = np.flatnonzero((s.frames["status"] == st.CACHED) & (s.frames["pins"] == 0)).tolist()
    _require(evictable == expected, "I7", "the evictable frames are not the cached, unpinned ones")
    _require(len(evictable) == s.reg[st.NUM_EVICTABLE], "I7", "the evictable frames are counted wrongly")
    _none(s.frames["pins"][lists[st.FENCED]] == 0, "I7", "a fenced frame has no pin, at place")
    waiting = int((s.frames["status"][lists[st.FENCED]] == st.CACHED).sum())
    _require(waiting == s.reg[st.CACHED_FENCED], "I7", f"{waiting} cached frames are fenced, the counter says {s.reg[st.CACHED_FENCED]}")
    _require(not lists[st.FENCED] or s.reg[st.EPOCH] > s.reg[st.PASSED], "I7", "frames are fenced and no epoch is open")
    held_rows = s.spaces["status"] == st.HELD
    _require(s.spaces["num_pages"][held_rows].sum() == s.reg[st.PINNED], "I7", "the pages of pins are counted wrongly")
    return lists


def _check_order(s: State, lists: list[list[int]]) -> None:
    """Whatever comes, a page is given up before its prefix: the three conditions of eviction.py, or the prefix cannot go yet."""
    place = {frame: i for held in lists for i, frame in enumerate(held)}
    number, mark, fenced = s.frames["place"], s.frames["mark"], st.FENCED
    for held in lists:
        for frame in held:
            parent = int(s.frames["parent"][frame])
            if s.frames["status"][frame] != st.CACHED or parent < 0 or number[parent] == st.NOWHERE:
                continue
            if number[frame] == fenced or number[parent] == fenced:
                behind = number[parent] == fenced and (number[frame] != fenced or place[frame] < place[parent])
            elif number[parent] == number[frame]:
                behind = place[frame] < place[parent]
            else:
                later = (int(mark[parent]) - int(mark[frame])) % 2**31 < 2**30
                behind = bool(number[parent] > number[frame]) and later
            _require(behind or s.frames["refs"][parent] > 0, "I9", f"frame {frame} would be evicted after its prefix {parent}")


def _check_index(s: State) -> None:
    found: list[int] = []
    for head in s.bucket:
        frame = int(head)
        while frame >= 0 and len(found) <= len(s.frames):
            found.append(frame)
            frame = int(s.frames["chain"][frame])
    _require(sorted(found) == np.flatnonzero(s.frames["published"]).tolist(), "I4", "the index and the published frames differ")
    identities = Counter((int(s.frames["parent"][f]), int(s.frames["parent_generation"][f]), s.tokens[f].tobytes()) for f in found)
    _require(not found or max(identities.values()) == 1, "I4", "two published frames have one identity")
    roots = np.zeros(len(s.roots), np.int64)
    for frame in found:
        parent = int(s.frames["parent"][frame])
        if parent < 0:
            roots[-2 - parent] += 1
            continue
        alive = s.frames["published"][parent] and s.frames["generation"][parent] == s.frames["parent_generation"][frame]
        _require(alive or s.frames["status"][frame] != st.CACHED, "I9", f"cached frame {frame} lost its prefix {parent}")
    np.add.at(roots, s.spaces["root"][s.spaces["status"] != st.UNUSED], 1)
    _none(roots != s.roots[:, 0], "I4", "a root is counted wrongly")
    if len(s.kin):
        _check_kin(s, found)


def _check_kin(s: State, published: list[int]) -> None:
    """Whoever has a living prefix is among its successors, once."""
    following: dict[int, list[int]] = {}
    heads = [(frame, int(s.kin[frame, 0])) for frame in published] + [(-2 - root, int(first)) for root, first in enumerate(s.roots[:, 1])]
    for parent, frame in heads:
        while frame >= 0 and len(following.setdefault(parent, [])) <= len(published):
            following[parent].append(frame)
            frame = int(s.kin[frame, 1])
    expected: dict[int, list[int]] = {}
    for frame in published:
        parent = int(s.frames["parent"][frame])
        if parent < 0 or (s.frames["published"][parent] and s.frames["generation"][parent] == s.frames["parent_generation"][frame]):
            expected.setdefault(parent, []).append(frame)
    _require(
        {p: sorted(f) for p, f in following.items()} == {p: sorted(f) for p, f in expected.items()}, "I4", "successors are listed wrongly"
    )
