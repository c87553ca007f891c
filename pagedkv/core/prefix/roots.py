"""Roots: the tenants of prompts, and the salts that lie in a prompt beside its tokens.

A salt is the digest of something that the tokens do not name: an adapter, an image. It counts from its position on, so
the pages before it are shared with prompts that have another salt there, or none.

    tenant  ──▶ root 3              the parent of the tenant's first pages
    {5: image, 40: other}           block_size 4: the salts lie in pages 1 and 10
    (tenant, image)          ──▶ root 7    its salts lie in page 1     before it: root 3
    (tenant, image, other)   ──▶ root 8    its salts lie in page 10    before it: root 7

A space has the root of all its salts. A page is published with the root whose salts lie in the page, if there is one
(`salts` of the state), and two pages are equal only if these roots are. So identity stays exact (I4): a root
is looked up by the salts themselves, and a page also names the page before it, which has the earlier salts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.state import I64, State

Salts = tuple[tuple[int, bytes], ...]
"""Positions and digests, in order of positions."""


class Root(NamedTuple):
    """A root: its number, and the prefix hash of its tenant's empty prefix (`seed`), a keyed digest of its name.

    page, own: the page with its salts, -1 for none; and these salts, with their offsets in the page.
    before:    the number of the root with the salts of earlier pages, NIL for none.
    """

    number: int
    seed: int
    page: int = -1
    before: int = st.NIL
    own: Salts = ()


class Roots:
    """The roots in use. The number of an unused root is given out again."""

    def __init__(self) -> None:
        self.by_tenant: dict[bytes, Root] = {}
        self.salted: dict[tuple[bytes, Salts], Root] = {}
        self._sweep_at = 8  # remove the unused roots when there are so many
        # Numbers below _next_number that no root has. An interrupt may lose some, so a number is never had twice.
        self._unused_numbers: list[int] = []
        self._next_number = 0

    def of(self, tenant: bytes, state: State, salts: Salts = ()) -> tuple[Root, State]:
        """Return the root of `tenant` with `salts`, made if necessary, and the state, grown for it. O(1) amortised."""
        if tenant not in self.by_tenant:
            if len(self.by_tenant) + len(self.salted) >= self._sweep_at:
                self._sweep(state)
            root = Root(self._number(), _keyed(tenant, state))
            state = self._place(root, state)
            self.by_tenant[tenant] = root
        root = self.by_tenant[tenant]
        if root.number >= len(state.roots):
            state = self._place(root, state)
        return (root, state) if not salts else self._salted(tenant, salts, (root, state))

    def _salted(self, tenant: bytes, salts: Salts, first: tuple[Root, State]) -> tuple[Root, State]:
        """Return the root of all `salts`. first: the root of the tenant, and the state."""
        if len(self.by_tenant) + len(self.salted) >= self._sweep_at:
            self._sweep(first[1], first[0].number)
        root, state = first[0], st.with_salts(first[1])
        size = state.tokens.shape[1]
        for page, start, end in _by_page(salts, size):
            name = tenant, salts[:end]
            if name not in self.salted:
                own = tuple((position - page * size, digest) for position, digest in salts[start:end])
                root = Root(self._number(), root.seed, page, root.number, own)
                state = self._place(root, state)
                self.salted[name] = root
            root = self.salted[name]
            if root.number >= len(state.roots):
                state = self._place(root, state)
        return root, state

    def longest(self, tenant: bytes, salts: Salts, state: State) -> tuple[Root | None, int]:
        """Return (the root of the longest beginning of `salts` that has one, the page of the next salt or -1).

        No root is made.
        """
        root = self.by_tenant.get(tenant)
        if root is None or root.number >= len(state.roots):
            return None, 0
        for page, _, end in _by_page(salts, state.tokens.shape[1]):
            following = self.salted.get((tenant, salts[:end]))
            if following is None or following.number >= len(state.roots):
                return root, page
            root = following
        return root, -1

    def chain(self, tenant: bytes, salts: Salts, block_size: int) -> list[Root]:
        """Return the root of `tenant` and those of its `salts`, page by page; all of them exist."""
        ends = [end for _, _, end in _by_page(salts, block_size)]
        return [self.by_tenant[tenant], *(self.salted[tenant, salts[:end]] for end in ends)]

    @staticmethod
    def seeds(tenant: bytes, salts: Salts, state: State) -> tuple[int, I64]:
        """Return the prefix hash of an empty prompt, and int64 [n, 2]: each page with salts, and their keyed digest."""
        rows, size = [], state.tokens.shape[1]
        for page, start, end in _by_page(salts, size):
            own = tuple((position - page * size, digest) for position, digest in salts[start:end])
            rows.append((page, _salt_seed(own, state)))
        return _keyed(tenant, state), np.array(rows, np.int64).reshape(-1, 2)

    def every(self) -> list[tuple[bytes, Root]]:
        """Return the tenant of each root, and the root.

        A list: Python drops an interrupt that arrives while it closes a generator.
        """
        return [*self.by_tenant.items(), *[(tenant, root) for (tenant, _), root in self.salted.items()]]

    def of_tenant(self, tenant: bytes) -> list[tuple[bytes, Root]]:
        """Return the tenant and the root of each root of a tenant."""
        first = [(tenant, self.by_tenant[tenant])] if tenant in self.by_tenant else []
        return first + [(tenant, root) for (name, _), root in self.salted.items() if name == tenant]

    def is_used(self, tenant: bytes, state: State) -> bool:
        """Return whether a space or a published page belongs to `tenant`."""
        return sum(_count(root, state) for name, root in self.every() if name == tenant) > 0

    def _number(self) -> int:
        return self._unused_numbers.pop() if self._unused_numbers else self._new_number()

    def _new_number(self) -> int:
        number = self._next_number
        self._next_number = number + 1
        return number

    def _place(self, root: Root, state: State) -> State:
        """Write the row of a new root, or all rows if the state must grow. Return that state."""
        if root.number < len(state.roots):
            _write(root, state)
            return state
        while root.number >= len(state.roots):
            state = st.with_more_roots(state)
        for _, other in self.every():  # an interrupt may have lost a state that had their rows
            if other.number < len(state.roots):
                _write(other, state)
        _write(root, state)
        return state

    def _sweep(self, state: State, kept: int = st.NIL) -> None:
        """Remove the roots that no space, page or later root needs, except number `kept`. O(roots)."""
        needed = {kept}
        for root in sorted((root for _, root in self.every()), key=lambda root: -root.page):
            if root.number in needed or _count(root, state):
                needed |= {root.number, root.before}
        unused = [name for name, root in self.salted.items() if root.number not in needed]
        for name in unused:
            number = self.salted.pop(name).number
            self._unused_numbers.append(number)
        for tenant in [tenant for tenant, root in self.by_tenant.items() if root.number not in needed]:
            number = self.by_tenant.pop(tenant).number
            self._unused_numbers.append(number)
        self._sweep_at = 2 * (len(self.by_tenant) + len(self.salted)) + 8


def _keyed(content: bytes, state: State) -> int:
    key = int(state.reg[st.KEY]).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(content, key=key, digest_size=4).digest(), "little")


def _salt_seed(own: Salts, state: State) -> int:
    return _keyed(repr(own).encode(), state)


def _count(root: Root, state: State) -> int:
    return int(state.roots[root.number, st.IN_USE]) if root.number < len(state.roots) else 0


def _write(root: Root, state: State) -> None:
    """Write the columns of `state.roots` that describe a root."""
    seed = _salt_seed(root.own, state) if root.own else 0
    described = np.array([root.page, root.before, seed], np.int64).astype(np.int32)
    state.roots[root.number, [st.SALTED_PAGE, st.ROOT_BEFORE, st.SALT_SEED]] = described


def _by_page(salts: Salts, block_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (page, first, end) for each page with salts: they are salts[first:end]."""
    first = 0
    for end in range(1, len(salts) + 1):
        page = salts[first][0] // block_size
        if end == len(salts) or salts[end][0] // block_size != page:
            yield page, first, end
            first = end
