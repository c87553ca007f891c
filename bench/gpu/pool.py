"""What a GPU benchmark reads: one layer of a pool much larger than the second cache, and steps over other frames of it each time.

It knows the layout of pagedkv.cache and cells; it measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from pagedkv import KVLayer, PagedBatch
from pagedkv.bench.attention.cells import Cell
from pagedkv.kernels import quant

ROTATED_BYTES: Final = 512 << 20
"""What the calls of one graph read together, at least: several times the second cache of any GPU."""

BITS: Final = {"int4": 4, "int8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8, "float32": 32}

Step = Callable[[], object]
"""Launches one call; a graph holds several, each made for its own tables."""


class GpuPool:
    """One layer of a pool as pagedkv.cache lays it out, and steps that read it: other frames each time, in random order.

    kv_bytes: keys and values that a step must read; neither scales nor tables nor the rest of a last page.
    calls:    steps to measure together, so that none finds in the cache what another one read.
    """

    def __init__(self, cell: Cell, device: str = "cuda") -> None:
        spec, self.cell, self.device = cell.spec(), cell, device
        self.pages = [-(-n // cell.block_size) for n in cell.lens()]
        self.frame_bytes = spec.frame_bytes
        self.kv_bytes = sum(cell.lens()) * cell.kv_heads * 2 * cell.head_dim * BITS.get(spec.stored_dtype, 16) // 8
        self.calls = max(4, min(128, -(-ROTATED_BYTES // self.kv_bytes)))
        self.num_frames = max(sum(self.pages) * min(self.calls, 4), -(-2 * ROTATED_BYTES // spec.frame_bytes))
        self.bytes = torch.randint(
            0, 56, (self.num_frames * spec.frame_bytes,), dtype=torch.uint8, device=device
        )  # finite in any dtype
        self.layer = KVLayer(**{name: self._view(name, offset) for name, (offset, _) in spec.regions().items()})

    def _view(self, name: str, offset: int) -> torch.Tensor:
        spec, is_scale = self.cell.spec(), name.endswith("_scale")
        dtype = torch.float32 if is_scale else quant.DTYPES[spec.stored_dtype]
        dim = 1 if is_scale else spec.head_dim // (2 if spec.stored_dtype == "int4" else 1)
        shape = (self.num_frames, spec.block_size, spec.num_kv_heads, dim)
        strides = (self.frame_bytes // dtype.itemsize, dim, spec.block_size * dim, 1)
        view = self.bytes.view(dtype).as_strided(shape, strides, offset // dtype.itemsize)
        if is_scale:
            view.fill_(0.01)
        return view[..., 0] if is_scale else view

    def batches(self) -> list[PagedBatch]:
        """A decode step for each call: frames in random order, and no frame read by two calls as long as the pool has others."""
        calls = min(self.calls, self.num_frames // sum(self.pages))
        order = torch.randperm(self.num_frames).int()[: calls * sum(self.pages)].view(calls, -1)
        return [self._batch(order[call % calls]) for call in range(self.calls)]

    def _batch(self, frames: torch.Tensor) -> PagedBatch:
        """`new` tokens of each sequence, as when drafts are verified, over frames in this order."""
        B, table = self.cell.batch, torch.full((self.cell.batch, max(self.pages)), -1, dtype=torch.int32)
        for row, (count, drawn) in enumerate(zip(self.pages, frames.split(self.pages), strict=True)):
            table[row, :count] = drawn
        none = torch.zeros(B * self.cell.new, dtype=torch.int64, device=self.device)
        lens = torch.tensor(self.cell.lens(), dtype=torch.int32, device=self.device)
        starts = torch.arange(B + 1, dtype=torch.int32, device=self.device) * self.cell.new
        return PagedBatch(
            table.to(self.device),
            lens,
            starts,
            none,
            none,
            max_seqlen_q=self.cell.new,
            max_seqlen_k=max(self.cell.lens()),
        )
