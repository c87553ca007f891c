"""Tenants: the methods of MemoryManager that set quotas, report usage and say how many frames a tenant may still take.

The rules are in pool/quotas.py. A tenant has an account of its own from its first quota on. All other tenants share
account 0, which has no limits.
"""

from __future__ import annotations

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.arguments import real, tenant_name, whole
from pagedkv.core.observe.stats import Usage, usages_of
from pagedkv.core.pool.frames import pending
from pagedkv.core.prefix.roots import Roots
from pagedkv.core.state import State
from pagedkv.core.thread_guard import ThreadGuard, exclusive
from pagedkv.errors import InvalidRequest


def pool_share(share: object, what: str) -> float:
    """Return a share of the pool as a float. Raises: InvalidRequest unless 0 <= share <= 1; a watermark is below 1."""
    number, is_watermark = real(share, what), what == "watermark"
    if not 0.0 <= number <= 1.0 or (is_watermark and number == 1.0):
        use, end = ("to keep free", "less than 1") if is_watermark else ("that pins may hold", "1")
        raise InvalidRequest(f"{what} is {share}; it is the share of the pool {use}, from 0 to {end}")
    return number


class TenantMixin(ThreadGuard):
    """The methods of MemoryManager that know tenants by name."""

    state: State
    num_frames: int
    _roots: Roots
    _accounts: dict[bytes, int]
    _watermark: float

    @exclusive
    def set_quota(self, tenant: bytes, *, hard: int | None = None, soft: int | None = None, protected: int = 0) -> None:
        """Limit the frames that `tenant` may hold, or change its limits.

        The three limits are those of a memory cgroup: max, high, min.
        hard:      the most frames of the tenant. A plan beyond it evicts the tenant's own cached frames, and is refused
                   if they do not suffice.
        soft:      above it, the tenant's cached frames are evicted before those of tenants below their soft quota.
        protected: so many frames of the tenant are not evicted for other tenants.
        Raises: InvalidRequest for numbers that make no sense, or for the first quota of a tenant that holds frames
                already
        """
        tenant, protected = tenant_name(tenant), whole(protected, "protected", 0, self.num_frames + 1)
        hard = None if hard is None else whole(hard, "hard")
        soft = None if soft is None else whole(soft, "soft")
        if hard is not None and protected > hard:
            raise InvalidRequest(
                f"quota protects {protected} frames of {tenant!r} and allows {hard}; protect no more than is allowed"
            )
        account = self._accounts.get(tenant)
        blocks = st.account_registers(self.state.reg)
        others = int(sum(blocks[other, st.PROTECTED] for other in self._accounts.values() if other != account))
        if others + protected > self.num_frames:
            raise InvalidRequest(
                f"quota protects {protected} frames of {tenant!r}; others have {others} of {self.num_frames} "
                f"protected: at most {self.num_frames - others} are left"
            )
        if account is None:
            account = self._new_account(tenant)
        limits = [-1 if limit is None else limit for limit in (hard, soft)]
        st.account_registers(self.state.reg)[account, [st.HARD, st.SOFT, st.PROTECTED]] = [*limits, protected]

    def _new_account(self, tenant: bytes) -> int:
        if self._roots.is_used(tenant, self.state):
            raise InvalidRequest(
                f"tenant {tenant!r} holds frames already, which are charged to no account; set its first quota before "
                "its first prompt, or release its spaces and evict its cached frames"
            )
        account = len(self._accounts) + 1
        if account >= 2**16:
            raise InvalidRequest(f"{account - 1} tenants have quotas, the most that there can be")
        if account >= len(st.account_registers(self.state.reg)):  # else a call was interrupted at the next line
            self.state = st.with_account(self.state)
        self._accounts[tenant] = account
        return account

    def _charge_root(self, tenant: bytes, number: int) -> None:
        if self._accounts:
            self.state.roots[number, st.CHARGED] = self._accounts.get(tenant, 0)

    @property
    def available(self) -> int:
        """int, frames: how many a plan could take now, free or evictable. With quotas see `available_to`."""
        return int(self.state.reg[st.NUM_FREE] + self.state.reg[st.NUM_EVICTABLE])

    @property
    def pending(self) -> int:
        """int, frames: how many become available when outstanding plans and open epochs end; wait, do not preempt."""
        return pending(self.state)

    @property
    def reserve(self) -> int:
        """int, frames: how many `admits` keeps free (the watermark)."""
        return int(np.ceil(self._watermark * self.num_frames))

    def available_to(self, tenant: bytes = b"") -> int:
        """Return how many frames a plan for spaces of `tenant` alone could take now.

        The hard quota of the tenant and the protected shares of other tenants limit them.
        """
        return max(0, min(headroom(self.state, self._accounts.get(tenant_name(tenant), 0))))

    def admits(self, num_frames: int, *, tenant: bytes = b"") -> bool:
        """Return True if a new sequence of `tenant` may take `num_frames` frames, leaving the `reserve` to others."""
        pool, quota = headroom(self.state, self._accounts.get(tenant_name(tenant), 0))
        return whole(num_frames, "num_frames") <= min(pool - self.reserve, quota)

    def free_to(self, tenant: bytes = b"") -> int:
        """Return how many frames a plan for spaces of `tenant` alone could take now without evicting a frame."""
        free, account = int(self.state.reg[st.NUM_FREE]), self._accounts.get(tenant_name(tenant), 0)
        if account:
            block = st.account_registers(self.state.reg)[account]
            free = min(free, max(0, int(block[st.HARD] - block[st.USED]))) if block[st.HARD] >= 0 else free
        return free

    def usage(self, tenant: bytes) -> Usage:
        """Return the frames that `tenant` holds and its limits. O(frames). Raises: InvalidRequest without a quota."""
        if tenant_name(tenant) not in self._accounts:
            raise InvalidRequest(
                f"tenant {tenant!r} has no quota, so no frame is charged to it; set_quota(tenant) gives it an account"
            )
        return usages_of(self.state, {tenant: self._accounts[tenant]})[tenant]

    def usages(self) -> dict[bytes, Usage]:
        """Return the `usage` of each tenant that has a quota. O(frames)."""
        return usages_of(self.state, self._accounts) if self._accounts else {}


def headroom(s: State, account: int) -> tuple[int, int]:
    """Return (frames that the pool leaves, frames that the hard quota leaves) to a plan of `account`; both limit it.

    The pool leaves the free frames, the evictable frames of `account`, and the surplus of the other accounts: their
    evictable frames above the protected share (quotas.py).
    """
    free, evictable = int(s.reg[st.NUM_FREE]), int(s.reg[st.NUM_EVICTABLE])
    blocks = st.account_registers(s.reg)
    if not len(blocks):
        return free + evictable, free + evictable
    surplus = np.minimum(blocks[:, st.EVICTABLE], np.maximum(0, blocks[:, st.USED] - blocks[:, st.PROTECTED]))
    block = blocks[account]
    pool = free + int(surplus.sum() - surplus[account] + block[st.EVICTABLE])
    return pool, int(block[st.HARD] - block[st.USED] + block[st.EVICTABLE]) if block[st.HARD] >= 0 else pool
