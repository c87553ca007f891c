"""PagedKVCache: a memory manager, the bytes of its frames, and the kernels that read them.

    batch = cache.plan([a, b], [1, 5])              frames are mapped, shared tails copied, tables sent to the device
    for layer in range(len(cache)):
        write_kv(k, v, cache[layer], batch[layer])
        out = paged_attention(q, cache[layer], batch[layer])
    cache.commit(batch, token_ids)                  the tokens belong to their sequences: later prompts find them

The cache is a MemoryManager. It inherits the verbs of frames, spaces, pins and tenants, with their laws. This file adds
no rule to core: it keeps bytes and integers in step. It knows which frames are free and which moved; it must not know
how core decides that.

Layers with different windows form groups: a list of KVSpecs, one for each group, and `layer_groups`, the group of each
layer of the model. See core/tables/layer_groups.py.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from pagedkv import debug
from pagedkv.cache import sizes
from pagedkv.cache.batch import NoSuchLayer, PlannedBatch, planned_batch
from pagedkv.cache.devices import device_of
from pagedkv.cache.fixed import FixedBatch
from pagedkv.cache.graph_breaks import breaks_graph
from pagedkv.cache.mirror import DeviceMirror
from pagedkv.cache.poison import Poison
from pagedkv.cache.states import StateSpec, StateStorage
from pagedkv.cache.storage import Storage, groups_of_layers, specs_of
from pagedkv.core import Group, MemoryManager, Places, StatePool
from pagedkv.core.arguments import whole
from pagedkv.core.handles import AddressSpace, Plan
from pagedkv.core.manager import Counts, Spaces
from pagedkv.core.recovery import Assignment
from pagedkv.core.spaces.opening import Salt
from pagedkv.core.state import I32
from pagedkv.errors import InvalidRequest, OutOfFrames, PlanConflict, QuotaExceeded
from pagedkv.kernels import quant, registry
from pagedkv.kernels.args import KVLayer, sides
from pagedkv.kernels.bound import BoundAttention, BoundWrite, bind_attention, bind_write
from pagedkv.kernels.case import Case, Kernel
from pagedkv.kernels.ops import gather_kv
from pagedkv.spec import KVSpec, frames_for
from pagedkv.tiers.fetch import Fetch
from pagedkv.tiers.stack import TierStack
from pagedkv.tiers.tier import Tier
from pagedkv.tiers.write_back import WriteBack

_LOG = logging.getLogger(__name__)

BoundCall = TypeVar("BoundCall", BoundAttention, BoundWrite)


class PagedKVCache(MemoryManager):
    """The KV cache of one model: `cache[layer]` and `batch[layer]` for the kernels, `plan` and `commit` for the loop.

    spec:         the geometry, or a list with that of each layer group. A group gives back frames behind its window
                  (KVSpec.window). A frame is as large as the largest group needs, so groups with equal numbers of
                  layers waste no memory.
    layer_groups: the group of each layer; None: the layers of group 0 come first, then those of group 1, and so on.
    calibration:  for KV of k8v4 or k5v4, a centre and a divisor of K's channels, float32 [layers, K, 2, D]: k5v4 then
                  costs a model less. Tiers never mix pages of two calibrations.
    num_frames:   the size of the pool; or give `memory` to fill: "40GiB", or an int of bytes. Without both, the pool
                  may hold half of the available memory of a CPU, which the system hands out as frames are first
                  written, or three fifths of the free memory of a GPU. There it begins with an eighth, and `plan`
                  doubles it when frames run out, see `limit` and `on_resize`.
    kernels:      a backend's name, or "auto". The choice is made here, once, and shown in the repr.
    tiers:        memory under the pool, the fastest first, for example [HostTier("16GiB")]: see `fetch`.
    write_back:   the pages that the tiers store; None for all, see tiers.WriteBack.
    states:       for a hybrid model, the recurrent state of a sequence. A step then computes from `space.ready` on.
    state_tiers:  memory under the states, as `tiers` for pages: a fetch brings the deepest state and its pages.
    state_memory: frames for states: bytes such as "2GiB", a share of the pool's bytes such as "5%", or their number.
    places:       where states are kept for later prompts, see core.Places; None for its defaults.
    model, rank:  a name for the weights, and the number of this process if several share a model: pages in tiers are
                  found only under equal ones. A disk tier needs a model.
    manager_options: the keyword options of MemoryManager, for example policy="2q".

    `backend` is the argument for the kernels' calls: the backend's name if one was forced, else None. With None a call
    that the chosen kernel objects to (for a soft cap, for example) goes to the next kernel.
    Raises: InvalidRequest if both sizes are given, or the memory cannot be had; KernelUnavailable if the named backend
            objects
    """

    def __init__(
        self,
        spec: KVSpec | Sequence[KVSpec],
        *,
        layer_groups: Sequence[int] | None = None,
        calibration: torch.Tensor | None = None,
        num_frames: int | None = None,
        memory: str | int | None = None,
        device: torch.device | str = "cpu",
        kernels: str = registry.AUTO,
        tiers: Sequence[Tier] = (),
        write_back: WriteBack | None = None,
        states: StateSpec | None = None, state_memory: str | int = "5%", places: Places | None = None,
        state_tiers: Sequence[Tier] = (),
        model: str = "", rank: int = 0,
        **manager_options: Any,
    ) -> None:  # fmt: skip
        specs = specs_of(spec)
        self.layer_groups: tuple[int, ...] = groups_of_layers(specs, layer_groups)
        self.device: torch.device = device_of(device)
        self.specs: tuple[KVSpec, ...]
        self.calibration: torch.Tensor | None
        self.specs, self.calibration = Storage.calibrated(specs, self.layer_groups, calibration, self.device)
        self.spec: KVSpec = self.specs[0]
        frames, self._limit = sizes.pool_sizes(self.specs, num_frames, memory, self.device)
        self._has_size = num_frames is not None or memory is not None
        manager_options.setdefault("groups", [Group(spec.window, spec.sinks, spec.keep) for spec in self.specs])
        self.tiers: TierStack = TierStack(tiers, write_back, state_tiers=state_tiers, model=model, rank=rank)
        self.tiers.require_events(manager_options, frames)
        if not isinstance(states, StateSpec | None) or (states is None and places is not None):
            raise InvalidRequest(f"states is {states!r:.80}, with places {places}; give a StateSpec, or neither")
        if states is not None:
            num_states = states.frames_in(state_memory, frames * max(spec.frame_bytes for spec in self.specs))
            manager_options["states"] = StatePool(num_states, places or Places())
        super().__init__(frames, self.spec.block_size, **manager_options)
        _refuse_other_groups(self.groups, self.specs)
        self.kernel: Kernel = registry.choose(self.spec, str(self.device), kernels)
        forced = kernels not in (None, registry.AUTO) or debug.forced_backend() is not None
        self.backend: str | None = self.kernel.name if forced else None
        # The cache makes the copies itself, so the kernel is called without the checks of `copy_frames`.
        copying = Case("copy_frames", self.device.type, device_index=self.device.index)
        self._copy_frames = registry.resolve(copying, self.backend).load().copy_frames
        self.storage: Storage = self._storage(frames)
        self.state_storage: StateStorage | None = None
        if states is not None:
            self.state_storage = StateStorage(states, num_states, self.device)
        self._resized: list[Callable[[PagedKVCache], object]] = []
        self._bound: WeakKeyDictionary[BoundAttention | BoundWrite, int] = WeakKeyDictionary()
        self._mirror = None if self.device.type == "cpu" else DeviceMirror(self.device)
        self._poison = Poison(self, skips_fresh=not self._has_size)
        storage = self.state_storage
        of_states = None if storage is None else (storage.frames, storage.spec.layers)
        self.tiers.attach(self, self.storage.frames, self.specs, self.layer_groups, of_states)

    def _storage(self, num_frames: int) -> Storage:
        """Return a pool of this many frames."""
        groups = self.layer_groups
        return Storage(self.specs, num_frames, self.device, layer_groups=groups, calibration=self.calibration)

    @property
    def limit(self) -> int:
        """Frames that the pool may grow to on demand: `num_frames`, unless a cache on a GPU was given no size."""
        return max(self._limit, self.num_frames)

    def on_resize(self, callback: Callable[[PagedKVCache], object]) -> None:
        """Call `callback(cache)` after each resize of the pool, on demand or by `resize`.

        For owners of CUDA graphs and of `cache[layer]`: both name the old pool then.
        """
        self._resized.append(callback)

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame, as many as the largest group needs."""
        return self.storage.frame_bytes

    def __getitem__(self, layer: int) -> KVLayer:
        try:
            return self.storage.layers[layer]
        except IndexError:
            raise NoSuchLayer("cache", layer, len(self)) from None

    def __len__(self) -> int:
        return len(self.layer_groups)

    # -- the kernels ---------------------------------------------------------------------------------------------------

    def attention(self, layer: int, **options: Any) -> BoundAttention:
        """Return `bind_attention(cache[layer], **options)` with the kernel of this cache. It follows `resize`.

        The window is that of the layer's KVSpec, unless a narrower one is given. A spec with sinks has no default.
        Raises: InvalidRequest, also for a window wider than that of the spec; KernelUnavailable
        """
        target, held = self[layer], self.specs[self.layer_groups[layer]]
        if held.window is not None and not held.sinks:
            window = options.setdefault("window", held.window)
            seen, _ = sides(window)
            if seen is None or seen > held.window:
                raise InvalidRequest(
                    f"window is {window}, and the pool keeps {held.window} positions of layer {layer} (KVSpec.window); "
                    "leave window out, or give at most that"
                )
        return self._follow(layer, bind_attention(target, **{"backend": self.backend} | options))

    def write(self, layer: int, **options: Any) -> BoundWrite:
        """Return `bind_write(cache[layer], **options)` with the kernel of this cache. It follows `resize`."""
        return self._follow(layer, bind_write(self[layer], **{"backend": self.backend} | options))

    def gather(
        self, layer: int, batch: PlannedBatch, first: torch.Tensor | int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `gather_kv(cache[layer], batch[layer], first)` in the dtype of the model."""
        dtype = quant.DTYPES[self.spec.dtype]
        return gather_kv(self[layer], batch[layer], first, dtype=dtype, backend=self.backend)

    def _follow(self, layer: int, call: BoundCall) -> BoundCall:
        self._bound[call] = layer  # until `call` is collected
        return call

    @breaks_graph
    def fetch(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.integer],
        *,
        tenant: bytes = b"",
        salt: Salt = b"",
        timeout: float | None = None,
        hold: bool = False,
    ) -> Fetch:
        """Begin to load the pages of a prompt that the tiers have and the pool has not, and return at once.

        The pages are found by `open` when `Fetch.done`: all up to the first that could not be loaded and verified.
        Their frames are taken now, and cached pages may be evicted for them.
        timeout: seconds after which the fetch ends with what it has; None for 30.
        hold: keep the pages from eviction until `Fetch.cancel`. A plan that lacks frames takes them after cached ones.
        Raises: InvalidRequest if the ids are not one row of int32 numbers
        """
        return self.tiers.fetch(self, token_ids, tenant, salt, timeout, hold)

    def advise(self, space: AddressSpace | None, action: str, *, until: float | None = None, now: float = 0.0) -> str:
        """See MemoryManager.advise. "prefetch" begins to `fetch` the prompt with which the space was opened.

        It is "missing" if the tiers have no more of the prompt than the pool, and "clipped" if the pool lacks frames.
        """
        answer = super().advise(space, action, until=until, now=now)
        if action != "prefetch" or not self.tiers or space is None:
            return answer
        if (prompt := self._open_prompts.of(space.asid, space.generation)) is None:
            return "missing"
        tenant, salts, ids = prompt
        fetch = self.fetch(ids, tenant=tenant, salt=dict(salts))
        return "clipped" if fetch.lacked else "accepted" if fetch.asked else "missing"

    # -- the step ------------------------------------------------------------------------------------------------------

    def fixed_batch(self, num_sequences: int, max_seqlen_k: int) -> FixedBatch:
        """Allocate tensors at fixed addresses for decode steps: what a CUDA graph of such a step reads.

        num_sequences: sequences with one new token each; a step of fewer is padded.
        max_seqlen_k: the most tokens of a sequence. Raises: InvalidRequest
        """
        whole(num_sequences, "num_sequences", 1)
        whole(max_seqlen_k, "max_seqlen_k", 1)
        return FixedBatch(num_sequences, max_seqlen_k, len(self.specs), self.device, self.states is not None)

    @breaks_graph
    def plan(  # type: ignore[override]
        self, batch: Spaces, counts: Counts, *, into: FixedBatch | None = None, certain: Counts | None = None,
        saves_inside: bool = True,
    ) -> PlannedBatch:  # fmt: skip
        """Map frames for `counts[i]` new tokens of each space, and copy shared tails. See MemoryManager.plan.

        into: tensors of `fixed_batch` for a decode step; None for new ones.
        Modifies: the bytes of copied frames, and of `into`; with PAGEDKV_DEBUG >= 2 the bytes of newly taken frames,
                  which become NaN
        Raises:   OutOfFrames, InvalidRequest, StaleHandle, KernelUnavailable; nothing was changed then
        """
        while True:
            try:
                plan = super().plan(batch, counts, certain=certain, saves_inside=saves_inside)
                break
            except OutOfFrames as lack:
                if not self.tiers.release_for(lack) and (lack.pool == "states" or not self._grow(lack)):
                    raise
        try:
            if into is not None:
                into.check(plan.counts.tolist(), int(plan.seq_lens.max(initial=0)))
            self._poison.fill(self, self.storage)
            if len(plan.splits):
                copies = torch.from_numpy(np.ascontiguousarray(plan.copies)).to(self.device)
                self._copy_frames(self.storage.frames, copies)
            planned = planned_batch(plan, self.layer_groups, self._mirror, self.spec.block_size, into)
            if planned.states is not None and self.state_storage is not None and self._poison.is_on:
                self.state_storage.poison(planned.states.state_out, planned.states.save_frames)
            return planned
        except BaseException:  # the caller has no plan to abort
            super().abort(plan)
            raise

    def copy_states(self, batch: PlannedBatch) -> None:
        """Copy the state of each sequence from state_in to state_out, for kernels that change a state in place.

        Zeros are written for a sequence without a state. Kernels that write another frame need no copy.
        Modifies: the frames of state_out
        """
        if self.state_storage is None or self.states is None:
            raise InvalidRequest("copy_states of a cache without states; make it with states=StateSpec(...)")
        self._require_own(plan := _plan_of(batch, "copy_states"), "copy_states")
        if not plan.is_outstanding or batch.states is None:
            raise PlanConflict("copy_states of a batch that is settled already; call it before commit or abort")
        self.states.count_copies(self.state_storage.copy(batch.states.state_in, batch.states.state_out))

    @breaks_graph
    def commit(  # type: ignore[override]
        self, batch: PlannedBatch, token_ids: Sequence[int] | npt.NDArray[np.integer] | None,
        counts: Counts | None = None, *, keep_planned: bool = False,
    ) -> None:  # fmt: skip
        """Append `token_ids`, whose KV was written at the slots of `batch`; None if you do not know them.

        keep_planned: whether planned tokens beyond `counts` stay planned, or are rolled back. See MemoryManager.commit.
        """
        super().commit(_plan_of(batch, "commit"), token_ids, counts, keep_planned=keep_planned)
        if self.tiers:
            self.tiers.pump()

    @breaks_graph
    def abort(self, batch: PlannedBatch) -> None:  # type: ignore[override]
        """Undo `plan`, whether the kernels of the batch ran or not: every sequence is as long as before.

        `plan` has copied shared tail pages, so each sequence that got a copy keeps it: split tails stay split. This is
        MemoryManager.abort with copied=True.
        """
        super().abort(_plan_of(batch, "abort"), copied=True)

    def forget(self) -> int:
        """Make all computed pages unfindable, those of the tiers too. See MemoryManager.forget."""
        freed = super().forget()
        self.tiers.forget()
        return freed

    # -- the pool ------------------------------------------------------------------------------------------------------

    def frames_for(self, num_tokens: int, at_once: int | None = None) -> int:
        """Return the most frames that a sequence holds until it has `num_tokens` tokens.

        at_once: the most tokens that one plan adds; None: all of them.
        """
        num_tokens = whole(num_tokens, "num_tokens")
        return frames_for(self.specs, num_tokens, num_tokens if at_once is None else at_once)

    @property
    def available(self) -> int:
        """Frames that a plan could take now: free, evictable, held by fetches, or those that the pool may grow by."""
        return super().available + self.tiers.num_held() + self.limit - self.num_frames

    def available_to(self, tenant: bytes = b"") -> int:
        """Return how many frames a plan for spaces of `tenant` alone could take now. See MemoryManager.available_to."""
        return super().available_to(tenant) + self.tiers.num_held(tenant)

    def admits(self, num_frames: int, *, tenant: bytes = b"") -> bool:
        """Return True if a new sequence may take `num_frames` frames and leave `reserve`. See MemoryManager.admits."""
        num_frames = whole(num_frames, "num_frames")
        more = self.limit - self.num_frames + self.tiers.num_held(tenant)
        return (
            super().admits(max(0, num_frames - more), tenant=tenant)
            or num_frames + self.reserve <= super().available_to(tenant) + more  # of which `reserve` stays
        )

    def set_quota(self, tenant: bytes, *, hard: int | None = None, soft: int | None = None, protected: int = 0) -> None:
        """Limit the frames of `tenant`; `spec.frames_in("2GiB")` converts bytes. See MemoryManager.set_quota."""
        super().set_quota(tenant, hard=hard, soft=soft, protected=protected)
        self.tiers.set_quota(tenant, hard)

    def resize(self, num_frames: int) -> None:  # type: ignore[override]
        """Make the pool larger or smaller and keep its contents. Both pools exist meanwhile. See MemoryManager.resize.

        `cache[layer]` is a new view afterwards: fetch it again, and capture CUDA graphs anew (`on_resize` tells you).
        The bound calls of `attention` and `write` serve the new pool. The new size is the `limit` of a pool that was
        given a size; any other pool may grow again, up to `limit`.
        Raises: as MemoryManager.resize, and InvalidRequest if the memory cannot be had; nothing was changed then
        """
        num_frames = whole(num_frames, "num_frames", 1, 2**31)
        storage = self._storage(num_frames)
        self.tiers.require_quiet()

        def move(stayed: npt.NDArray[np.int64], moves: I32) -> list[Assignment]:
            storage.take_over(self.storage, torch.from_numpy(stayed), torch.from_numpy(moves.astype(np.int64)))
            bound = [call.rebinding(storage.layers[layer]) for call, layer in self._bound.items()]
            limit = num_frames if self._has_size else self._limit
            own: list[Assignment] = [
                (self, "storage", storage), (self._poison, "poisoned", None), (self, "_limit", limit)
            ]  # fmt: skip
            return [*own, *self.tiers.resized(storage.frames), *itertools.chain(*bound)]

        super().resize(num_frames, move)
        self._poison.begin(self)
        for callback in self._resized:
            callback(self)

    def resize_states(self, num_frames: int) -> None:  # type: ignore[override]
        """Make the pool of recurrent states larger or smaller and keep its contents. See MemoryManager.resize_states.

        `state_storage` is replaced: read it again, and capture CUDA graphs again.
        """
        old = self.state_storage
        if old is None:
            raise InvalidRequest("resize_states of a cache without states; make it with states=StateSpec(...)")
        storage = StateStorage(old.spec, old.spec.frames_in(num_frames, 0), self.device)
        self.tiers.require_quiet()

        def move(moves: I32) -> list[Assignment]:
            same = min(len(old.frames), len(storage.frames))
            storage.frames[:same] = old.frames[:same]
            source, target = torch.from_numpy(moves.astype(np.int64)).to(self.device).unbind(1)
            storage.frames[target] = old.frames[source]
            return [(self, "state_storage", storage), *self.tiers.resized(storage.frames, of_states=True)]

        super().resize_states(len(storage.frames), move)
        for callback in self._resized:
            callback(self)

    def _grow(self, lack: OutOfFrames) -> bool:
        """Enlarge a pool that may grow, and return whether the plan that lacked frames can be made now.

        A pool does not grow while a plan is outstanding: the caller may hold `cache[layer]` of its step.
        """
        size = sizes.grown(self.num_frames, lack.shortfall, self.limit)
        is_enough = size - self.num_frames >= lack.shortfall and not isinstance(lack, QuotaExceeded)
        if not is_enough or self.has_plans or not self.tiers.lets_grow():
            return False
        before, frame_mib = self.num_frames, self.frame_bytes / 2**20
        try:
            self.resize(size)
        except InvalidRequest as reason:  # another program took the memory
            self._limit = self.num_frames
            _LOG.warning("the pool stays at %d frames: %s", self.num_frames, reason)
            return False
        _LOG.info("the pool has grown from %d to %d frames, %.0f MiB", before, size, size * frame_mib)
        return True

    def __repr__(self) -> str:
        specs, gib = self.spec if len(self.specs) == 1 else list(self.specs), self.storage.bytes.numel() / 2**30
        return (
            f"PagedKVCache({specs}, {gib:.2f} GiB on {self.device}, kernels={self.kernel.name!r}, {super().__repr__()})"
        )


def _refuse_other_groups(groups: Sequence[Group], specs: Sequence[KVSpec]) -> None:
    """Raise InvalidRequest unless the manager's groups are those of the specs."""
    if len(groups) != len(specs):
        raise InvalidRequest(f"{len(groups)} groups and {len(specs)} specs; give a KVSpec for each group")
    windows, spec_windows = [group.window for group in groups], [spec.window for spec in specs]
    kept, spec_kept = [(group.keep, group.sinks) for group in groups], [(spec.keep, spec.sinks) for spec in specs]
    if (windows, kept) != (spec_windows, spec_kept):
        raise InvalidRequest(
            f"groups have windows {windows} with (keep, sinks) {kept}, their specs {spec_windows} and {spec_kept}; "
            "give each Group the window, the keep and the sinks of its KVSpec"
        )


def _plan_of(batch: PlannedBatch, verb: str) -> Plan:
    if not isinstance(batch, PlannedBatch):
        raise InvalidRequest(f"{verb} of {batch!r}; give the batch that plan() of this cache returned")
    return batch.plan
