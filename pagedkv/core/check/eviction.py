"""Order of eviction, checked: what stands on the lists, why there, and since when. Plain numpy, apart from the code it checks."""

from __future__ import annotations

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.check.requirements import require
from pagedkv.core.pool.policies import Policy
from pagedkv.core.state import State

_CYCLE = 2**31  # marks are kept modulo this


def check_policy(s: State, policy: Policy) -> None:
    """The registers say what `policy` says; frames stand where they were ranked, in order of arrival. O(listed frames)."""
    bonuses, lists = policy.bonuses(), st.list_registers(s.reg)
    said = [policy.rule, policy.inflation, policy.scale, st.NORMAL + len(bonuses)]
    held = [int(s.reg[i]) for i in (st.RULE, st.INFLATION, st.SCALE, st.USED_LISTS)]
    require(held == said, "I9", f"the registers of policy {policy.name} are {held}, not {said}")
    due = [0] * st.NORMAL + bonuses + [0] * (len(lists) - st.NORMAL - len(bonuses))
    require(lists[:, 3].tolist() == due, "I9", f"the bonuses of policy {policy.name} are not {due}")
    now = int(s.reg[st.CLOCK] if policy.inflation else s.reg[st.TICK])
    accounts = [block[: 4 * st.NUM_LISTS : 4].tolist() for block in st.account_registers(s.reg)]
    for number, oldest in [*enumerate(lists[:, 0].tolist()), *(one for ends in accounts for one in enumerate(ends))]:
        if oldest != st.NIL:
            require(
                number < st.NORMAL + len(bonuses) or number == st.FENCED,
                "I9",
                f"list {number} is none of policy {policy.name}",
            )
            _check_list(s, number, oldest, int(s.reg[st.EPOCH]) if number == st.FENCED else now)


def _check_list(s: State, number: int, frame: int, now: int) -> None:
    """Frames came one after the other, none after `now`; an evictable one stands where it was ranked, or with its successors."""
    before = int(s.frames["entered"][frame])
    while frame != st.NIL:
        record = s.frames[frame]
        entered = int(record.entered)
        require(
            (entered - before) % _CYCLE <= _CYCLE // 2,
            "I9",
            f"frame {frame} on list {number} came before the one ahead of it",
            frame=frame,
        )
        require(
            (now - entered) % _CYCLE <= _CYCLE // 2,
            "I9",
            f"frame {frame} on list {number} came at {entered}; it is {now}",
            frame=frame,
        )
        if number != st.FENCED:
            ranked = record.rank <= number <= max(int(record.rank), int(record.floor) - 1)
            require(
                ranked,
                "I9",
                f"frame {frame} on list {number} was ranked for {record.rank}, floor {record.floor}",
                frame=frame,
            )
        parent = int(record.parent)
        if record.status == st.CACHED and parent >= 0:
            low = int(s.frames["floor"][parent])
            require(
                low > record.rank,
                "I9",
                f"frame {parent} has floor {low}, its successor {frame} rank {record.rank}",
                frame=parent,
            )
        before, frame = entered, int(record.newer)


def check_pins(s: State, splits: list[np.ndarray]) -> None:
    """A frame is pinned by the plans that copy from it, or from what comes after it, and by a fence. `splits`: of the outstanding plans."""
    due = (s.frames["place"] == st.AMONG_FENCED).astype(np.int64)
    for source, chained in (copy for rows in splits for copy in rows[:, [0, 3]].tolist()):
        due[source] += 1
        parent = int(s.frames["parent"][source])
        while chained and parent >= 0:
            due[parent] += 1
            parent = int(s.frames["parent"][parent])
    broken = np.flatnonzero(due != s.frames["pins"])
    first = int(broken[0]) if len(broken) else 0
    require(
        not len(broken),
        "I7",
        f"frame {first} has {s.frames['pins'][first]} pins, {due[first]} are accounted for",
        frame=first,
    )
