"""Shares: how much of a server one tenant may take, and which of its requests is next. Knows no engine and no HTTP.

    enter ─▶ Place ─▶ begin: waits while the tenant has `running` outputs ─▶ the engine ─▶ leave
      None if the tenant has as many requests inside as may run and wait

Of the requests of a tenant that wait, the one with the lowest priority is next, then the oldest. Other tenants see two
priorities only, unless priorities are shared: FIRST of a request that begins while its tenant has none that runs, and
OTHER. So a tenant that asks now and then waits neither for places nor for frames of one that asks all the time, and the
first requests of all tenants preempt no other first one.

A tenant that is alone leaves the places of the others empty. Places that it borrowed would be free only when its
requests end.

The event loop calls all methods.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

FIRST, OTHER = 0, 1
"""Priorities of the engine: it preempts an OTHER request for a FIRST one if places or frames are short."""


@dataclass
class _Tenant:
    """The requests of a tenant. inside: their number. running: outputs. waiting: a heap of those that wait."""

    inside: int = 0
    running: int = 0
    waiting: list[tuple[int, int, Place]] = field(default_factory=list)


class Shares:
    """The requests of all tenants.

    running: outputs of a tenant that may run. waiting: requests of a tenant that may wait.
    shares_priorities: whether a priority counts among the requests of all tenants.
    """

    def __init__(self, running: int, waiting: int, *, shares_priorities: bool = False) -> None:
        self.running: int = running
        self.waiting: int = waiting
        self.shares_priorities: bool = shares_priorities
        self._tenants: dict[bytes, _Tenant] = {}
        self._numbers = count()

    def has_none(self, name: bytes) -> bool:
        """Return whether a tenant has no request inside."""
        return name not in self._tenants or not self._tenants[name].inside

    def enter(self, name: bytes) -> Place | None:
        """Return the place of a new request of a tenant; None if the tenant has its share inside."""
        tenant = self._tenants.setdefault(name, _Tenant())
        if tenant.inside >= self.running + self.waiting:
            return None
        tenant.inside += 1
        return Place(self, tenant, next(self._numbers))


class Place:
    """The place of one request, from `enter` to `leave`."""

    def __init__(self, shares: Shares, tenant: _Tenant, number: int) -> None:
        self.most_outputs: int = shares.running
        self._shares, self._tenant, self._number = shares, tenant, number
        self._num_outputs = 0
        self._turn: asyncio.Future[int] | None = None

    async def begin(self, num_outputs: int, priority: int) -> int:
        """Wait until the request may run. Returns: its priority among the requests of all tenants."""
        self._num_outputs, self._turn = num_outputs, asyncio.get_running_loop().create_future()
        heappush(self._tenant.waiting, (priority, self._number, self))
        self._advance()
        level = await self._turn
        return priority if self._shares.shares_priorities else level

    def leave(self) -> None:
        """Give the place back, whether the request ran or not."""
        self._tenant.inside -= 1
        if self._turn is not None and not self._turn.cancel() and not self._turn.cancelled():
            self._tenant.running -= self._num_outputs
        self._advance()

    def _advance(self) -> None:
        """Let the next requests of the tenant run, as many as its share holds."""
        tenant = self._tenant
        while tenant.waiting:
            _, _, place = tenant.waiting[0]
            assert place._turn is not None
            if not place._turn.done():
                if tenant.running + place._num_outputs > self._shares.running:
                    return
                place._turn.set_result(FIRST if tenant.running == 0 else OTHER)
                tenant.running += place._num_outputs
            heappop(tenant.waiting)
