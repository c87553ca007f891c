"""PagedKVCache: the façade. A memory manager, the bytes it speaks of, and the kernels that read them.

    batch = cache.plan([a, b], [1, 5])            frames mapped, shared tails copied, tables on the device
    for layer in range(L):  write_kv(k, v, cache[layer], batch.args);  paged_attention(q, cache[layer], batch.args)
    cache.commit(batch, token_ids)                the tokens are real: later prompts find them

It adds no rule to those of core: it keeps bytes and integers in step, and nothing else.

Layers with different windows are groups: a list of KVSpecs, one for each, the first of them without a window, and `layer_groups`, which
says of each layer of the model in which group it is. Then `batch[layer]` stands for `batch.args`. See core/groups.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedkv import debug
from pagedkv.cache import batch as packing
from pagedkv.cache import snapshots
from pagedkv.cache.batch import PlannedBatch
from pagedkv.cache.mirror import DeviceMirror
from pagedkv.cache.snapshots import Restored
from pagedkv.cache.storage import Storage, groups_of_layers, specs_of
from pagedkv.core.arguments import whole
from pagedkv.core.handles import AddressSpace, Plan
from pagedkv.core.manager import Counts, MemoryManager, Spaces
from pagedkv.core.observe.stats import Stats
from pagedkv.core.state import FREE
from pagedkv.core.tables.layer_groups import Group
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import registry
from pagedkv.kernels.args import KVLayer, PagedBatch
from pagedkv.kernels.bound import BoundAttention, BoundWrite, bind_attention, bind_write
from pagedkv.kernels.ops import copy_frames
from pagedkv.spec import KVSpec


class PagedKVCache:
    """The KV cache of one model: `cache[layer]` for the kernels, `plan` and `commit` for the loop.

    `spec` is the geometry, or that of each layer group: what lies behind a group's window is given back (KVSpec.window). A frame is as
    large as the largest group needs, so groups of as many layers each waste nothing.
    Give `num_frames`, or `memory` ("40GiB", bytes) to fill. `kernels` names a backend or "auto"; the choice is made here, once, and
    shown in the repr. `backend` is what to hand to the kernels' calls: the name if one was forced, else None, so that a call that the
    chosen kernel objects to (for a soft cap, say) goes to the next. Further options go to MemoryManager.
    Raises: InvalidRequest if both or neither size is given, or it cannot be had; KernelUnavailable if the named backend objects
    """

    def __init__(
        self,
        spec: KVSpec | Sequence[KVSpec],
        *,
        layer_groups: Sequence[int] | None = None,
        num_frames: int | None = None,
        memory: str | int | None = None,
        device: torch.device | str = "cpu",
        kernels: str = registry.AUTO,
        **manager_options: Any,
    ) -> None:
        if (num_frames is None) == (memory is None):
            raise InvalidRequest(f"num_frames is {num_frames} and memory is {memory}; give one of them")
        self.specs = specs_of(spec)
        self.layer_groups = groups_of_layers(self.specs, layer_groups)
        self.spec, self.device = self.specs[0], _device(device)
        largest = max(self.specs, key=lambda spec: spec.frame_bytes)
        frames = whole(num_frames if memory is None else largest.frames_in(memory), "num_frames", 1, 2**31)
        manager_options.setdefault("groups", [Group(window=spec.window) for spec in self.specs])
        self.manager = MemoryManager(frames, self.spec.block_size, **manager_options)
        if len(self.manager.groups) != len(self.specs):
            raise InvalidRequest(
                f"{len(self.manager.groups)} groups and {len(self.specs)} specs; give a KVSpec for each group"
            )
        windows, due = [group.window for group in self.manager.groups], [spec.window for spec in self.specs]
        if windows != due:
            raise InvalidRequest(
                f"groups have windows {windows} and their specs {due}; give each Group the window of its KVSpec"
            )
        self.kernel = registry.choose(self.spec, self.device.type, kernels)
        forced = kernels not in (None, registry.AUTO) or debug.forced_backend() is not None
        self.backend = self.kernel.name if forced else None
        self.storage = Storage(self.specs, frames, self.device, layer_groups=self.layer_groups)
        self._mirror = None if self.device.type == "cpu" else DeviceMirror(self.device)
        self._watched = debug.level() >= 2  # from birth or not at all: later nobody knows which frames hold something
        self._seen = self.manager.state.frames["generation"].copy()  # at the last look,
        self._clean = np.zeros(frames, bool)  # and who was free then, hence poisoned

    @property
    def num_frames(self) -> int:
        """Frames in the pool."""
        return self.manager.num_frames

    def __getitem__(self, layer: int) -> KVLayer:
        return self.storage.layers[layer]

    def __len__(self) -> int:
        return len(self.layer_groups)

    def attention(self, layer: int, **options: Any) -> BoundAttention:
        """Return `bind_attention(cache[layer], **options)` with the kernel of this cache. Bind again after `resize`."""
        return bind_attention(self[layer], **{"backend": self.backend} | options)

    def write(self, layer: int, **options: Any) -> BoundWrite:
        """Return `bind_write(cache[layer], **options)` with the kernel of this cache. Bind again after `resize`."""
        return bind_write(self[layer], **{"backend": self.backend} | options)

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame: what the largest group needs."""
        return self.storage.frame_bytes

    def frames_for(self, num_tokens: int, at_once: int | None = None) -> int:
        """The most frames that a sequence holds until it has `num_tokens` tokens, planned `at_once` at most (None: all of them)."""
        num_tokens = whole(num_tokens, "num_tokens")
        chunk = num_tokens if at_once is None else min(at_once, num_tokens)
        most = [num_tokens if spec.window is None else min(num_tokens, spec.window - 1 + chunk) for spec in self.specs]
        pages = self.spec.pages
        return sum(
            pages(num_tokens) if tokens == num_tokens else min(pages(num_tokens), pages(tokens) + 1) for tokens in most
        )

    def open(self, token_ids: Sequence[int] | npt.NDArray[np.integer] = (), *, tenant: bytes = b"") -> AddressSpace:
        """See MemoryManager.open."""
        return self.manager.open(token_ids, tenant=tenant)

    def plan(self, batch: Spaces, counts: Counts) -> PlannedBatch:
        """Map frames for `counts[i]` new tokens of each space, and copy the tails that others share. See MemoryManager.plan.

        Modifies: the bytes of copied frames; with PAGEDKV_DEBUG >= 2 those of newly taken ones, which become NaN
        Raises:   OutOfFrames, InvalidRequest, StaleHandle, KernelUnavailable; nothing was changed then
        """
        plan = self.manager.plan(batch, counts)
        try:
            if self._watched:
                self._poison()
            if len(plan.splits):
                copies = torch.from_numpy(np.ascontiguousarray(plan.copies)).to(self.device)
                copy_frames(self.storage.frames, copies, backend=self.backend)
            parts = [self._packed(plan, group) for group in range(len(self.specs))]
            return PlannedBatch(plan, parts[0], tuple(parts[1:]), self.layer_groups if parts[1:] else ())
        except BaseException:  # nobody has the plan: nobody else could abort it
            self.manager.abort(plan)
            raise

    def _packed(self, plan: Plan, group: int) -> PagedBatch:
        if self._mirror is None:
            return packing.on_cpu(plan, group)
        return packing.on_device(plan, self._mirror, self.spec.block_size, group)

    def commit(
        self, batch: PlannedBatch, token_ids: Sequence[int] | npt.NDArray[np.integer], counts: Counts | None = None
    ) -> None:
        """The KV of `token_ids` has been written where `batch` said. See MemoryManager.commit."""
        self.manager.commit(_plan_of(batch, "commit"), token_ids, counts)

    def abort(self, batch: PlannedBatch) -> None:
        """Nothing comes of the batch, whether its kernels have run or not. See MemoryManager.abort."""
        self.manager.abort(_plan_of(batch, "abort"), copied=True)

    def set_quota(self, tenant: bytes, *, hard: int | None = None, soft: int | None = None, protected: int = 0) -> None:
        """See MemoryManager.set_quota; frames, of which `spec.frames_in("2GiB")` gives the number."""
        self.manager.set_quota(tenant, hard=hard, soft=soft, protected=protected)

    def forget(self) -> int:
        """See MemoryManager.forget."""
        return self.manager.forget()

    def resize(self, num_frames: int) -> None:
        """Make the pool larger or smaller; what it holds stays. See MemoryManager.resize. Both pools exist for as long as this takes.

        `cache[layer]` is a new view afterwards: fetch it again, and capture CUDA graphs anew.
        Raises: as MemoryManager.resize, and InvalidRequest if the memory cannot be had; nothing was changed then
        """
        num_frames = whole(num_frames, "num_frames", 1, 2**31)
        other = Storage(self.specs, num_frames, self.device, layer_groups=self.layer_groups)
        moves = torch.from_numpy(self.manager.resize(num_frames).astype(np.int64))
        used = np.flatnonzero(self.manager.state.frames["status"] != FREE)
        stayed = np.setdiff1d(used[used < self.storage.num_frames], moves[:, 1].numpy())
        other.take_over(self.storage, torch.from_numpy(stayed), moves)
        self.storage = other
        self._seen = self.manager.state.frames["generation"].copy()
        self._clean = np.zeros(num_frames, bool)

    def snapshot(self, folder: str | Path, *, model: str = "") -> int:
        """Write what prompts can find to `folder`, bytes and tokens, so that `restore` finds it after a restart; returns how many pages.

        model: a name for the weights (a checkpoint's digest, say), which the one who restores must know. Pages that a layer group has given
        up are left out, with those behind them. The one that was there before is valid until this one is whole. O(bytes).
        Raises: OSError if the disk does
        """
        return snapshots.save(self, _folder(folder), _name(model))

    def restore(self, folder: str | Path, *, model: str = "") -> Restored:
        """Make what `snapshot` wrote findable again, as far as it is whole and frames are free; nothing is evicted for it.

        A page whose digest does not fit its bytes, tokens, prefix or tenant is a miss, and so are those behind it; a snapshot of another
        model or layout is refused as a whole. Nothing that lies on the disk raises: see Restored.
        """
        return snapshots.load(self, _folder(folder), _name(model))

    def stats(self) -> Stats:
        """See MemoryManager.stats; `spec.frame_bytes` turns frames into bytes."""
        return self.manager.stats()

    def check(self, level: int = 3) -> None:
        """See MemoryManager.check."""
        self.manager.check(level)

    def _poison(self) -> None:
        """Fill with NaN the frames that were freed or taken since the last look, which is before the plan just made writes anything."""
        frames = self.manager.state.frames
        free = frames["status"] == FREE
        stale = np.flatnonzero((free | (frames["generation"] != self._seen)) & ~self._clean)
        self.storage.poison(torch.from_numpy(stale))
        self._seen, self._clean = frames["generation"].copy(), free

    def __repr__(self) -> str:
        gib = self.storage.bytes.numel() / 2**30
        specs = self.spec if len(self.specs) == 1 else list(self.specs)
        return f"PagedKVCache({specs}, {gib:.2f} GiB on {self.device}, kernels={self.kernel.name!r}, {self.manager!r})"


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as why:
        told = str(why).splitlines()[0]
        raise InvalidRequest(
            f"device is {device!r}, which torch does not know ({told}); give 'cpu' or 'cuda'"
        ) from None


def _folder(folder: str | Path) -> Path:
    try:
        return Path(folder)
    except TypeError:
        raise InvalidRequest(f"folder is {folder!r}; give a path") from None


def _name(model: str) -> str:
    if not isinstance(model, str):
        raise InvalidRequest(
            f"model is {model!r}; give text that names the weights, such as the digest of a checkpoint"
        )
    return model


def _plan_of(batch: PlannedBatch, verb: str) -> Plan:
    if not isinstance(batch, PlannedBatch):
        raise InvalidRequest(f"{verb} of {batch!r}; give what plan() of this cache returned")
    return batch.plan
