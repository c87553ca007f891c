"""Pool: the frames that the paged caches of one model share, and the lock under which they change.

The frames are made when the shapes of K and V are known: from the model, or from the first tensors that a cache gets.
A batch that was dropped without `close` is given back by the next call that opens one.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Protocol

import torch

from pagedkv import KVLayer, KVSpec, PagedBatch, PagedKVCache, StateSpec, paged_attention
from pagedkv.core import Stats
from pagedkv.errors import InvalidRequest, OutOfFrames
from pagedkv.integrations.transformers.geometry import Geometry, Shapes, shapes_of
from pagedkv.integrations.transformers.identity import fingerprint
from pagedkv.integrations.transformers.state_layers import StepStates
from pagedkv.integrations.transformers.step import Holdings
from pagedkv.tiers import Fetch, Tier, tiers_of

PAUSE: Final = 0.0005
"""Seconds between two looks at pages on their way from tiers."""


_BARE_FRAMES: Final = 1 << 16
"""Pages of a model without K and V: those of a million tokens, 64 MiB."""

_HISTORY: Final = 2**16  # tokens of past prompts that a receipt compares with a prompt, 4 MiB

_LEAST_STATES: Final = 16
"""States of a pool whose caller names memory for K and V alone: 8 rows can run, or 6 with states to go on from."""


class _Member(Protocol):
    """A cache of the pool, see cache.PagedCache."""

    holdings: Holdings

    def settle_ended(self) -> None:
        """Commit the step if its forward pass has ended. Another thread may be in one that has not."""

    def reset(self) -> None:
        """Give everything back."""


class Pool:
    """Frames for the K and V of one model. Threads may share it.

    config:       the model's config.
    memory:       "8GiB", or an int of bytes. None: up to half of the available memory of a CPU, which the system hands
                  out as pages are first written; or up to three fifths of the free memory of a GPU, by and by.
    num_frames:   the same in frames: pages of one layer group.
    kv_dtype:     kind of the stored K and V: "fp8_e4m3", "fp8_e5m2", "int8", "k8v4" or "k5v4"; None for the model's
                  dtype.
    calibration:  statistics of K's channels for k8v4 and k5v4, see PagedKVCache.
    block_size:   tokens of a page.
    prefix_cache: whether equal prefixes of prompts are computed once. The pages of a finished batch stay until their
                  frames are needed.
    tiers:        memory under the frames, the fastest first: ["host:16GiB", "disk:200GiB:FOLDER"], see pagedkv.tiers.
                  Prompts find pages there that the frames hold no more, or that a process before has computed.
    state_memory: memory for the recurrent states of a hybrid model, beside the pages: "2GiB", a share of the pages such
                  as "10%", or a number of states. A row that runs holds two, and prompts go on from the others. None
                  for "5%", but 16 at least; or for all of `memory`, if no layer has K and V.
    weights:      a name for all that decides K and V of a token, such as the digest of the checkpoint. A tier that
                  outlives the process needs it: its pages are found under the same name alone.
    Raises: InvalidRequest for a model that pages cannot serve
    """

    def __init__(
        self,
        config: Any,
        *,
        memory: str | int | None = None,
        num_frames: int | None = None,
        kv_dtype: str | None = None,
        calibration: torch.Tensor | None = None,
        block_size: int = 16,
        prefix_cache: bool = True,
        tiers: Sequence[Tier | str] = (),
        state_memory: str | int | None = None,
        weights: str = "",
        **unserved: Any,
    ) -> None:
        if unserved:
            raise InvalidRequest(_unserved(sorted(unserved)))
        if not isinstance(prefix_cache, bool):
            raise InvalidRequest(f"prefix_cache is {prefix_cache!r}; give True or False")
        self.config = config
        self.geometry: Geometry = Geometry.of(config)
        self.lock: Any = threading.RLock()
        least = KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=block_size)
        if memory is not None:
            least.frames_in(memory)  # raises for what is no amount
        self._size: dict[str, Any] = {"memory": memory, "num_frames": num_frames}
        self._state_memory = state_memory
        self._kv_dtype, self._calibration, self._block_size = kv_dtype, calibration, block_size
        self._prefix_cache = prefix_cache and self.geometry.reusable
        self._tiers: dict[str, Any] = {"tiers": tiers_of(tiers), "model": weights}
        self._require_prefixes()
        self._kv: PagedKVCache | None = None
        self._places = {layer: place for place, layer in enumerate(self.geometry.cached)}
        self.state_places: dict[int, int] = {}
        self._caches: weakref.WeakSet[_Member] = weakref.WeakSet()
        self._dropped: deque[Holdings] = deque()
        self._calls: dict[Any, Any] = {}  # bound to the frames
        self._fingerprint: tuple[object, ...] | None = None
        self._model: weakref.ref[Any] | None = None
        self._is_closed = False

    def _require_prefixes(self) -> None:
        """Raise InvalidRequest for tiers that no prompt would find a page in."""
        tiers = self._tiers["tiers"]
        if tiers and not self._prefix_cache:
            raise InvalidRequest("tiers keep pages that prompts share, and prompts of this pool share none")
        if any(tier.is_lasting for tier in tiers) and not self._tiers["model"]:
            raise InvalidRequest("a tier outlives the process; give weights=, such as the digest of the checkpoint")

    @classmethod
    def for_model(cls, model: Any, **options: Any) -> Pool:
        """Return a pool for the shapes and the device of `model`, which computes one token to show them."""
        pool = cls(model.config, **options)
        pool.claim(model)
        pool.fit(shapes_of(model, pool.geometry), model.device)
        return pool

    def claim(self, model: Any) -> None:
        """Note that the pages are those of `model`. Raises: InvalidRequest if they are those of another model."""
        if self._model is None:
            if Geometry.of(model.config) != self.geometry:
                raise InvalidRequest("the pool was made for another config; make it with Pool.for_model(model)")
            self._model = weakref.ref(model)
        elif self._model() is not model:
            raise InvalidRequest("the pool holds pages of another model; make a pool for each model")

    def fit(self, shapes: Shapes, device: torch.device) -> None:
        """Make the frames for K, V and states of these shapes. A pool that has frames keeps them."""
        with self.lock:
            if self._is_closed:
                raise InvalidRequest("the pool is closed; make a new one, or patch the model again")
            if self._kv is None:
                specs, groups = self.geometry.specs(shapes.kv, self._block_size, self._kv_dtype)
                states = shapes.state_spec()
                self.state_places = {layer: place for place, layer in enumerate(shapes.states)}
                size = self._size_of(specs, states) if states else self._size
                with torch.inference_mode(False):  # else the frames could be written in inference mode alone
                    self._kv = PagedKVCache(
                        specs, layer_groups=groups, device=device, prefix_cache=self._prefix_cache, history=_HISTORY,
                        calibration=self._calibration, states=states, **size, **self._tiers,
                    )  # fmt: skip
                self._kv.disown()  # the lock of the pool orders the calls of threads
                if self._tiers["tiers"]:
                    self.forget_others()  # pages are there before the first call: note the weights that they are of

    def _size_of(self, specs: list[KVSpec], states: StateSpec) -> dict[str, Any]:
        """Return the sizes for a model with states. Without K and V all memory is theirs: pages hold tokens alone."""
        memory, frames, largest = *self._size.values(), max(specs, key=lambda spec: spec.frame_bytes)
        num_frames = frames if memory is None else largest.frames_in(memory)
        num_states = (num_frames or 0) * largest.frame_bytes // states.frame_bytes
        if not self.geometry.cached:
            count = self._state_memory or max(_LEAST_STATES, num_states)
            return {"num_frames": frames or _BARE_FRAMES, "state_memory": count}
        default = max(_LEAST_STATES, num_states // 20) if num_frames else "5%"
        return self._size | {"state_memory": self._state_memory or default}

    @property
    def is_ready(self) -> bool:
        """Whether the frames have been made."""
        return self._kv is not None

    @property
    def kv(self) -> PagedKVCache:
        """The cache of pages. Raises: InvalidRequest before the shapes are known, and after `close`."""
        if self._kv is None:
            reason = "it is closed" if self._is_closed else "no tokens were computed yet"
            raise InvalidRequest(f"the pool has no frames: {reason}; use Pool.for_model(model)")
        return self._kv

    def place(self, layer: int) -> int:
        """Return the number in `kv` of a layer of the model."""
        return self._places[layer]

    def write(self, layer: int) -> Any:
        """Return the bound call that stores K and V of a layer of the model, see PagedKVCache.write."""
        if layer not in self._calls:
            self._calls[layer] = self.kv.write(self.place(layer))
        return self._calls[layer]

    @property
    def has_states(self) -> bool:
        """Whether layers have a recurrent state. A step then computes from `space.ready` on."""
        return bool(self.state_places)

    def states_of(self, batch: Any) -> StepStates | None:
        """Return the states of a step, or None if no layer has one."""
        storage = self.kv.state_storage
        return None if storage is None else StepStates(storage.layers, self.state_places, batch)

    def attention(self, layer: int, scale: float | None, softcap: float, sinks: torch.Tensor | None) -> Any:
        """Return the bound call that attends to the pages of a layer of the model, see PagedKVCache.attention."""
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "window": self.geometry.windows[layer]}
        if sinks is not None:  # a parameter, which may change
            return partial(_attend_with_sinks, self.kv[self.place(layer)], options | {"sinks": sinks})
        key = (layer, scale, softcap)
        if key not in self._calls:
            self._calls[key] = self.kv.attention(self.place(layer), **options)
        return self._calls[key]

    @property
    def finds_prefixes(self) -> bool:
        """Whether prompts find pages that were computed before."""
        return self._prefix_cache

    @property
    def model(self) -> Any:
        """The model whose pages these are, or None if no model has claimed the pool."""
        return None if self._model is None else self._model()

    def forget_others(self) -> None:
        """Forget the pages that other weights of the model have computed, or its layers with other hooks."""
        if self.model is not None and self.finds_prefixes:
            now = fingerprint(self.model)
            with self.lock:
                if self._fingerprint not in (None, now):
                    self.forget()
                self._fingerprint = now

    def stats(self) -> Stats:
        """Return the counters of the pool, see MemoryManager.stats."""
        with self.lock:
            return self.kv.stats()

    def forget(self) -> int:
        """Let no prompt find what was computed before; return how many frames that freed. To be called if the model
        changed in a way that generate() does not notice: a few elements of weights, set through `parameter.data`, or
        what a hook of a module does.
        """
        with self.lock:
            self.sweep()
            return self._kv.forget() if self._kv is not None else 0

    def close(self) -> None:
        """Give the memory back. The caches of the pool lose their tokens, and can be used no more.

        Pages that wait for a tier that outlives the process are stored before, for 30 s at most.
        """
        with self.lock:
            for cache in list(self._caches):
                cache.reset()
            self.sweep()
            if self._kv is not None:
                self._kv.tiers.close()
            self._calls.clear()
            self._kv, self._is_closed = None, True

    def __repr__(self) -> str:
        return f"Pool({self._kv if self._kv is not None else self.config.model_type})"

    # -- for PagedCache ------------------------------------------------------------------------------------------------

    def add(self, cache: _Member, holdings: Holdings) -> None:
        """Note a cache of this pool. Its holdings are given back when it is collected."""
        self._caches.add(cache)
        weakref.finalize(cache, self._dropped.append, holdings)

    def sweep(self) -> None:
        """Give back the holdings of caches that were collected."""
        while self._dropped:
            self._dropped.popleft().release(self._kv)

    def fetch(self, rows: Sequence[Sequence[int]], salt: bytes) -> list[Fetch]:
        """Bring pages of these prompts up from the tiers. They stay until each fetch is cancelled."""
        with self.lock:
            fetches = [self.kv.fetch(row, salt=salt, hold=True) for row in rows] if self.kv.tiers else []
        while True:
            with self.lock:
                if all(each.done for each in fetches):
                    return fetches
            time.sleep(PAUSE)  # other threads may compute

    def plan(self, cache: _Member, counts: list[int]) -> Any:
        """Plan a step of `cache`. Other caches commit their finished steps if frames lack, as a pool grows then."""
        self.sweep()
        try:
            return self.kv.plan(cache.holdings.spaces, counts, saves_inside=not self.has_states)
        except OutOfFrames as lack:
            gc.collect()  # caches in circles of references, such as those of a traceback
            self.sweep()
            for other in list(self._caches):
                if other is not cache:
                    other.settle_ended()
            try:
                return self.kv.plan(cache.holdings.spaces, counts, saves_inside=not self.has_states)
            except OutOfFrames:
                name = "state_memory" if lack.pool == "states" else "memory"
                lack.add_note(f"the pool is full: patch(model, {name}=...) or Pool({name}=...) enlarges it")
                raise lack from None


def _attend_with_sinks(layer: KVLayer, options: dict[str, Any], q: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
    out: torch.Tensor = paged_attention(q, layer, batch, **options)
    return out


def _unserved(options: list[str]) -> str:
    if any("offload" in name for name in options):
        return f"a pool got {options}, and pages are not offloaded; give kv_dtype='int8' for half the memory"
    served = "memory, num_frames, kv_dtype, calibration, block_size, prefix_cache, tiers, state_memory and weights"
    return f"a pool got {options}; its options are {served}"
