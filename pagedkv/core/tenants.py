"""Tenants: quotas, and how many frames a tenant may still take. Functions for MemoryManager and FramePool.

The rules are in pool/quotas.py. A tenant has an account from its first quota on. All other tenants share account 0,
which has no limits.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.arguments import real, tenant_name, whole
from pagedkv.core.state import I64, State
from pagedkv.errors import InvalidRequest

NONE: Final = np.zeros(1, np.int64)
"""No frame of any account."""


def pool_share(share: object, what: str) -> float:
    """Return a share of the pool as a float. Raises: InvalidRequest unless 0 <= share <= 1; a watermark is below 1."""
    number, is_watermark = real(share, what), what == "watermark"
    if not 0.0 <= number <= 1.0 or (is_watermark and number == 1.0):
        use, end = ("to keep free", "less than 1") if is_watermark else (f"that {what} may hold", "1")
        raise InvalidRequest(f"{what} is {share}; it is the share of the pool {use}, from 0 to {end}")
    return number


class Limits(NamedTuple):
    """The limits of a tenant in frames; None: no limit."""

    hard: int | None
    soft: int | None
    protected: int

    @classmethod
    def of(cls, s: State, accounts: dict[bytes, int], tenant: object, limits: tuple[object, object, object]) -> Limits:
        """Return hard, soft and protected, if the pool can keep them. accounts: that of each tenant with a quota."""
        num_frames, name = len(s.frames), tenant_name(tenant)
        hard = None if limits[0] is None else whole(limits[0], "hard")
        soft = None if limits[1] is None else whole(limits[1], "soft")
        protected = whole(limits[2], "protected", 0, num_frames + 1)
        if hard is not None and protected > hard:
            raise InvalidRequest(
                f"quota protects {protected} frames of {name!r} and allows {hard}; protect no more than is allowed"
            )
        blocks = st.account_registers(s.reg)
        others = int(sum(blocks[account, st.PROTECTED] for other, account in accounts.items() if other != name))
        if others + protected > num_frames:
            raise InvalidRequest(
                f"quota protects {protected} frames of {name!r}; others have {others} of {num_frames} "
                f"protected: at most {num_frames - others} are left"
            )
        return cls(hard, soft, protected)

    def set(self, s: State, account: int) -> None:
        """Write the limits into the registers of the account."""
        limits = [-1 if limit is None else limit for limit in self[:2]]
        st.account_registers(s.reg)[account, [st.HARD, st.SOFT, st.PROTECTED]] = [*limits, self.protected]


def with_account(s: State, accounts: dict[bytes, int]) -> State:
    """Return the state with registers for one account more than `accounts` has."""
    account = len(accounts) + 1
    if account >= 2**16:
        raise InvalidRequest(f"{account - 1} tenants have quotas, the most that there can be")
    has_registers = account < len(st.account_registers(s.reg))  # as a call was interrupted before it named the account
    return s if has_registers else st.with_account(s)


def available(s: State) -> int:
    """Return how many frames are free or evictable."""
    return int(s.reg[st.NUM_FREE] + s.reg[st.NUM_EVICTABLE])


def total(retained: I64) -> int:
    """Return the frames of all accounts."""
    return 0 if retained is NONE else int(retained.sum())


def headroom(s: State, account: int, retained: I64 = NONE) -> tuple[int, int]:
    """Return (frames that the pool leaves, frames that the hard quota leaves) to a plan of `account`; both limit it.

    retained: int64 [accounts], frames that count as evictable, too; NONE without accounts. The pool leaves the free
    frames, the evictable frames of `account`, and the surplus of the other accounts: their evictable frames above the
    protected share (quotas.py).
    """
    blocks = st.account_registers(s.reg)
    if not len(blocks):
        return (available(s) + total(retained),) * 2
    evictable = blocks[:, st.EVICTABLE] + retained
    surplus = np.minimum(evictable, np.maximum(0, blocks[:, st.USED] - blocks[:, st.PROTECTED]))
    block, own = blocks[account], evictable[account]
    pool = int(s.reg[st.NUM_FREE]) + int(surplus.sum() - surplus[account] + own)
    return pool, int(block[st.HARD] - block[st.USED] + own) if block[st.HARD] >= 0 else pool
