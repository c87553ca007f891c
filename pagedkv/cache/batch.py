"""PlannedBatch: one step's plan as tensors on the device. On the CPU they share the memory of the plan's arrays.

    groups     plan() returns    batch[layer]                      the batch itself
    one        PlannedBatch      the batch itself                  is a PagedBatch: the kernels take it
    several    _GroupedBatch     PagedBatch of the layer's group   has no slots, rows, block_table: kernels refuse it

So `batch[layer]`, beside `cache[layer]`, is right for every cache. This file knows plans and tensors; it must not know
rules of core.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from pagedkv.cache.mirror import DeviceMirror
from pagedkv.cache.states import StateBatch
from pagedkv.core.handles import Plan
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.args import PagedBatch

if TYPE_CHECKING:
    import numpy.typing as npt

    from pagedkv.cache.fixed import FixedBatch


@dataclass(frozen=True, eq=False, repr=False)
class PlannedBatch(PagedBatch):
    """The result of `PagedKVCache.plan`. Hand `batch[layer]` to the kernels, and the batch to `commit` or `abort`.

    plan:       the same step for the memory manager, as numpy arrays.
    num_layers: layers of the model.
    states:     the recurrent states that the step reads and writes; None unless the cache has them.
    """

    plan: Plan = field(kw_only=True)
    num_layers: int = field(kw_only=True)
    states: StateBatch | None = field(kw_only=True, default=None)

    def __getitem__(self, layer: int) -> PagedBatch:
        """Return the batch that the kernels of `layer` take: the batch of its group, if the cache has several groups.

        Raises: NoSuchLayer, which is an InvalidRequest and an IndexError
        """
        if not -self.num_layers <= layer < self.num_layers:
            raise NoSuchLayer("batch", layer, self.num_layers)
        return self

    def padded(self, mask: torch.Tensor) -> PlannedBatch:
        """Return the batch of the same plan for padded tensors, see PagedBatch.padded.

        `commit` and `abort` take either batch.
        """
        padded = vars(super().padded(mask))
        return PlannedBatch(**padded, plan=self.plan, num_layers=self.num_layers, states=self.states)

    __iter__ = None
    """A batch is no sequence of layers: `for` over `batch[0]`, `batch[1]`, ... would never end."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        sizes = f"{len(self.plan.rows)} sequences, {self.plan.num_tokens} new tokens, {len(self.plan.splits)} copies"
        return f"PlannedBatch({sizes})"


class NoSuchLayer(InvalidRequest, IndexError):
    """Raised for a layer that the model does not have. An IndexError too, so that `for` over a cache ends."""

    def __init__(self, name: str, layer: int, num_layers: int) -> None:
        super().__init__(f"{name}[{layer}] of a model of {num_layers} layers; give 0 to {num_layers - 1}")


class _DiffersByGroup(InvalidRequest, AttributeError):
    """Raised for a tensor that a _GroupedBatch has once for each group. An AttributeError, so `hasattr` says False."""


class _GroupedBatch(PlannedBatch):
    """The PlannedBatch of several layer groups. `batch[layer]` has the slots, rows and tables of the layer's group.

    Lengths and positions are equal in all groups and can be read here. `slots`, `rows` and `block_table` raise
    InvalidRequest, so a kernel that is handed the batch itself refuses it, where the tensors of the first group would
    be wrong for the other groups.
    """

    _groups: tuple[PagedBatch, ...]
    _layer_groups: tuple[int, ...]

    def __init__(
        self, plan: Plan, groups: tuple[PagedBatch, ...], layer_groups: tuple[int, ...], states: StateBatch | None
    ) -> None:
        first = groups[0]
        vars(self).update(  # the class is frozen: attributes cannot be assigned
            plan=plan,
            num_layers=len(layer_groups),
            states=states,
            seq_lens=first.seq_lens,
            cu_seqlens_q=first.cu_seqlens_q,
            positions=first.positions,
            max_seqlen_q=first.max_seqlen_q,
            max_seqlen_k=first.max_seqlen_k,
            _groups=groups,
            _layer_groups=layer_groups,
        )

    def __getitem__(self, layer: int) -> PagedBatch:
        try:
            return self._groups[self._layer_groups[layer]]
        except IndexError:
            raise NoSuchLayer("batch", layer, self.num_layers) from None

    def padded(self, mask: torch.Tensor) -> _GroupedBatch:
        """Return the batch of the same plan for padded tensors, see PagedBatch.padded."""
        groups = tuple(group.padded(mask) for group in self._groups)
        return _GroupedBatch(self.plan, groups, self._layer_groups, self.states)

    @property
    def slots(self) -> NoReturn:  # type: ignore[override]
        """Raise InvalidRequest."""
        self._refuse("slots")

    @property
    def rows(self) -> NoReturn:  # type: ignore[override]
        """Raise InvalidRequest."""
        self._refuse("rows")

    @property
    def block_table(self) -> NoReturn:  # type: ignore[override]
        """Raise InvalidRequest."""
        self._refuse("block_table")

    def _refuse(self, name: str) -> NoReturn:
        raise _DiffersByGroup(
            f"batch.{name} is asked of a batch of {len(self._groups)} layer groups, each of which has its own; "
            "give the kernels batch[layer], beside cache[layer]"
        )


