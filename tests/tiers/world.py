"""A cache whose frames hold what they must: the bytes of a page are a function of all that its identity covers.

So a page that was lost, torn, mixed up or stale shows when a prompt maps it, whichever way it took through the tiers.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from pagedkv import AddressSpace, KVSpec, PagedKVCache
from pagedkv.core.handles import StateStep
from pagedkv.tiers import HostTier, Tier
from pagedkv.tiers.slots import Move

SIZE = 4
SPEC = KVSpec(1, 1, 16, block_size=SIZE, dtype="float32")
IDS = list(range(41))
PAGES = len(IDS) // SIZE


def content(prefix: Sequence[int], tenant: bytes, salt: bytes, group: int, num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes]: the bytes of the last page of `prefix`."""
    seed = hashlib.sha256(repr((list(prefix), tenant, salt, group)).encode()).digest()
    return np.tile(np.frombuffer(seed, np.uint8), num_bytes // 32 + 1)[:num_bytes]


class World:
    """A cache, the prompts that run on it, and the checks of what they find. computed: tokens that were not found."""

    made: ClassVar[list[World]] = []

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache, self.computed = cache, 0
        self.made.append(self)

    def run(self, ids: Sequence[int], tenant: bytes = b"", salt: bytes = b"") -> int:
        """Compute a prompt as an engine does: check what is known, store the rest. Return how many were known."""
        space = self.cache.open(ids, tenant=tenant, salt=salt)
        known = len(space)
        self.check_pages(space, ids[:known], tenant, salt)
        ready = known if self.cache.states is None else space.ready
        try:
            batch = self.cache.plan([space], [len(ids) - ready])
            if batch.states is not None:
                self.fill_states(batch.plan.states, ready, (ids, tenant, salt))
            for group in range(len(self.cache.specs)):
                pages = space.pages_in(group)
                for page in range(known // SIZE, len(ids) // SIZE):
                    if pages[page] >= 0:
                        self.fill(int(pages[page]), ids[: (page + 1) * SIZE], tenant, salt, group)
            self.cache.commit(batch, ids[ready:])
        finally:
            space.release()
        self.computed += len(ids) - ready
        return known

    def store(self, ids: Sequence[int], tenant: bytes = b"") -> int:
        """Compute a prompt, and wait until the tiers have stored its pages. Return how many tokens were known."""
        known = self.run(ids, tenant)
        assert self.cache.tiers.flush(300)
        return known

    def fetched(self, ids: Sequence[int], tenant: bytes = b"") -> int:
        """Fetch a prompt, and check the bytes of all that it finds then. Return how many tokens were found."""
        known, fetch = self.cache.lookup(ids, tenant=tenant), self.cache.fetch(ids, tenant=tenant)
        assert fetch.wait(300)
        found = self.check_found(ids, tenant)
        assert found == known + fetch.tokens
        return found

    def fill(self, frame: int, prefix: Sequence[int], tenant: bytes, salt: bytes, group: int) -> None:
        expected = content(prefix, tenant, salt, group, self.cache.frame_bytes)
        self.cache.storage.frames[frame] = torch.from_numpy(expected)

    def fill_states(self, states: StateStep, ready: int, prompt: tuple[Sequence[int], bytes, bytes]) -> None:
        """Write the recurrent states of a step from `ready` on."""
        ids, tenant, salt = prompt
        ends = dict(zip(states.save_frames.tolist(), (ready + states.save_offsets).tolist(), strict=True))
        for frame, end in {**ends, int(states.state_out[0]): len(ids)}.items():
            expected = content(ids[:end], tenant, salt, -1, self.cache.state_storage.spec.frame_bytes)
            self.cache.state_storage.frames[frame] = torch.from_numpy(expected)

    def check_state(self, space: AddressSpace, known: Sequence[int], tenant: bytes, salt: bytes) -> None:
        if self.cache.states is not None and space.ready:
            held = self.cache.state_storage.frames[int(self.cache.states.held.rows["state"][space.asid])].numpy()
            assert (held == content(known[: space.ready], tenant, salt, -1, len(held))).all(), "another state"

    def check_pages(self, space: AddressSpace, known: Sequence[int], tenant: bytes, salt: bytes) -> None:
        for group in range(len(self.cache.specs)):
            for page, frame in enumerate(space.pages_in(group).tolist()[: len(known) // SIZE]):
                if frame >= 0:
                    held = self.cache.storage.frames[frame].numpy()
                    expected = content(known[: (page + 1) * SIZE], tenant, salt, group, self.cache.frame_bytes)
                    assert (held == expected).all(), f"page {page} of group {group} holds other bytes"
        self.check_state(space, known, tenant, salt)

    def check_found(self, ids: Sequence[int], tenant: bytes = b"", salt: bytes = b"") -> int:
        """Check the bytes of all that a prompt finds. Return the tokens that were found."""
        space = self.cache.open(ids, tenant=tenant, salt=salt)
        try:
            self.check_pages(space, ids[: len(space)], tenant, salt)
            return len(space)
        finally:
            space.release()


def close_all() -> None:
    """Close the tiers of all worlds that were made since the last call."""
    while World.made:
        World.made.pop().cache.tiers.close()


def evicted(*tiers: Tier, num_frames: int = 16) -> World:
    """Return a world whose pool has evicted IDS, and whose tiers have stored them."""
    world = World(PagedKVCache(SPEC, model="m", num_frames=num_frames, tiers=tiers))
    world.store(IDS)
    world.cache.evict(num_frames)
    return world


class Stubborn(HostTier):
    """A host tier whose loads wait for `may_load`, or raise `fault`. is_loading: set when one waits."""

    def __init__(self, size: str, fault: Exception | None = None) -> None:
        super().__init__(size)
        self.may_load, self.fault = threading.Event(), fault
        self.is_loading = threading.Event()

    def _load(self, moves: Sequence[Move]) -> None:
        self.is_loading.set()
        self.may_load.wait(300)  # a test sets it; the machine may be busy
        if self.fault:
            raise self.fault
        super()._load(moves)
