"""The invariants I1-I9, executable. Plain numpy, written apart from the code it checks: nothing here is compiled or shared with it.

Level 1 looks at the counters, 2 at every frame, 3 at every page, list link and index entry. Each failure names its law and its place.
check_index.py looks at the prefix index, check_policy.py at the order of eviction. A test corrupts every field of every array and
demands that it is seen here, or says why the field is free.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.arguments import whole
from pagedkv.core.check.accounts import check_accounts
from pagedkv.core.check.eviction import check_pins, check_policy
from pagedkv.core.check.index import check_index
from pagedkv.core.check.requirements import none, require
from pagedkv.core.handles import Plan
from pagedkv.core.pool.policies import Policy
from pagedkv.core.state import State
from pagedkv.core.tables.layer_groups import Group


class Expected(NamedTuple):
    """What the manager knows beside its arrays, and they must agree with."""

    policy: Policy
    seeds: dict[int, int]
    """root: fingerprint of its empty prefix."""
    plans: Collection[Plan]
    """Not settled yet."""
    groups: tuple[Group, ...]


def check_state(s: State, level: int, expected: Expected) -> None:
    """Raise InvariantViolation at the first broken law. O(frames + pages) at level 3."""
    level = whole(level, "level of check (1: counters, 2: frames, 3: everything)", 1, 4)
    _check_counters(s)
    due = [[group.window or 0, group.sinks] for group in expected.groups]
    held = s.groups[:, :2].tolist()
    require(held == due, "I9", f"the windows and sinks of the groups are {held}, not {due}")
    if level >= 2:
        _check_frames(s)
    if level >= 3:
        _check_spaces(s)
        _check_plans(s, expected.plans)
        check_accounts(s)
        order = _check_lists(s)
        _check_order(s, order)
        check_policy(s, expected.policy)
        check_index(s, expected.seeds)


def _check_counters(s: State) -> None:
    free, cached, retired = (int(s.reg[i]) for i in (st.NUM_FREE, st.NUM_CACHED, st.NUM_RETIRED))
    mapped = len(s.frames) - free - cached - retired
    require(
        min(free, mapped, cached, retired) >= 0,
        "I1",
        f"free {free} + mapped {mapped} + cached {cached} + retired {retired}",
    )
    require(
        0 <= s.reg[st.NUM_EVICTABLE] <= cached, "I7", f"{s.reg[st.NUM_EVICTABLE]} evictable of {cached} cached frames"
    )
    require(
        0 <= s.reg[st.NUM_UNUSED_ASIDS] <= len(s.spaces),
        "I8",
        f"{s.reg[st.NUM_UNUSED_ASIDS]} spare rows of {len(s.spaces)}",
    )
    require(
        mapped <= s.reg[st.PEAK] <= len(s.frames),
        "I1",
        f"{mapped} frames are mapped, at most {s.reg[st.PEAK]} ever were",
    )
    require(
        s.reg[st.PASSED] <= s.reg[st.EPOCH], "I7", f"epoch {s.reg[st.PASSED]} passed, the newest is {s.reg[st.EPOCH]}"
    )
    counts = {name: int(s.reg[register]) for name, register in _COUNTS.items()}
    require(min(counts.values()) >= 0, "I1", f"a count of the past is negative: {counts}")
    told = counts["matched"] + counts["missed_evicted"] + counts["missed_new"]
    require(told == counts["asked"], "I1", f"{told} tokens were matched or missed, {counts['asked']} were asked for")


_COUNTS = {
    "asked": st.ASKED,
    "matched": st.MATCHED,
    "missed_evicted": st.MISSED_EVICTED,
    "missed_new": st.MISSED_NEW,
    "below_page": st.BELOW_PAGE,
    "evictions": st.EVICTIONS,
    "copies": st.COPIES,
    "deduplicated": st.DEDUPLICATED,
    "events": st.LOGGED,
}


def _check_frames(s: State) -> None:
    refs, pins, status, published = (s.frames[name] for name in ("refs", "pins", "status", "published"))
    for kind, counter in ((st.FREE, st.NUM_FREE), (st.CACHED, st.NUM_CACHED), (st.RETIRED, st.NUM_RETIRED)):
        count = int((status == kind).sum())
        require(count == s.reg[counter], "I1", f"{count} frames have status {kind}, the counter says {s.reg[counter]}")
    _check_chunks(s, status == st.FREE)
    none(
        (refs > 0) != (status == st.MAPPED),
        "I2",
        "a frame is mapped without references, or referenced without being mapped",
    )
    none((pins > 0) & (status == st.FREE), "I7", "a pinned frame is free")
    none((status == st.RETIRED) & (pins == 0), "I7", "a frame is retired and nothing holds it")
    none((published != 0) & (status == st.FREE), "I4", "a published frame is free")
    none((status == st.CACHED) & (published == 0), "I4", "a cached frame is not published")
    none((published != 0) & (s.frames["parent"] >= len(refs)), "I4", "a frame comes after one that is none")


def _check_chunks(s: State, free: np.ndarray) -> None:
    """The bits name the free frames, and each chunk is on the list that its bits say."""
    bits = np.unpackbits(s.chunks["bits"].copy().view(np.uint8), bitorder="little").astype(bool)
    none(bits[: len(free)] != free, "I1", "the bits and the free frames differ")
    require(not bits[len(free) :].any(), "I1", "frames behind the last one are free")
    expected: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for chunk, word in enumerate(s.chunks["bits"].tolist()):
        groups = [word >> first & 0xFFFF for first in (0, 16, 32, 48)]
        if word:
            expected[1 + (0xFFFF in groups) + (set(groups) == {0xFFFF})].append(chunk)
    for number, chunks in expected.items():
        held: list[int] = []
        chunk, before = int(s.reg[st.FREE_LISTS + number]), st.NIL
        while chunk != st.NIL and len(held) <= len(chunks):
            require(0 <= chunk < len(s.chunks), "I1", f"list {number} of free frames leads to chunk {chunk}")
            require(s.chunks["newer"][chunk] == before, "I1", f"list {number} of free frames is cut at chunk {chunk}")
            held.append(chunk)
            before, chunk = chunk, int(s.chunks["older"][chunk])
        require(sorted(held) == chunks, "I1", f"list {number} of free frames holds other chunks than it should")


def _check_spaces(s: State) -> None:
    size = s.tokens.shape[1]
    refs = np.zeros(len(s.frames), np.int64)
    written: set[int] = set()
    for asid in np.flatnonzero(s.spaces["status"] != st.UNUSED):
        pages = s.table[asid, : s.spaces["num_pages"][asid]]
        length, planned, done, hole = (
            int(s.spaces[name][asid]) for name in ("length", "planned", "complete", "first_hole")
        )
        require(len(pages) == -(-planned // size), "I5", f"space {asid} has {len(pages)} pages for {planned} tokens")
        owned = length == planned or (length < planned and s.spaces["outstanding"][asid] > 0)
        require(owned, "I6", f"space {asid}: {planned - length} tokens planned by nobody")
        require(done <= length // size, "I4", f"space {asid}: {done} pages published of {length // size} full ones")
        none((pages < st.HOLE) | (pages >= len(refs)), "I5", f"space {asid} names a frame that is none", places="page")
        np.add.at(refs, pages[pages >= 0], 1)
        holes = np.flatnonzero(pages == st.HOLE)
        first = int(holes[0]) if len(holes) else st.NO_HOLE
        require(first == s.spaces["first_hole"][asid], "I5", f"space {asid}: first hole at {first}, recorded {hole}")
        for page in range(length // size, len(pages)) if planned > length else ():
            frame = int(pages[page])
            require(frame not in written, "I6", f"frame {frame} is written by two plans' spaces")
            written.add(frame)
            mine = s.frames["refs"][frame] == 1 and not s.frames["published"][frame]
            require(
                mine, "I3", f"frame {frame} of space {asid} is to be written while shared or published", frame=frame
            )
    none(refs != s.frames["refs"], "I2", "refs differ from the page-table entries that name the frame")
    spare = s.spaces["unused_asid"][: s.reg[st.NUM_UNUSED_ASIDS]]
    unused = np.flatnonzero(s.spaces["status"] == st.UNUSED)
    require(
        sorted(spare) == unused[unused % len(s.groups) == 0].tolist(), "I8", "the spare rows are not the unused ones"
    )


def _check_plans(s: State, plans: Collection[Plan]) -> None:
    """Each row has the plans, tokens and advice that somebody gave it, and each frame the pins."""
    planned, tokens = np.zeros(len(s.spaces), np.int64), np.zeros(len(s.spaces), np.int64)
    for plan in plans:
        for group in range(len(s.groups)):
            np.add.at(planned, plan.rows + group, 1)
            np.add.at(tokens, plan.rows + group, plan.counts)
    status, used = s.spaces["status"], s.spaces["status"] != st.UNUSED
    none(used & (s.spaces["outstanding"] != planned), "I6", "the plans of a row are counted wrongly", places="space")
    due = s.spaces["length"] + tokens
    none(
        used & (s.spaces["planned"] != due),
        "I6",
        "tokens are planned by nobody, or by somebody and not counted",
        places="space",
    )
    leads = np.arange(len(status)) % len(s.groups) == 0
    led = np.where(np.repeat(status[leads], len(s.groups)) == st.UNUSED, st.UNUSED, st.FOLLOWING)
    legal = np.where(leads, np.isin(status, (st.UNUSED, st.OPEN, st.CLOSING, st.HELD)), status == led)
    none(~legal, "I8", "a row has a status that is none", places="space")
    none(
        ~leads & (s.spaces["complete"] > 0),
        "I4",
        "the published pages of a space are counted in the row of group 0",
        places="space",
    )
    silent = s.spaces["no_publish"]
    none(silent > leads, "I4", "a row is silent that never speaks, or more than silent", places="space")
    none(
        used & (silent > 0) & (s.spaces["complete"] > 0),
        "I4",
        "a space published what was to be forgotten",
        places="space",
    )
    none((status == st.CLOSING) & (planned == 0), "I8", "a released row waits for a plan that is none", places="space")
    none(
        (status == st.HELD) & ((planned > 0) | (s.spaces["complete"] > 0)),
        "I8",
        "a pin's row is planned on",
        places="space",
    )
    none(s.spaces["stamp"] > s.reg[st.TICK], "I6", "a row was named by a plan that was not made yet", places="space")
    advice = s.spaces["advice"].astype(np.int64) + st.NORMAL
    none(
        used & ((advice < st.DONTNEED) | (advice >= st.NUM_LISTS)),
        "I9",
        "a row is advised to be on a list that is none",
        places="space",
    )
    check_pins(s, [plan.splits for plan in plans])


def _check_lists(s: State) -> list[list[int]]:
    """The lists as lists: those of account 0, the fenced one, those of the other accounts."""
    lists: list[list[int]] = []
    own = [block[: 4 * st.NUM_LISTS].reshape(-1, 4) for block in st.account_registers(s.reg)]
    ends = [
        *enumerate(st.list_registers(s.reg).tolist()),
        *(one for lists_of in own for one in enumerate(lists_of.tolist())),
    ]
    for number, (oldest, newest, length, _) in ends:
        held: list[int] = []
        frame, behind = oldest, st.NIL
        while frame != st.NIL and len(held) <= length:
            require(s.frames["older"][frame] == behind, "I7", f"list {number} is cut at frame {frame}")
            require(
                s.frames["place"][frame] == 1 + number, "I7", f"frame {frame} on list {number} believes to be elsewhere"
            )
            held.append(frame)
            behind, frame = frame, int(s.frames["newer"][frame])
        require(newest == behind and len(held) == length, "I7", f"list {number} does not close")
        lists.append(held)
    listed = sorted(frame for held in lists for frame in held)
    require(
        listed == np.flatnonzero(s.frames["place"] != st.NOWHERE).tolist(),
        "I7",
        "a frame believes to be on a list and is not",
    )
    evictable = sorted(set(listed) - set(lists[st.FENCED]))
    expected = np.flatnonzero((s.frames["status"] == st.CACHED) & (s.frames["pins"] == 0)).tolist()
    require(evictable == expected, "I7", "the evictable frames are not the cached, unpinned ones")
    require(len(evictable) == s.reg[st.NUM_EVICTABLE], "I7", "the evictable frames are counted wrongly")
    none(s.frames["pins"][lists[st.FENCED]] == 0, "I7", "a fenced frame has no pin, at place")
    waiting = int((s.frames["status"][lists[st.FENCED]] == st.CACHED).sum())
    require(
        waiting == s.reg[st.CACHED_FENCED],
        "I7",
        f"{waiting} cached frames are fenced, the counter says {s.reg[st.CACHED_FENCED]}",
    )
    require(not lists[st.FENCED] or s.reg[st.EPOCH] > s.reg[st.PASSED], "I7", "frames are fenced and no epoch is open")
    held_rows = np.repeat(s.spaces["status"][:: len(s.groups)] == st.HELD, len(s.groups))  # the row that leads tells
    there = (np.arange(s.table.shape[1]) < s.spaces["num_pages"][held_rows, None]) & (s.table[held_rows] != st.HOLE)
    require(there.sum() == s.reg[st.PINNED], "I7", "the frames of pins are counted wrongly")
    return lists


def _check_order(s: State, lists: list[list[int]]) -> None:
    """Whatever comes, a page is given up before its prefix: the three conditions of eviction.py, or the prefix cannot go yet."""
    place = {frame: i for held in lists for i, frame in enumerate(held)}
    number, entered, fenced = s.frames["place"], s.frames["entered"], st.AMONG_FENCED
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
                later = (int(entered[parent]) - int(entered[frame])) % 2**31 < 2**30
                behind = bool(number[parent] > number[frame]) and later
            require(
                behind or s.frames["refs"][parent] > 0,
                "I9",
                f"frame {frame} would be evicted after its prefix {parent}",
            )
