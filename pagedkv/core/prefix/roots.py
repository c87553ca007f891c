"""Roots: the parents of first pages, one for each tenant. Adapter and image digests are part of a tenant's name."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from pagedkv.core import state as st
from pagedkv.core.state import State


class Root(NamedTuple):
    """A root: its number, and the prefix hash of its empty prefix (`seed`), a keyed digest of the tenant's name."""

    number: int
    seed: int


class Roots:
    """The roots in use. The number of an unused root is given out again."""

    def __init__(self) -> None:
        self.by_tenant: dict[bytes, Root] = {}
        self._sweep_at = 8  # remove the unused roots when there are so many
        # Numbers below _next_number that no tenant has. An interrupt may lose some, so a number is never had twice.
        self._unused_numbers: list[int] = []
        self._next_number = 0

    def of(self, tenant: bytes, state: State) -> tuple[Root, State]:
        """Return the root of `tenant`, made if necessary, and the state with room for it. O(1) amortised."""
        if tenant not in self.by_tenant:
            if len(self.by_tenant) >= self._sweep_at:
                unused = [name for name, root in self.by_tenant.items() if not state.roots[root.number, 0]]
                for name in unused:
                    number = self.by_tenant.pop(name).number
                    self._unused_numbers.append(number)
                self._sweep_at = 2 * len(self.by_tenant) + 8
            number = self._unused_numbers.pop() if self._unused_numbers else self._new_number()
            key = int(state.reg[st.KEY]).to_bytes(8, "little")
            seed = int.from_bytes(hashlib.blake2b(tenant, key=key, digest_size=4).digest(), "little")
            self.by_tenant[tenant] = Root(number, seed)
        root = self.by_tenant[tenant]
        if root.number >= len(state.roots):
            state = st.with_more_roots(state)
        return root, state

    def _new_number(self) -> int:
        number = self._next_number
        self._next_number = number + 1
        return number
