"""PlannedBatch: a plan, and the same as tensors on the device. On the CPU these are views of the plan's arrays; nothing is copied."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from pagedkv.cache.mirror import DeviceMirror
from pagedkv.core.handles import Plan
from pagedkv.kernels.args import PagedBatch


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """What `PagedKVCache.plan` returns and `commit` takes back: `args` for the kernels, `plan` for the memory manager.

    With several layer groups each has its own rows and slots: `batch[layer]`, beside `cache[layer]`. `args` is that of the first group.
    """

    plan: Plan
    args: PagedBatch
    others: tuple[PagedBatch, ...] = ()
    """Of the other groups."""
    layer_groups: tuple[int, ...] = ()
    """The group of each layer; () if there is one."""

    def __getitem__(self, layer: int) -> PagedBatch:
        group = self.layer_groups[layer] if self.layer_groups else 0
        return self.others[group - 1] if group else self.args

    def __repr__(self) -> str:
        return f"PlannedBatch({len(self.plan.rows)} sequences, {self.plan.num_tokens} new tokens, {len(self.plan.splits)} copies)"


def on_cpu(plan: Plan, group: int = 0) -> PagedBatch:
    """The plan of a layer group as tensors that share its memory. `block_table` is the live page tables."""
    mine = plan.group(group) if group else plan
    return PagedBatch(
        block_table=torch.from_numpy(plan.block_table),
        seq_lens=torch.from_numpy(plan.seq_lens),
        cu_seqlens_q=torch.from_numpy(plan.cu_seqlens_q),
        slots=torch.from_numpy(mine.slots),
        positions=torch.from_numpy(plan.positions),
        max_seqlen_q=int(plan.counts.max(initial=0)),
        max_seqlen_k=int(plan.seq_lens.max(initial=0)),
        rows=torch.from_numpy(mine.rows),
    )


def on_device(plan: Plan, mirror: DeviceMirror, block_size: int, group: int = 0) -> PagedBatch:
    """The plan of a layer group on the mirror's device: one transfer for the small arrays, one for what has changed in the tables."""
    host, mine = on_cpu(plan, group), plan.group(group) if group else plan
    small = [host.slots, host.positions, host.seq_lens, host.cu_seqlens_q, host.rows]
    packed = torch.from_numpy(np.concatenate([part.numpy().view(np.uint8) for part in small if part is not None]))
    pages = -(-host.max_seqlen_k // block_size)
    sent = packed.to(mirror.device, non_blocking=True)
    at, parts = 0, []
    for part in small:
        assert part is not None
        size = part.numel() * part.element_size()
        parts.append(sent[at : at + size].view(part.dtype))
        at += size
    slots, positions, seq_lens, cu_seqlens_q, rows = parts
    table = mirror.update(plan.block_table, mine.rows, pages)
    return replace(
        host,
        block_table=table,
        slots=slots,
        positions=positions,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        rows=rows,
    )
