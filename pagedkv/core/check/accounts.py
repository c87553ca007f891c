"""Accounts, checked: what is charged to whom, recounted. Plain numpy, apart from the code it checks."""

from __future__ import annotations

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.check.requirements import none, require
from pagedkv.core.state import State

_SHARES = (
    ("evictions", st.EVICTED, st.EVICTIONS),
    ("asked", st.ASKED_BY, st.ASKED),
    ("matched", st.MATCHED_BY, st.MATCHED),
)


def check_accounts(s: State) -> None:
    """Each account's figures are those of a recount, they add up to the pool's, and its limits make sense. O(frames)."""
    rest = (len(s.reg) - st.NUM_REGISTERS) % st.ACCOUNT
    require(rest == 0, "I1", f"{rest} registers belong to no account")
    blocks = st.account_registers(s.reg)
    owner = s.frames["account"]
    none(owner >= max(1, len(blocks)), "I1", "a frame is charged to an account that is none")
    none(
        (s.roots[:, 2] < 0) | (s.roots[:, 2] >= max(1, len(blocks))),
        "I1",
        "a root is charged to an account that is none",
        places="root",
    )
    if not len(blocks):
        return
    evictable = (s.frames["status"] == st.CACHED) & (s.frames["pins"] == 0)
    for name, register, of in (
        ("used", st.USED, s.frames["status"] != st.FREE),
        ("evictable", st.EVICTABLE, evictable),
    ):
        counted = np.bincount(owner[of], minlength=len(blocks))
        wrong = np.flatnonzero(counted != blocks[:, register])
        require(
            not len(wrong),
            "I1",
            f"account {wrong[:1]} has {counted[wrong[:1]]} {name} frames, and says {blocks[wrong[:1], register]}",
        )
    for name, part, whole in _SHARES:
        total = int(blocks[:, part].sum())
        require(total == s.reg[whole], "I1", f"{name}: the accounts add up to {total}, the pool says {s.reg[whole]}")
    require(blocks[:, st.PROTECTED].sum() <= len(s.frames), "I1", "more frames are protected than there are")
    opened = np.repeat(s.spaces["status"][:: len(s.groups)] == st.OPEN, len(s.groups))  # the row that leads tells
    for asid in np.flatnonzero(opened):
        pages = s.table[asid, : s.spaces["num_pages"][asid]]
        alien = pages[(pages >= 0) & (owner[pages] != s.roots[s.spaces["root"][asid], 2])]
        require(not len(alien), "I1", f"space {asid} maps frame {alien[:1]}, which is charged to another account")
