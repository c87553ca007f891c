"""Check the accounts: recount the frames charged to each tenant. Plain numpy, apart from the code it checks."""

from __future__ import annotations

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.check.requirements import forbid, require
from pagedkv.core.state import State

_SHARES = (
    ("evictions", st.EVICTED, st.EVICTIONS),
    ("asked", st.ASKED_BY, st.ASKED),
    ("matched", st.MATCHED_BY, st.MATCHED),
)


def check_accounts(s: State) -> None:
    """Check the figures of each account against a recount, their sums against the pool's, and the limits. O(frames)."""
    rest = (len(s.reg) - st.NUM_REGISTERS) % st.ACCOUNT
    require(rest == 0, "I1", f"the last {rest} registers belong to no account; each account has {st.ACCOUNT}")
    blocks = st.account_registers(s.reg)
    owner, num_accounts = s.frames["account"], max(1, len(blocks))
    forbid(owner >= num_accounts, "I1", f"a frame is charged to an account beyond the last one, {num_accounts - 1}")
    forbid(
        (s.roots[:, st.CHARGED] < 0) | (s.roots[:, st.CHARGED] >= num_accounts),
        "I1",
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
        forbid(
            counted != blocks[:, register],
            "I1",
            f"the registers count {blocks[:8, register].tolist()} {name} frames for the accounts from 0 on, "
            f"but the frames themselves give {counted[:8].tolist()}",
            place="account",
        )
    for name, part, whole in _SHARES:
        total = int(blocks[:, part].sum())
        require(total == s.reg[whole], "I1", f"{name}: the accounts add up to {total}, the pool says {s.reg[whole]}")
    protected = int(blocks[:, st.PROTECTED].sum())
    require(protected <= len(s.frames), "I1", f"quotas protect {protected} frames, but the pool has {len(s.frames)}")
    # the row of group 0 has the status of the whole space
    opened = np.repeat(s.spaces["status"][:: len(s.groups)] == st.OPEN, len(s.groups))
    for asid in np.flatnonzero(opened):
        pages = s.table[asid, : s.spaces["num_pages"][asid]]
        foreign = pages[(pages >= 0) & (owner[pages] != s.roots[s.spaces["root"][asid], st.CHARGED])]
        require(
            not len(foreign),
            "I1",
            f"space {asid} maps frames {foreign[:4].tolist()}, each of which is charged to another account",
        )
