"""Accounts: which account each frame is charged to. Compiled functions over `reg` and the records.

The rules of quotas are in quotas.py. Until a tenant has a quota there are no accounts, and these functions cost no
time. Then `reg` grows by a block for each account. Account 0 is charged for all tenants without a quota:

    NUM_REGISTERS + account * ACCOUNT:   |ends of its 32 lists|USED|EVICTABLE|limits|counters|scratch|

A frame is charged to the account of the space that takes it, until the frame is free again. Tenants share no frame, so
a frame has one account.
"""

from __future__ import annotations

from pagedkv.core.compiled import inlined
from pagedkv.core.state import ACCOUNT, CHARGED, FENCED, FIRST_LIST, I64, NUM_REGISTERS, Records, State


@inlined
def number_of(reg: I64) -> int:
    """Return the number of accounts; 0 until a tenant has a quota."""
    return (len(reg) - NUM_REGISTERS) // ACCOUNT


@inlined
def register(account: int, name: int) -> int:
    """Return the index in `reg` of the register `name` of an account."""
    return NUM_REGISTERS + account * ACCOUNT + name


@inlined
def list_base(account: int, number: int) -> int:
    """Return the index in `reg` of the ends of a list. Account 0 uses the lists of a pool without accounts.

    All accounts share the list FENCED.
    """
    if account == 0 or number == FENCED:
        return FIRST_LIST + 4 * number
    return NUM_REGISTERS + account * ACCOUNT + 4 * number


@inlined
def count(records: Records, reg: I64, frame: int, name: int, change: int) -> None:
    """Add `change` to the register `name` of the account that `frame` is charged to."""
    if len(reg) > NUM_REGISTERS:
        reg[register(records[frame].account, name)] += change


@inlined
def of_space(s: State, asid: int) -> int:
    """Return the account that is charged for the frames of the space."""
    return int(s.roots[s.spaces[asid].root, CHARGED])
