"""The invariants I1-I9, executable: plain numpy, which shares no code with the compiled functions that it checks.

Level 1 checks the counters, level 2 every frame, level 3 every page, list link and index entry. Each failure names its
law and its place. index.py checks the prefix index. A test corrupts every field of every array and demands that a check
sees it, or says why the field may have any value.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.arguments import whole
from pagedkv.core.check.index import check_index
from pagedkv.core.check.requirements import I1, I2, I3, I4, I5, I6, I7, I8, I9
from pagedkv.core.handles import Step
from pagedkv.core.policies import Policy
from pagedkv.core.state import I64, State
from pagedkv.core.tables.layer_groups import Group


class Expected(NamedTuple):
    """The manager's own objects, with which its arrays must agree.

    seeds: the prefix hash of the empty prefix, for each root in use. plans: the outstanding plans.
    """

    policy: Policy
    seeds: dict[int, int]
    plans: Collection[Step]
    groups: tuple[Group, ...]


def check_state(s: State, level: int, expected: Expected) -> None:
    """Raise InvariantViolation at the first broken law. O(frames + pages) at level 3."""
    level = whole(level, "level of check (1: counters, 2: frames, 3: everything)", 1, 4)
    _check_counters(s)
    windows = s.groups[:, [0, 1, 4]].tolist()
    wanted = [[group.window or 0, group.sinks, group.keep] for group in expected.groups]
    I9.require(windows == wanted, f"window, sinks and keep of the groups are {windows} instead of {wanted}")
    if level >= 2:
        _check_frames(s)
    if level >= 3:
        _check_spaces(s)
        _check_plans(s, expected.plans)
        _check_accounts(s)
        _check_pin_rows(s)
        order = _check_lists(s)
        _check_order(s, order)
        _check_policy(s, expected.policy)
        check_index(s, expected.seeds)


def check_frame_pool(s: State, level: int, policy: Policy, *, twins: bool) -> None:
    """Raise InvariantViolation at the first broken law. O(frames) at level 2 and 3.

    I2 is the caller's: its page tables hold the references. twins: whether two frames may have one key.
    """
    level = whole(level, "level of check (1: counters, 2: frames, 3: everything)", 1, 4)
    _check_counters(s)
    if level >= 2:
        _check_frames(s, unnamed=True)
    if level >= 3:
        _check_unused(s)
        _check_fences(s)
        _check_accounts(s)
        _check_order(s, _check_lists(s))
        _check_policy(s, policy)
        check_index(s, {0: 0}, twins=twins)


def _check_counters(s: State) -> None:
    """Check the scalars against one another."""
    free, cached, retired = (int(s.reg[i]) for i in (st.NUM_FREE, st.NUM_CACHED, st.NUM_RETIRED))
    mapped = len(s.frames) - free - cached - retired
    I1.require(
        min(free, mapped, cached, retired) >= 0,
        f"the pool has {free} free + {mapped} mapped + {cached} cached + {retired} retired frames: one is negative",
    )
    evictable, unused = int(s.reg[st.NUM_EVICTABLE]), int(s.reg[st.NUM_UNUSED_ASIDS])
    I7.require(0 <= evictable <= cached, f"the counters say {evictable} evictable of {cached} cached frames")
    I8.require(0 <= unused <= len(s.spaces), f"the counter says {unused} unused rows of {len(s.spaces)}")
    peak = int(s.reg[st.PEAK])
    I1.require(
        mapped <= peak <= len(s.frames),
        f"{mapped} of {len(s.frames)} frames are mapped, but the counter says that at most {peak} ever were",
    )
    passed, newest = int(s.reg[st.PASSED]), int(s.reg[st.EPOCH])
    I7.require(passed <= newest, f"epoch {passed} has passed, but the newest epoch is {newest}")
    counts = {name: int(s.reg[register]) for name, register in _COUNTS.items()}
    I1.require(min(counts.values()) >= 0, f"a running total is negative: {counts}")
    explained = counts["matched"] + counts["missed_evicted"] + counts["missed_new"]
    I1.require(
        explained == counts["asked"], f"{explained} tokens were matched or missed, but {counts['asked']} were asked for"
    )


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


def _check_frames(s: State, *, unnamed: bool = False) -> None:
    """Check each frame's own record, the counters of its status, and the free runs.

    unnamed: whether a frame may be cached that is not published.
    """
    refs, pins, status, published = (s.frames[name] for name in ("refs", "pins", "status", "published"))
    for name, kind, counter in (
        ("free", st.FREE, st.NUM_FREE),
        ("cached", st.CACHED, st.NUM_CACHED),
        ("retired", st.RETIRED, st.NUM_RETIRED),
    ):
        count = int((status == kind).sum())
        I1.require(count == s.reg[counter], f"{count} frames are {name}, but the counter says {s.reg[counter]}")
    _check_chunks(s, status == st.FREE)
    I2.forbid((refs > 0) != (status == st.MAPPED), "a frame must be mapped exactly if it has references")
    I7.forbid((pins > 0) & (status == st.FREE), "a frame is free, but pinned")
    I7.forbid((status == st.RETIRED) & (pins == 0), "a frame is retired, but no pin keeps it")
    I4.forbid((published != 0) & (status == st.FREE), "a frame is free, but published")
    I4.forbid((status == st.CACHED) & (published == 0) & (not unnamed), "a frame is cached, but not published")
    I4.forbid((published != 0) & (s.frames["parent"] >= len(refs)), "a published frame has a parent beyond the pool")


def _check_chunks(s: State, free: np.ndarray) -> None:
    """Check that the bits of the chunks name the free frames, and that each chunk is on the list of its bits."""
    bits = np.unpackbits(s.chunks["bits"].copy().view(np.uint8), bitorder="little").astype(bool)
    I1.forbid(bits[: len(free)] != free, "the bit of a frame must be set exactly if the frame is free")
    I1.require(not bits[len(free) :].any(), f"a bit is set beyond the {len(free)} frames of the pool")
    expected: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for chunk, word in enumerate(s.chunks["bits"].tolist()):
        groups = [word >> first & 0xFFFF for first in (0, 16, 32, 48)]
        if word:
            expected[1 + (0xFFFF in groups) + (set(groups) == {0xFFFF})].append(chunk)
    for number, chunks in expected.items():
        listed: list[int] = []
        chunk, before = int(s.reg[st.FREE_LISTS + number]), st.NIL
        while chunk != st.NIL and len(listed) <= len(chunks):
            I1.require(
                0 <= chunk < len(s.chunks),
                f"free list {number} leads to chunk {chunk}, but there are {len(s.chunks)} chunks",
            )
            I1.require(
                s.chunks["newer"][chunk] == before,
                f"chunk {chunk} on free list {number} does not link back to {before}",
            )
            listed.append(chunk)
            before, chunk = chunk, int(s.chunks["older"][chunk])
        I1.require(
            sorted(listed) == chunks,
            f"free list {number} holds chunks {sorted(listed)[:4]}, but their bits ask for {chunks[:4]}",
        )


def _check_spaces(s: State) -> None:
    size = s.tokens.shape[1]
    refs = np.zeros(len(s.frames), np.int64)
    written: set[int] = set()
    for asid in np.flatnonzero(s.spaces["status"] != st.UNUSED):
        pages = s.table[asid, : s.spaces["num_pages"][asid]]
        length, planned, complete, recorded_hole, outstanding = (
            int(s.spaces[name][asid]) for name in ("length", "planned", "complete", "first_hole", "outstanding")
        )
        I5.require(
            len(pages) == -(-planned // size),
            f"space {asid} has {len(pages)} pages of {size} tokens for {planned} planned tokens",
        )
        I6.require(
            length == planned or (length < planned and outstanding > 0),
            f"space {asid} has {length} committed and {planned} planned tokens, with {outstanding} outstanding plans",
        )
        I4.require(
            complete <= length // size,
            f"space {asid} counts {complete} published pages, but only {length // size} are full",
        )
        I5.forbid(
            (pages < st.HOLE) | (pages >= len(refs)),
            f"space {asid} names a frame beyond the pool of {len(refs)} frames",
            place="page",
        )
        np.add.at(refs, pages[pages >= 0], 1)
        holes = np.flatnonzero(pages == st.HOLE)
        first = int(holes[0]) if len(holes) else st.NO_HOLE
        I5.require(
            first == recorded_hole, f"space {asid} has its first hole at page {first}, but records {recorded_hole}"
        )
        for page in range(length // size, len(pages)) if planned > length else ():
            frame = int(pages[page])
            I6.require(frame not in written, f"frame {frame} of space {asid} is to be written by another space too")
            written.add(frame)
            private = s.frames["refs"][frame] == 1 and not s.frames["published"][frame]
            I3.require(
                private, f"frame {frame} of space {asid} is to be written while shared or published", frame=frame
            )
    I2.forbid(refs != s.frames["refs"], "refs of a frame is not the number of page-table entries that name the frame")
    stacked = sorted(s.spaces["unused_asid"][: s.reg[st.NUM_UNUSED_ASIDS]].tolist())
    unused = np.flatnonzero(s.spaces["status"] == st.UNUSED)
    unused = unused[unused % len(s.groups) == 0]
    I8.require(
        stacked == unused.tolist(),
        f"the stack of unused asids holds rows {stacked[:8]}, but the unused rows are {unused[:8].tolist()}",
    )


def _check_plans(s: State, plans: Collection[Step]) -> None:
    """Check the plans and tokens of each row, and the pins of each frame."""
    planned, tokens = np.zeros(len(s.spaces), np.int64), np.zeros(len(s.spaces), np.int64)
    for plan in plans:
        for group in range(len(s.groups)):
            np.add.at(planned, plan.rows + group, 1)
            np.add.at(tokens, plan.rows + group, plan.remaining)
    used = s.spaces["status"] != st.UNUSED
    I6.forbid(
        used & (s.spaces["outstanding"] != planned),
        "a row counts more or fewer outstanding plans than name it",
        place="space",
    )
    I6.forbid(
        used & (s.spaces["planned"] != s.spaces["length"] + tokens),
        "the planned tokens of a row are not its committed ones plus those of its outstanding plans",
        place="space",
    )
    I6.forbid(
        s.spaces["stamp"] > s.reg[st.TICK],
        f"the stamp of a row is a plan after the newest one, {s.reg[st.TICK]}",
        place="space",
    )
    _check_pins(s, [plan.splits for plan in plans])
    _check_rows(s, planned)


def _check_rows(s: State, planned: I64) -> None:
    """Check the status and the advice of each row. Shapes: planned int64 [A], the outstanding plans that name a row."""
    status, used = s.spaces["status"], s.spaces["status"] != st.UNUSED
    leads = np.arange(len(status)) % len(s.groups) == 0
    led = np.where(np.repeat(status[leads], len(s.groups)) == st.UNUSED, st.UNUSED, st.FOLLOWING)
    legal = np.where(leads, np.isin(status, (st.UNUSED, st.OPEN, st.CLOSING, st.HELD)), status == led)
    I8.forbid(~legal, "a row has an unknown status, or one that only rows of another group may have", place="space")
    I4.forbid(
        used & ~leads & (s.spaces["complete"] > 0),
        "a row of another group than 0 counts published pages; only the row of group 0 may",
        place="space",
    )
    no_publish = s.spaces["no_publish"]
    I4.forbid(
        no_publish > leads, "no_publish of a row is above 1, or is set in a row of another group than 0", place="space"
    )
    I4.forbid(
        used & (no_publish > 0) & (s.spaces["complete"] > 0),
        "a space with no_publish set has published pages",
        place="space",
    )
    I8.forbid(
        (status == st.CLOSING) & (planned == 0), "a released row waits for a plan, but no plan names it", place="space"
    )
    I8.forbid(
        (status == st.HELD) & ((planned > 0) | (s.spaces["complete"] > 0)),
        "the row of a pin has a plan, or counts published pages",
        place="space",
    )
    advice = s.spaces["advice"].astype(np.int64) + st.NORMAL
    I9.forbid(
        used & ((advice < st.DEMOTED) | (advice >= st.NUM_LISTS)),
        f"the advice of a row leads to a list that is not one of the {st.NUM_LISTS}",
        place="space",
    )


def _check_lists(s: State) -> list[list[int]]:
    """Check the links of the lists, and return their frames: those of account 0, the fenced one, other accounts."""
    lists: list[list[int]] = []
    accounts = [block[: 4 * st.NUM_LISTS].reshape(-1, 4) for block in st.account_registers(s.reg)]
    ends = [
        *enumerate(st.list_registers(s.reg).tolist()),
        *(numbered for registers in accounts for numbered in enumerate(registers.tolist())),
    ]
    for number, (oldest, newest, length, _) in ends:
        listed: list[int] = []
        frame, behind = oldest, st.NIL
        while frame != st.NIL and len(listed) <= length:
            I7.require(
                s.frames["older"][frame] == behind,
                f"frame {frame} on list {number} does not link back to {behind}",
                frame=frame,
            )
            place = int(s.frames["place"][frame])
            I7.require(
                place == 1 + number,
                f"frame {frame} is on list {number}, but its place says list {place - 1}",
                frame=frame,
            )
            listed.append(frame)
            behind, frame = frame, int(s.frames["newer"][frame])
        I7.require(
            newest == behind and len(listed) == length,
            f"list {number} has {len(listed)} frames and ends at {behind}; its registers say {length} and {newest}",
        )
        lists.append(listed)
    _check_list_counts(s, lists)
    return lists


def _check_list_counts(s: State, lists: list[list[int]]) -> None:
    """Check that each frame is on the list that its state asks for, and that the counters agree."""
    on_lists = np.zeros(len(s.frames), np.int64)
    np.add.at(on_lists, np.array([frame for listed in lists for frame in listed], np.int64), 1)
    I7.forbid(
        on_lists != (s.frames["place"] != st.NOWHERE),
        "the place of a frame says that it is on a list, but it is on none or on several",
    )
    fenced = s.frames["place"] == st.AMONG_FENCED
    I7.forbid(
        (on_lists - fenced != 0) != ((s.frames["status"] == st.CACHED) & (s.frames["pins"] == 0)),
        "a frame must be on a list of evictable frames exactly if it is cached and not pinned",
    )
    evictable = int((on_lists - fenced).sum())
    I7.require(
        evictable == s.reg[st.NUM_EVICTABLE],
        f"{evictable} frames are evictable, but the counter says {s.reg[st.NUM_EVICTABLE]}",
    )
    I7.forbid(fenced & (s.frames["pins"] == 0), "a frame is fenced, but not pinned")
    waiting = int((s.frames["status"][fenced] == st.CACHED).sum())
    I7.require(
        waiting == s.reg[st.CACHED_FENCED],
        f"{waiting} cached frames are fenced, but the counter says {s.reg[st.CACHED_FENCED]}",
    )
    I7.require(
        not lists[st.FENCED] or s.reg[st.EPOCH] > s.reg[st.PASSED],
        f"{len(lists[st.FENCED])} frames are fenced, but the newest epoch, {s.reg[st.EPOCH]}, has passed",
    )


def _check_pin_rows(s: State) -> None:
    """Check the count of the frames that the rows of pins map."""
    # the row of group 0 has the status of the whole space
    pin_rows = np.repeat(s.spaces["status"][:: len(s.groups)] == st.HELD, len(s.groups))
    mapped = (np.arange(s.table.shape[1]) < s.spaces["num_pages"][pin_rows, None]) & (s.table[pin_rows] != st.HOLE)
    I7.require(
        mapped.sum() == s.reg[st.PINNED],
        f"the rows of pins map {mapped.sum()} frames, but the counter says {s.reg[st.PINNED]}",
    )


def _check_order(s: State, lists: list[list[int]]) -> None:
    """Check that each cached page is evicted before its prefix, by one of the conditions of pool/eviction_order.py.

    A prefix that is mapped cannot be evicted yet and needs none of them. If group 0 has a window, an earlier page of
    the prefix may be cached, and needs them. A page that goes before its prefix when it is unpinned needs none yet.
    """
    position = {frame: i for listed in lists for i, frame in enumerate(listed)}
    place, entered, fenced = s.frames["place"], s.frames["entered"], st.AMONG_FENCED
    for listed in lists:
        for frame in listed:
            parent = int(s.frames["parent"][frame])
            if s.frames["status"][frame] != st.CACHED or s.frames["rank"][frame] >= st.BEHIND_WINDOW:
                continue
            while parent >= 0 and s.groups[0, 0] > 0 and place[parent] == st.NOWHERE:
                parent = int(s.frames["parent"][parent])
            if parent < 0 or place[parent] == st.NOWHERE:
                continue
            if place[frame] == fenced or place[parent] == fenced:
                behind = place[parent] == fenced and (place[frame] != fenced or position[frame] < position[parent])
            elif place[parent] == place[frame]:
                behind = position[frame] < position[parent]
            else:
                later = (int(entered[parent]) - int(entered[frame])) % 2**31 < 2**30
                behind = bool(place[parent] > place[frame]) and later
            I9.require(
                behind or s.frames["refs"][parent] > 0,
                f"frame {frame} would be evicted after frame {parent}, which holds the page before it",
                frame=frame,
            )


def _check_unused(s: State) -> None:
    """Check that the arrays of page tables, which a frame pool does not use, are as they were made."""
    used = int((s.spaces["status"] != st.UNUSED).sum())
    I5.require(not used and (s.table == st.HOLE).all(), f"{used} rows of page tables are used in a frame pool")
    parents = s.frames["parent"][(s.frames["published"] != 0) | (s.frames["status"] == st.CACHED)]
    I4.require(
        (parents == -2).all(), "a named or cached frame has a parent; in a frame pool each is a first page of root 0"
    )


def _check_fences(s: State) -> None:
    """Check that a frame is pinned once if it is fenced, and not at all otherwise."""
    I7.forbid(s.frames["pins"] != (s.frames["place"] == st.AMONG_FENCED), "a frame has a pin exactly if it is fenced")
    I7.require(s.reg[st.PINNED] == 0, f"the counter says {s.reg[st.PINNED]} pins, but a frame pool makes none")


_SHARES = (
    ("evictions", st.EVICTED, st.EVICTIONS),
    ("asked", st.ASKED_BY, st.ASKED),
    ("matched", st.MATCHED_BY, st.MATCHED),
)


def _check_accounts(s: State) -> None:
    """Check the figures of each account against a recount, their sums against the pool's, and the limits. O(frames)."""
    rest = (len(s.reg) - st.NUM_REGISTERS) % st.ACCOUNT
    I1.require(rest == 0, f"the last {rest} registers belong to no account; each account has {st.ACCOUNT}")
    blocks = st.account_registers(s.reg)
    owner, num_accounts = s.frames["account"], max(1, len(blocks))
    I1.forbid(owner >= num_accounts, f"a frame is charged to an account beyond the last one, {num_accounts - 1}")
    I1.forbid(
        (s.roots[:, st.CHARGED] < 0) | (s.roots[:, st.CHARGED] >= num_accounts),
        f"a root is charged to an account that is not one of 0 to {num_accounts - 1}",
        place="root",
    )
    if not len(blocks):
        return
    evictable = (s.frames["status"] == st.CACHED) & (s.frames["pins"] == 0)
    for name, register, frames in (
        ("used", st.USED, s.frames["status"] != st.FREE),
        ("evictable", st.EVICTABLE, evictable),
    ):
        counted = np.bincount(owner[frames], minlength=len(blocks))
        I1.forbid(
            counted != blocks[:, register],
            f"the registers count {blocks[:8, register].tolist()} {name} frames for the accounts from 0 on, "
            f"but the frames themselves give {counted[:8].tolist()}",
            place="account",
        )
    for name, part, sum_of in _SHARES:
        total = int(blocks[:, part].sum())
        I1.require(total == s.reg[sum_of], f"{name}: the accounts add up to {total}, the pool says {s.reg[sum_of]}")
    protected = int(blocks[:, st.PROTECTED].sum())
    I1.require(protected <= len(s.frames), f"quotas protect {protected} frames, but the pool has {len(s.frames)}")
    # the row of group 0 has the status of the whole space
    opened = np.repeat(s.spaces["status"][:: len(s.groups)] == st.OPEN, len(s.groups))
    for asid in np.flatnonzero(opened):
        pages = s.table[asid, : s.spaces["num_pages"][asid]]
        foreign = pages[(pages >= 0) & (owner[pages] != s.roots[s.spaces["root"][asid], st.CHARGED])]
        I1.require(
            not len(foreign),
            f"space {asid} maps frames {foreign[:4].tolist()}, each of which is charged to another account",
        )


