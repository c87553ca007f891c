"""Tenants: their quotas, and what each of them holds. The part of MemoryManager that speaks of them; the rules are in quotas.py.

A tenant has an account of its own from its first quota on. All others share account 0, which has no limits.
"""

from __future__ import annotations

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.arguments import tenant_name, whole
from pagedkv.core.observe.stats import Usage, usages_of
from pagedkv.core.prefix.roots import Roots
from pagedkv.core.state import State
from pagedkv.core.thread_guard import ThreadGuard, exclusive
from pagedkv.errors import InvalidRequest


class Tenants(ThreadGuard):
    """What of MemoryManager knows tenants by name."""

    state: State
    num_frames: int
    _roots: Roots
    _accounts: dict[bytes, int]

    @exclusive
    def set_quota(self, tenant: bytes, *, hard: int | None = None, soft: int | None = None, protected: int = 0) -> None:
        """Limit what `tenant` may hold, in frames; again to change it. All three are as in a memory cgroup (max, high, min).

        hard:      never more than this: its own cached frames make room, and where they do not suffice the plan is refused.
        soft:      its cached frames go before those of tenants below theirs.
        protected: so many frames of it are not evicted for others.
        Raises: InvalidRequest for numbers that cannot be, or a first quota of a tenant that holds frames already
        """
        tenant, protected = tenant_name(tenant), whole(protected, "protected", 0, self.num_frames + 1)
        hard = None if hard is None else whole(hard, "hard")
        soft = None if soft is None else whole(soft, "soft")
        if hard is not None and protected > hard:
            raise InvalidRequest(
                f"quota protects {protected} frames of {tenant!r} and allows {hard}; protect no more than is allowed"
            )
        mine = self._accounts.get(tenant)
        blocks = st.account_registers(self.state.reg)
        others = int(sum(blocks[account, st.PROTECTED] for account in self._accounts.values() if account != mine))
        if others + protected > self.num_frames:
            raise InvalidRequest(
                f"quota protects {protected} frames of {tenant!r}; others have {others} of {self.num_frames} protected: at most "
                f"{self.num_frames - others} are left"
            )
        if mine is None:
            mine = self._new_account(tenant)
        limits = [-1 if limit is None else limit for limit in (hard, soft)]
        st.account_registers(self.state.reg)[mine, [st.HARD, st.SOFT, st.PROTECTED]] = [*limits, protected]

    def _new_account(self, tenant: bytes) -> int:
        root = self._roots.by_tenant.get(tenant)
        if root is not None and self.state.roots[root.number, 0]:
            raise InvalidRequest(
                f"the first quota of {tenant!r}, which holds frames that are charged to nobody; set it before its first prompt, or release "
                "its spaces and evict what is cached"
            )
        account = len(self._accounts) + 1
        if account >= 2**16:
            raise InvalidRequest(f"{account - 1} tenants have quotas, the most that there can be")
        self.state = st.with_account(self.state)
        self._accounts[tenant] = account
        return account

    def _charge_root(self, tenant: bytes, number: int) -> None:
        if self._accounts:
            self.state.roots[number, 2] = self._accounts.get(tenant, 0)

    def free_to(self, tenant: bytes = b"") -> int:
        """Frames a plan for spaces of `tenant` alone could take now without evicting anything, its own included."""
        free, account = int(self.state.reg[st.NUM_FREE]), self._accounts.get(tenant_name(tenant), 0)
        if account:
            mine = st.account_registers(self.state.reg)[account]
            free = min(free, max(0, int(mine[st.HARD] - mine[st.USED]))) if mine[st.HARD] >= 0 else free
        return free

    def usage(self, tenant: bytes) -> Usage:
        """What `tenant` holds and may hold. O(frames). Raises: InvalidRequest for a tenant without a quota."""
        if tenant_name(tenant) not in self._accounts:
            raise InvalidRequest(
                f"tenant {tenant!r} has no quota, so nothing is charged to it; set_quota(tenant) gives it an account"
            )
        return usages_of(self.state, {tenant: self._accounts[tenant]})[tenant]

    def usages(self) -> dict[bytes, Usage]:
        """`usage` of each tenant that has a quota. O(frames)."""
        return usages_of(self.state, self._accounts) if self._accounts else {}


def headroom(s: State, account: int) -> tuple[int, int]:
    """(what the pool leaves to `account`, what its hard quota does), in frames: a plan of it can be had as long as neither is exceeded.

    All that is free and its own evictable frames; of others what is above their protected shares (quotas.py).
    """
    free, evictable = int(s.reg[st.NUM_FREE]), int(s.reg[st.NUM_EVICTABLE])
    blocks = st.account_registers(s.reg)
    if not len(blocks):
        return free + evictable, free + evictable
    spare = np.minimum(blocks[:, st.EVICTABLE], np.maximum(0, blocks[:, st.USED] - blocks[:, st.PROTECTED]))
    mine = blocks[account]
    pool = free + int(spare.sum() - spare[account] + mine[st.EVICTABLE])
    return pool, int(mine[st.HARD] - mine[st.USED] + mine[st.EVICTABLE]) if mine[st.HARD] >= 0 else pool
