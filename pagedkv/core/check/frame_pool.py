"""Check a frame pool: the laws of laws.py that speak of frames. Epochs alone pin its frames."""

from __future__ import annotations

from pagedkv.core import state as st
from pagedkv.core.arguments import whole
from pagedkv.core.check.accounts import check_accounts
from pagedkv.core.check.eviction import check_policy
from pagedkv.core.check.index import check_index
from pagedkv.core.check.laws import check_counters, check_frames, check_lists, check_order
from pagedkv.core.check.requirements import forbid, require
from pagedkv.core.policies import Policy
from pagedkv.core.state import State


def check_frame_pool(s: State, level: int, policy: Policy, *, twins: bool) -> None:
    """Raise InvariantViolation at the first broken law. O(frames) at level 2 and 3.

    I2 is the caller's: its page tables hold the references. twins: whether two frames may have one key.
    """
    level = whole(level, "level of check (1: counters, 2: frames, 3: everything)", 1, 4)
    check_counters(s)
    if level >= 2:
        check_frames(s, unnamed=True)
    if level >= 3:
        _check_rows(s)
        _check_pins(s)
        check_accounts(s)
        check_order(s, check_lists(s))
        check_policy(s, policy)
        check_index(s, {0: 0}, twins=twins)


def _check_rows(s: State) -> None:
    """Check that the arrays of page tables, which a frame pool does not use, are as they were made."""
    used = int((s.spaces["status"] != st.UNUSED).sum())
    require(not used and (s.table == st.HOLE).all(), "I5", f"{used} rows of page tables are used in a frame pool")
    parents = s.frames["parent"][(s.frames["published"] != 0) | (s.frames["status"] == st.CACHED)]
    require(
        (parents == -2).all(),
        "I4",
        "a named or cached frame has a parent; in a frame pool each is a first page of root 0",
    )


def _check_pins(s: State) -> None:
    """Check that a frame is pinned once if it is fenced, and not at all otherwise."""
    forbid(
        s.frames["pins"] != (s.frames["place"] == st.AMONG_FENCED), "I7", "a frame has a pin exactly if it is fenced"
    )
    require(s.reg[st.PINNED] == 0, "I7", f"the counter says {s.reg[st.PINNED]} pins, but a frame pool makes none")
