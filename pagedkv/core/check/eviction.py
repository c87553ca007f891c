"""Check the order of eviction: which frames are on the lists, why, and since when; and what pins each frame.

Plain numpy, apart from the code it checks.
"""

from __future__ import annotations

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.check.requirements import require
from pagedkv.core.policies import Policy
from pagedkv.core.state import State

_CYCLE = 2**31  # clocks are kept modulo this


def check_policy(s: State, policy: Policy) -> None:
    """Check that the registers describe `policy`, and each listed frame its rank and its arrival. O(listed frames)."""
    bonuses, lists = policy.bonuses(), st.list_registers(s.reg)
    expected = [policy.rule, policy.inflation, policy.scale, st.NORMAL + len(bonuses)]
    actual = [int(s.reg[i]) for i in (st.RULE, st.INFLATION, st.SCALE, st.USED_LISTS)]
    require(
        actual == expected,
        "I9",
        f"the registers say rule, inflation, scale and number of lists are {actual}, "
        f"but policy {policy.name} has {expected}",
    )
    expected = [0] * st.NORMAL + bonuses + [0] * (len(lists) - st.NORMAL - len(bonuses))
    actual = lists[:, 3].tolist()
    require(
        actual == expected, "I9", f"the bonuses of the lists are {actual}, but policy {policy.name} gives {expected}"
    )
    now = int(s.reg[st.CLOCK] if policy.inflation else s.reg[st.TICK])
    accounts = [block[: 4 * st.NUM_LISTS : 4].tolist() for block in st.account_registers(s.reg)]
    for number, oldest in [*enumerate(lists[:, 0].tolist()), *(one for ends in accounts for one in enumerate(ends))]:
        if oldest != st.NIL:
            require(
                number < st.NORMAL + len(bonuses) or number == st.FENCED,
                "I9",
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
        require(
            (entered - before) % _CYCLE <= _CYCLE // 2,
            "I9",
            f"frame {frame} entered list {number} at {entered}, but the frame ahead of it at {before}, which is later",
            frame=frame,
        )
        require(
            (now - entered) % _CYCLE <= _CYCLE // 2,
            "I9",
            f"frame {frame} entered list {number} at {entered}, but the clock of the list is only at {now}",
            frame=frame,
        )
        if number != st.FENCED:
            ranked = record.rank <= number <= max(int(record.rank), int(record.floor) - 1)
            require(
                ranked,
                "I9",
                f"frame {frame} is on list {number}, but its rank is {record.rank} and its floor {record.floor}",
                frame=frame,
            )
        require(
            record.status != st.CACHED or record.rank < st.BEHIND_WINDOW or s.groups[0, 0] > 0,
            "I9",
            f"frame {frame} has rank {record.rank}, as a page behind a window of group 0, which has none",
            frame=frame,
        )
        parent = int(record.parent)
        if record.status == st.CACHED and parent >= 0 and record.rank < st.BEHIND_WINDOW:
            floor = int(s.frames["floor"][parent])
            require(
                floor > record.rank,
                "I9",
                f"frame {parent} has floor {floor}, which must be above rank {record.rank} of its successor {frame}",
                frame=parent,
            )
        before, frame = entered, int(record.newer)


def check_pins(s: State, splits: list[np.ndarray]) -> None:
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
    require(
        not len(broken),
        "I7",
        f"frame {first} has {s.frames['pins'][first]} pins, but copies and fences account for {expected[first]}",
        frame=first,
    )
