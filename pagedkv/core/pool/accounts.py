"""Accounts: to whom frames are charged. Compiled functions over `reg` and the records; what a quota means is in quotas.py.

Until a tenant has a quota there are no accounts, and nothing here costs anything. Then `reg` grows by a block for each account, of which
0 is everybody else's:

    NUM_REGISTERS + account * ACCOUNT:   |the ends of its 32 lists of evictable frames|USED|EVICTABLE|its limits|what it has done|

A frame is charged to the account of the space that takes it until it is free again. Tenants share nothing, so that is one account.
"""

from __future__ import annotations

from pagedkv.core.compiled import inlined
from pagedkv.core.state import ACCOUNT, FENCED, FIRST_LIST, I64, NUM_REGISTERS, Records, State


@inlined
def number_of(reg: I64) -> int:
    """How many accounts there are; 0 as long as nobody has a quota."""
    return (len(reg) - NUM_REGISTERS) // ACCOUNT


@inlined
def register(account: int, name: int) -> int:
    """Where in `reg` a figure of an account is."""
    return NUM_REGISTERS + account * ACCOUNT + name


@inlined
def list_base(account: int, number: int) -> int:
    """Where in `reg` the ends of a list are. Account 0 has the lists that are there from the beginning, and all share the fenced one."""
    if account == 0 or number == FENCED:
        return FIRST_LIST + 4 * number
    return NUM_REGISTERS + account * ACCOUNT + 4 * number


@inlined
def count(records: Records, reg: I64, frame: int, name: int, change: int) -> None:
    """Add to a figure of the account that `frame` is charged to."""
    if len(reg) > NUM_REGISTERS:
        reg[register(records[frame].account, name)] += change


@inlined
def of_space(s: State, asid: int) -> int:
    """Who is charged for what the space takes."""
    return int(s.roots[s.spaces[asid].root, 2])
