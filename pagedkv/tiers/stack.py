"""The stack of tiers of one cache: pages go down when they are published, and come up when a prompt asks for them.

    commit ─▶ pump ─▶ pages published since the last pump ─▶ backlog of each tier ─▶ STORE      (write_back.py)
    fetch  ─▶ keys of the prompt ─▶ lookup, tier by tier ─▶ plan ─▶ LOAD ─▶ commit, release     (fetch.py)

`pump` does what is due and waits for nothing: it reads the events of the manager, polls the tiers, settles the fetches
that have ended and submits what the backlogs hold. The cache calls it after each commit; `Fetch.done` calls it, too.
Each part can be repeated, so a pump that was interrupted is made whole by the next.

A page is stored when it is published and not when it is evicted: an eviction happens inside `plan`, which must not
wait. When the pool evicts a page, the tiers count a use of it. So the order in which a tier evicts is that of a tier
that got the pages by eviction.

One thread at a time calls a stack, as it does the manager.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import numpy as np

from pagedkv.core.arguments import flag, real, tenant_name, token_row, whole
from pagedkv.core.thread_guard import ThreadGuard, exclusive
from pagedkv.errors import InvalidRequest, OutOfFrames, QuotaExceeded
from pagedkv.tiers.fetch import Cache, Fetch, Loader
from pagedkv.tiers.level import Level
from pagedkv.tiers.pool_view import PoolView
from pagedkv.tiers.tier import CLOSING, Key, Op, Tier, TierStats
from pagedkv.tiers.tier_names import Namer, fingerprint, states_fingerprint
from pagedkv.tiers.write_back import WriteBack

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from pagedkv.core.manager import MemoryManager
    from pagedkv.core.state import I64
    from pagedkv.spec import KVSpec

PAUSE: Final = 0.0002
"""Seconds between two looks at tiers that are waited for."""
DEADLINE: Final = 30.0
"""Seconds that a fetch, or a wait for tiers, may take by default."""
PATIENCE: Final = 0.5
"""Seconds in which the threads of a closed tier end that have nothing to do."""
GROWTH: Final = 1.0
"""Seconds that a plan waits for tiers before the pool grows."""


class _Owner:
    """The manager of a stack, which is the cache that owns the stack. A call returns it."""

    def __call__(self) -> MemoryManager:
        manager = self._manager()
        assert manager is not None, "a stack without tiers outlives its cache"
        return manager

    def keep(self, manager: MemoryManager, *, lasts: bool) -> None:
        """Return `manager` from now on.

        lasts: whether the stack keeps the manager alive, as its tiers need it until they are closed. Without tiers the
               memory of a cache that is dropped is given back at once.
        """
        self._kept, self._manager = manager if lasts else None, ref(manager)

    def let_go(self) -> None:
        """Keep the manager alive no longer."""
        self._kept = None


def _require_tiers(tiers: object, argument: str) -> None:
    """Raise InvalidRequest unless `tiers` is a list of tiers."""
    if isinstance(tiers, str | bytes) or not isinstance(tiers, Sequence):
        kind = type(tiers).__name__  # its value may hold the password of a URL
        raise InvalidRequest(f"{argument} is a {kind}; give a list, such as [HostTier('16GiB')]")
    for tier in tiers:
        if not isinstance(tier, Tier):
            raise InvalidRequest(
                f"a {type(tier).__name__} is no tier; give HostTier, DiskTier, or a subclass of pagedkv.tiers.Tier"
            )


class TierStack(ThreadGuard):
    """The tiers of one cache, the fastest first. `cache.tiers` is its public side.

    state_tiers, model, rank: see PagedKVCache.
    """

    def __init__(
        self, tiers: Sequence[Tier], write_back: WriteBack | None = None, *, state_tiers: Sequence[Tier] = (),
        model: str = "", rank: int = 0,
    ) -> None:  # fmt: skip
        _require_tiers(tiers, "tiers")
        _require_tiers(state_tiers, "state_tiers")
        if not isinstance(model, str):
            raise InvalidRequest(f"model is {model!r}; give a text that names the weights, such as their digest")
        self._levels: list[Level] = [Level(tier) for tier in tiers]
        self._levels += [Level(tier, of_states=True) for tier in state_tiers]
        for tier in state_tiers:
            tier.name = f"{tier.name}-states"
        tiers = [*tiers, *state_tiers]
        if not model and (lasting := [tier.name for tier in tiers if tier.is_lasting]):
            raise InvalidRequest(
                f"the {lasting[0]} tier keeps pages for other processes, and the cache has no name for its weights; "
                "give model=, such as the digest of the checkpoint"
            )
        is_rule = not isinstance(write_back, type) and callable(getattr(write_back, "stores", None))
        if write_back is not None and not is_rule:
            raise InvalidRequest(f"write_back is {write_back!r}; give an object with `stores`, such as UsedAgain()")
        names = [tier.name for tier in tiers]
        for number, tier in enumerate(tiers):
            if names[:number].count(names[number]):
                tier.name = f"{tier.name}-{names[:number].count(names[number]) + 1}"
        self._model, self._rank = model, whole(rank, "rank")
        self._write_back = write_back
        self._quotas: dict[bytes, int | None] = {}
        self._is_closed = False
        self._since: int | None = 0  # the last event seen; None: look at all pages that are published
        self._stamps: I64 = np.zeros(0, np.int64)  # of the states seen: see MemoryManager.new_checkpoints
        self._mark: tuple[int, ...] = ()  # at that time
        self._manager = _Owner()
        self._loader: Loader = Loader(self._manager, self._levels)
        self._begin_guard(strict=False)

    def require_events(self, manager_options: dict[str, Any], num_frames: int) -> None:
        """Let the manager keep events, if there are tiers: they learn from events which pages come and go."""
        if self._levels:
            events = whole(manager_options.get("events", 0), "events", 0, 2**31)
            manager_options["events"] = max(events, 4 * num_frames, 4096)

    def attach(
        self, manager: MemoryManager, frames: torch.Tensor, specs: Sequence[KVSpec], layer_groups: Sequence[int],
        states: tuple[torch.Tensor, Sequence[Mapping[str, Any]]] | None = None,
    ) -> None:  # fmt: skip
        """Serve `frames` (uint8 [F, frame_bytes]), which `manager` hands out.

        states: for the state tiers, the frames of recurrent states (uint8 [N, bytes]), and the layers of their spec.
        Raises: InvalidRequest for state tiers without states; any error of a tier; the tiers before it are closed then
        """
        if states is None and self._levels_of(of_states=True):
            raise InvalidRequest("state_tiers of a cache without states; give states=StateSpec(...), or leave them out")
        of = self._manager  # a pool that refers to the stack would keep a dropped cache in memory
        of.keep(manager, lasts=bool(self._levels))
        self.pool: PoolView = PoolView(frames, lambda: of().frame_views()[:2])
        facts = fingerprint(specs, layer_groups, frames.shape[1], model=self._model, rank=self._rank)
        of_states = b"" if states is None else states_fingerprint(facts, states[1])
        self._namer = Namer(facts, len(specs), of_states)
        begun: list[Tier] = []
        try:
            for level in self._levels:
                level.pool = self.pool
                if level.of_states and states is not None:
                    level.pool = PoolView(states[0], lambda: of().frame_views(of_states=True)[:2])
                level.tier.register(level.pool, of_states if level.of_states else facts)
                begun.append(level.tier)
                level.backlog = deque(maxlen=2 * len(level.pool.frames))
        except BaseException:
            of.let_go()
            for tier in begun:
                tier.close(0.0)
            raise

    def resized(self, frames: torch.Tensor, *, of_states: bool = False) -> list[tuple[object, str, object]]:
        """Return the attributes that change with a pool, which has `frames` (uint8 [F, frame_bytes]) from then on."""
        changes: list[tuple[object, str, object]] = [(self.pool, "frames", frames), (self, "_since", None)]
        if of_states:
            changes = [(self, "_stamps", np.zeros(0, np.int64)), (self, "_mark", ())]
        for level in self._levels_of(of_states=of_states):
            changes += [(level, "backlog", deque(maxlen=2 * len(frames))), (level.pool, "frames", frames)]
        return changes

    @property
    def tiers(self) -> list[Tier]:
        """The tiers, the fastest first."""
        return [level.tier for level in self._levels]

    def _levels_of(self, *, of_states: bool) -> list[Level]:
        return [level for level in self._levels if level.of_states == of_states]

    def __len__(self) -> int:
        return len(self._levels)

    # -- down ----------------------------------------------------------------------------------------------------------

    @exclusive
    def pump(self, wait: float = 0.0) -> None:
        """Do what is due. wait: seconds to sleep first, if bytes are under way."""
        self._pump(wait)

    def _pump(self, wait: float) -> None:
        if not self._levels:
            return
        if wait and self.num_pending:
            time.sleep(wait)
        if self._manager().last_event != self._since:
            self._take_changes()
        if self._levels[-1].of_states and (mark := self._manager().states_mark()) != self._mark:
            self._take_states()
            self._mark = mark
        if self._loader.fetches or self._loader.waiting or self._loader.holds or self.num_pending:
            self._loader.poll()
        for level in self._levels:
            if level.backlog:
                self._store(level)
        self._drop_levels()

    def _take_changes(self) -> None:
        """Put the pages that were published into the backlogs, and count a use of those that the pool evicted."""
        if self._since is None:  # the pool has another size now
            for tenant, hard in self._quotas.items():
                self._set_quota(tenant, hard)
        changes = self._manager().page_changes(self._since)
        removed = [self._namer.key(page.digest, page.tenant, page.group) for page in changes.removed]
        uses = self._manager().frame_views().uses
        for frame, page in changes.stored:
            if self._write_back is None or self._write_back.stores(uses=int(uses[frame]), tenant=page.tenant):
                entry = frame, self.pool.stamp(frame), self._namer.key(page.digest, page.tenant, page.group)
                for level in self._levels_of(of_states=False):
                    level.backlog.append(entry)
        for level in self._levels_of(of_states=False):
            level.touch(removed)
        self._since = changes.sequence

    def _take_states(self) -> None:
        """Put the recurrent states that were kept into the backlogs of their tiers."""
        manager = self._manager()
        views, uses = manager.frame_views(of_states=True), manager.frame_views().uses
        seen = self._stamps if len(self._stamps) == len(views.uses) else np.full(len(views.uses), -1)
        stamps, fresh = manager.new_checkpoints(seen)
        for frame, page, name in fresh:  # a state has been used as often as its page
            if self._write_back is None or self._write_back.stores(uses=int(uses[page]), tenant=name.tenant):
                entry = frame, int(stamps[frame]), self._namer.state_key(name.digest, name.tenant)
                for level in self._levels_of(of_states=True):
                    level.backlog.append(entry)
        self._stamps = stamps

    def _store(self, level: Level) -> None:
        """Submit the first pages of a backlog that are in the pool still."""
        frames, keys, most = list[int](), list[Key](), level.max_stores
        while level.backlog and len(frames) < most:
            frame, stamp, key = level.backlog.popleft()
            if level.pool.holds(frame, stamp):
                frames.append(frame)
                keys.append(key)
        if frames:
            level.submit(Op.STORE, keys, frames)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the pages published so far are stored, at most `timeout` seconds. Return whether they are.

        A tier that is skipped because it fails is not waited for.
        """
        return self._flush(self._levels, timeout)

    def _flush(self, levels: Sequence[Level], timeout: float | None) -> bool:
        until = None if timeout is None else time.monotonic() + real(timeout, "timeout")
        while True:
            self.pump(PAUSE)
            if not any(level.is_open and (level.num_pending or level.backlog) for level in levels):
                return not any(level.num_pending or level.backlog for level in levels)
            if until is not None and time.monotonic() >= until:
                return False

    # -- up ------------------------------------------------------------------------------------------------------------

    @exclusive
    def fetch(
        self, cache: Cache, token_ids: Sequence[int] | npt.NDArray[np.integer], tenant: bytes,
        salt: bytes | Mapping[int, bytes], timeout: float | None, hold: bool = False,
    ) -> Fetch:  # fmt: skip
        """See PagedKVCache.fetch."""
        ids, tenant = token_row(token_ids), tenant_name(tenant)
        seconds = DEADLINE if timeout is None else real(timeout, "timeout")
        fetch = Fetch(ids, self.pump, time.monotonic() + seconds)
        fetch.holds = flag(hold, "hold")
        self._loader.begin(cache, fetch, self._namer, tenant=tenant, salt=salt)
        return fetch

    # -- the rest ------------------------------------------------------------------------------------------------------

    @property
    def num_fetches(self) -> int:
        """Fetches that load into frames of the pool."""
        return len(self._loader.fetches)

    @property
    def num_holds(self) -> int:
        """Fetches that are done and hold their pages."""
        return len(self._loader.holds)

    def num_held(self, tenant: bytes | None = None) -> int:
        """Return how many frames a plan may take from fetches that hold their pages.

        tenant: the tenant of the plan; None for any. If tenants have quotas, only its own frames are counted: how many
            of the others it may take is decided by the rules of quotas.
        """
        return self._loader.holds.num_frames(tenant if self._quotas else None)

    def release_for(self, lack: OutOfFrames) -> bool:
        """Release the pages that were held last, as a plan lacks frames. Return whether that may help.

        At a quota only pages of that tenant are released.
        """
        if not self.num_holds or self._is_called:  # a fetch that plans takes no frames from others
            return False
        return self._release_newest(lack.tenant if isinstance(lack, QuotaExceeded) else None)

    @exclusive
    def _release_newest(self, tenant: bytes | None) -> bool:
        return self._loader.holds.release_newest(tenant)

    @exclusive
    def release_holds(self) -> None:
        """Hold no pages any more, nor those of fetches under way: their owner has lost them."""
        for fetch in (*self._loader.fetches, *self._loader.waiting):
            fetch.holds = False
        for fetch in self._loader.holds:
            self._loader.holds.release(fetch)

    @property
    def num_pending(self) -> int:
        """Pages that a tier is reading or writing, or has not reported."""
        return sum(level.num_pending for level in self._levels)

    def stats(self) -> dict[str, TierStats]:
        """Return the counters of each tier, by its name."""
        return {level.tier.name: level.tier.stats() for level in self._levels}

    @exclusive
    def set_quota(self, tenant: bytes, hard: int | None) -> None:
        """Let `tenant` hold the share of each tier that its hard quota, in frames, is of the pool."""
        self._quotas[tenant] = hard
        self._set_quota(tenant, hard)

    def _set_quota(self, tenant: bytes, hard: int | None) -> None:
        for level in self._levels:
            level.set_quota(tenant, None if hard is None else min(1.0, hard / self._manager().num_frames))

    @exclusive
    def abandon(self, timeout: float) -> bool:
        """End the fetch that began last, of those whose end was not asked for. Pages that have arrived stay.

        timeout: the most seconds to wait. Return whether a fetch gave its frames back; `pump` gives others back later.
        """
        before, until = self.num_fetches, time.monotonic() + timeout
        newest = next((fetch for fetch in reversed(self._loader.fetches) if not fetch.is_given_up), None)
        if newest is not None:
            newest.give_up()
        return before > 0 and self._polled(lambda: self.num_fetches < before, until)

    def _polled(self, has_ended: Callable[[], bool], until: float) -> bool:
        """Poll the tiers until `has_ended`, or until a time. Return whether it has."""
        while True:
            self._loader.poll()
            if has_ended():
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(PAUSE)

    @exclusive
    def quiesce(self, timeout: float = DEADLINE) -> bool:
        """End all fetches, and wait until no tier reads or writes a frame, at most `timeout` seconds.

        Return whether none does. The pages that wait to be stored are stored later.
        """
        until = time.monotonic() + real(timeout, "timeout")
        loader = self._loader
        loader.give_up()
        has_no_fetch = self._polled(lambda: not (loader.fetches or loader.waiting or loader.holds), until)
        return has_no_fetch and self._polled(lambda: not self.num_pending, until)

    def require_quiet(self) -> None:
        """Quiesce before the frames move. Raises: InvalidRequest if a tier hangs"""
        if not self.quiesce():
            raise InvalidRequest(
                f"cannot move the frames of the pool: a tier hangs, and may read or write {self.num_pending} of them; "
                "resize again when it has ended"
            )

    def lets_grow(self) -> bool:
        """Quiesce, for a moment at most, before a plan makes the pool larger. Return whether it may.

        A fetch takes no more frames than the pool has, and a tier that hangs delays no plan.
        """
        return not self._levels or (not self._is_called and self.quiesce(GROWTH))

    @property
    def _is_called(self) -> bool:
        """Whether this thread is inside a call of the stack, such as `fetch`, which plans."""
        return any(call[0] == threading.get_ident() for call in self._calls.values())

    @exclusive
    def forget(self) -> None:
        """Drop all pages of all tiers. The manager has forgotten its own.

        Pages get other names from now on, so a tier that cannot drop its pages now has none that is found.
        """
        self._namer = self._namer.renamed()
        self._loader.give_up(keep=False)
        for level in self._levels:
            level.forget()
        self._loader.poll()
        self._since = self._manager().last_event

    def close(self, timeout: float = DEADLINE) -> bool:
        """Store what waits for a lasting tier, end all fetches, and close the tiers. A disk keeps its pages.

        timeout: about the most seconds that this takes. Return whether all was stored and no tier hangs.
        """
        until = time.monotonic() + real(timeout, "timeout")
        is_stored = self._flush([level for level in self._levels if level.tier.is_lasting], timeout)
        for level in self._levels:
            level.cancel()
        is_quiet = self.quiesce(max(0.0, until - time.monotonic()))
        for level in self._levels:
            level.close(max(min(CLOSING, timeout), until - time.monotonic()))
        self._is_closed = True
        self._drop_levels()
        return is_stored and is_quiet

    def _drop_levels(self) -> None:
        """Drop the tiers after `close`. A tier that hangs stays until its jobs end: then its frames are given back."""
        if self._is_closed and not self.num_pending and not self.num_fetches:
            for level in self._levels:
                level.close(PATIENCE)
            self._levels.clear()
            self._manager.let_go()