_CYCLE = 2**31  # clocks are kept modulo this


def _check_policy(s: State, policy: Policy) -> None:
    """Check that the registers describe `policy`, and each listed frame its rank and its arrival. O(listed frames)."""
    bonuses, lists = policy.bonuses(), st.list_registers(s.reg)
    expected = [policy.rule, policy.inflation, policy.scale, st.NORMAL + len(bonuses)]
    actual = [int(s.reg[i]) for i in (st.RULE, st.INFLATION, st.SCALE, st.USED_LISTS)]
    I9.require(
        actual == expected,
        f"the registers say rule, inflation, scale and number of lists are {actual}, "
        f"but policy {policy.name} has {expected}",
    )
    expected = [0] * st.NORMAL + bonuses + [0] * (len(lists) - st.NORMAL - len(bonuses))
    actual = lists[:, 3].tolist()
    I9.require(actual == expected, f"the bonuses of the lists are {actual}, but policy {policy.name} gives {expected}")
    now = int(s.reg[st.CLOCK] if policy.inflation else s.reg[st.TICK])
    accounts = [block[: 4 * st.NUM_LISTS : 4].tolist() for block in st.account_registers(s.reg)]
    for number, oldest in [*enumerate(lists[:, 0].tolist()), *(one for ends in accounts for one in enumerate(ends))]:
        if oldest != st.NIL:
            I9.require(
                number < st.NORMAL + len(bonuses) or number == st.FENCED,
                f"list {number} holds frames, but policy {policy.name} uses {st.NORMAL + len(bonuses)} lists",
            )
            _check_list(s, number, oldest, int(s.reg[st.EPOCH]) if number == st.FENCED else now)


