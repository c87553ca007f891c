"""Roots: what stands before the first page. One for each tenant (and adapter, and image: whatever makes equal tokens different)."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from pagedkv.core import state as st
from pagedkv.core.state import State


class Root(NamedTuple):
    """Its number, and the fingerprint of its empty prefix: a keyed digest of the tenant's name, whatever number it has."""

    number: int
    seed: int


class Roots:
    """The roots in use; numbers of unused ones are given out again."""

    def __init__(self) -> None:
        self.by_tenant: dict[bytes, Root] = {}
        self._kept = 8  # sweep the unused ones when there are more
        self._spare: list[int] = []  # numbers given back; all below `len(known) + len(_spare)` are known or spare

    def of(self, tenant: bytes, state: State) -> tuple[Root, State]:
        """The root of `tenant`, made if need be, and the state with room for it. O(1) amortised."""
        if tenant not in self.by_tenant:
            if len(self.by_tenant) >= self._kept:
                unused = [name for name, root in self.by_tenant.items() if not state.roots[root.number, 0]]
                self._spare += [self.by_tenant.pop(name).number for name in unused]
                self._kept = 2 * len(self.by_tenant) + 8
            number = self._spare.pop() if self._spare else len(self.by_tenant)
            if number >= len(state.roots):
                state = st.with_more_roots(state)
            key = int(state.reg[st.KEY]).to_bytes(8, "little")
            seed = int.from_bytes(hashlib.blake2b(tenant, key=key, digest_size=4).digest(), "little")
            self.by_tenant[tenant] = Root(number, seed)
        return self.by_tenant[tenant], state