def planned_batch(
    plan: Plan,
    layer_groups: tuple[int, ...],
    mirror: DeviceMirror | None,
    block_size: int,
    into: FixedBatch | None = None,
) -> PlannedBatch:
    """Return the plan as tensors on the mirror's device, or on the CPU if there is no mirror.

    layer_groups: the group of each layer. into: tensors for the step, None for new ones.
    """
    numbers = range(len(plan.group_slots))
    if into is not None:
        tables, rows = zip(*(_table_and_rows(plan, mirror, block_size, group) for group in numbers), strict=True)
        groups = into.fill(plan, tables, rows)
    else:
        groups = [
            on_cpu(plan, group) if mirror is None else on_device(plan, mirror, block_size, group) for group in numbers
        ]
    states = None
    if plan.states is not None:
        device = torch.device("cpu") if mirror is None else mirror.device
        states = StateBatch.of(plan.states, device) if into is None else into.states
    if len(groups) == 1:
        return PlannedBatch(**groups[0], plan=plan, num_layers=len(layer_groups), states=states)
    return _GroupedBatch(plan, tuple(PagedBatch(**tensors) for tensors in groups), layer_groups, states)


def _table_and_rows(
    plan: Plan, mirror: DeviceMirror | None, block_size: int, group: int
) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
    """Return the page tables of a layer group on the mirror's device, and the rows of the plan's sequences in them."""
    rows = plan.rows + np.int32(group)
    if mirror is None:
        return torch.from_numpy(plan.live_table), rows
    return mirror.update(plan.live_table, rows, -(-plan.seq_lens // block_size))


def on_cpu(plan: Plan, group: int = 0) -> dict[str, Any]:
    """Return the fields of the PagedBatch of a layer group, as tensors that share the plan's memory.

    `block_table` is the live page tables: a later plan or fork changes its entries.
    """
    of_group = plan.group(group) if group else plan
    return {
        "block_table": torch.from_numpy(plan.live_table),
        "seq_lens": torch.from_numpy(plan.seq_lens),
        "cu_seqlens_q": torch.from_numpy(plan.cu_seqlens_q),
        "slots": torch.from_numpy(of_group.slots),
        "positions": torch.from_numpy(plan.positions),
        "max_seqlen_q": int(plan.counts.max(initial=0)),
        "max_seqlen_k": int(plan.seq_lens.max(initial=0)),
        "rows": torch.from_numpy(of_group.rows),
    }


def on_device(plan: Plan, mirror: DeviceMirror, block_size: int, group: int = 0) -> dict[str, Any]:
    """Return these fields on the mirror's device: one transfer of small arrays, one of table entries."""
    host = on_cpu(plan, group)
    table, rows = _table_and_rows(plan, mirror, block_size, group)
    host["rows"] = torch.from_numpy(rows)
    names = ("slots", "positions", "seq_lens", "cu_seqlens_q", "rows")  # 8-byte elements first: each part is aligned
    packed = torch.from_numpy(np.concatenate([host[name].numpy().view(np.uint8) for name in names]))
    sent, offset = packed.to(mirror.device, non_blocking=True), 0
    parts: dict[str, torch.Tensor] = {}
    for name in names:
        size = host[name].numel() * host[name].element_size()
        parts[name] = sent[offset : offset + size].view(host[name].dtype)
        offset += size
    return {**host, **parts, "block_table": table}