def _check_list(s: State, number: int, frame: int, now: int) -> None:
    """Check the list that begins at `frame`: arrivals in order and none after `now`, ranks and floors.

    An evictable frame is on the list of its rank, or on that of its successors if theirs is higher.
    """
    before = int(s.frames["entered"][frame])
    while frame != st.NIL:
        record = s.frames[frame]
        entered = int(record.entered)
        I9.require(
            (entered - before) % _CYCLE <= _CYCLE // 2,
            f"frame {frame} entered list {number} at {entered}, but the frame ahead of it at {before}, which is later",
            frame=frame,
        )
        I9.require(
            (now - entered) % _CYCLE <= _CYCLE // 2,
            f"frame {frame} entered list {number} at {entered}, but the clock of the list is only at {now}",
            frame=frame,
        )
        if number != st.FENCED:
            ranked = record.rank <= number <= max(int(record.rank), int(record.floor) - 1)
            I9.require(
                ranked,
                f"frame {frame} is on list {number}, but its rank is {record.rank} and its floor {record.floor}",
                frame=frame,
            )
        I9.require(
            record.status != st.CACHED or record.rank < st.BEHIND_WINDOW or s.groups[0, 0] > 0,
            f"frame {frame} has rank {record.rank}, as a page behind a window of group 0, which has none",
            frame=frame,
        )
        parent = int(record.parent)
        if record.status == st.CACHED and parent >= 0 and record.rank < st.BEHIND_WINDOW:
            floor = int(s.frames["floor"][parent])
            I9.require(
                floor > record.rank,
                f"frame {parent} has floor {floor}, which must be above rank {record.rank} of its successor {frame}",
                frame=parent,
            )
        before, frame = entered, int(record.newer)


def _check_pins(s: State, splits: list[np.ndarray]) -> None:
    """Check the pins of each frame. splits: the copies of each outstanding plan (int32 [C, 4], Step.splits).

    A frame is pinned once by each copy that reads it or a page after it, and once by a fence.
    """
    expected = (s.frames["place"] == st.AMONG_FENCED).astype(np.int64)
    for source, chained in (copy for rows in splits for copy in rows[:, [0, 3]].tolist()):
        expected[source] += 1
        parent = int(s.frames["parent"][source])
        while chained and parent >= 0:
            expected[parent] += 1
            parent = int(s.frames["parent"][parent])
    broken = np.flatnonzero(expected != s.frames["pins"])
    first = int(broken[0]) if len(broken) else 0
    I7.require(
        not len(broken),
        f"frame {first} has {s.frames['pins'][first]} pins, but copies and fences account for {expected[first]}",
        frame=first,
    )
