"""Cold memory for benchmarks: a pool of one layer, larger than any cache, and steps that use other frames of it each time.

Knows a cell's geometry and the layout of pagedkv.cache (K of all heads, then V), no kernel and no clock.
"""

from __future__ import annotations

import itertools
import mmap
from typing import Final

import torch

from pagedkv import KVLayer, PagedBatch
from pagedkv.bench.cells import Cell
from pagedkv.kernels import quant

POOL_BYTES: Final = 384 << 20
NOISE: Final = 1 << 16


class Pool:
    """A pool of one layer on huge pages.

    num_frames is that of a step, or as many as POOL_BYTES hold; a step of fewer uses others each time, a larger one a new permutation.
    """

    def __init__(self, cell: Cell) -> None:
        spec, self.cell = cell.spec(), cell
        self.frame_bytes = spec.frame_bytes
        self.pages = [-(-n // cell.block_size) for n in cell.lens()]
        self.num_frames = max(sum(self.pages), POOL_BYTES // self.frame_bytes)
        region = mmap.mmap(-1, self.num_frames * self.frame_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            region.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(region, dtype=torch.uint8)
        views = {name: self._view(name, offset) for name, (offset, _) in spec.regions().items()}
        self.layer = KVLayer(**views)
        for name, view in views.items():
            self._fill(view, scale=name.endswith("_scale"))

    @staticmethod
    def bytes_of(cell: Cell) -> int:
        """What a pool of this cell takes, before it is taken."""
        frame_bytes = cell.spec().frame_bytes
        return max(sum(-(-n // cell.block_size) for n in cell.lens()), POOL_BYTES // frame_bytes) * frame_bytes

    def _view(self, name: str, offset: int) -> torch.Tensor:
        cell, is_scale = self.cell, name.endswith("_scale")
        stored = cell.kv or cell.dtype
        dtype = torch.float32 if is_scale else quant.DTYPES[stored]
        dim = 1 if is_scale else cell.head_dim // (2 if stored == "int4" else 1)
        shape = (self.num_frames, cell.block_size, cell.kv_heads, dim)
        strides = (self.frame_bytes // dtype.itemsize, dim, cell.block_size * dim, 1)
        view = self.bytes.view(dtype).as_strided(shape, strides, offset // dtype.itemsize)
        return view[..., 0] if is_scale else view

    def _fill(self, view: torch.Tensor, *, scale: bool) -> None:
        """Finite noise, the same in each frame: what the numbers are costs nothing, denormal ones and NaN might."""
        if scale:
            view.fill_(0.01)
            return
        frame = view[0].numel()
        noise = torch.randn(frame).to(view.dtype) if view.element_size() > 1 else torch.randint(0, 120, (frame,)).to(torch.uint8)
        (view if view.element_size() > 1 else view.view(torch.uint8)).copy_(noise.view(view.shape[1:]))

    def draw(self) -> torch.Tensor:
        """int64 [pages of all sequences]: distinct frames; ascending from a random one if the cell wants its pages in order."""
        count = sum(self.pages)
        if self.cell.pages == "in order":
            return (torch.arange(count) + int(torch.randint(self.num_frames, ()))) % self.num_frames
        return torch.randperm(self.num_frames)[:count]

    def batch(self, frames: torch.Tensor) -> PagedBatch:
        """A step of the cell over these frames: the last `new` tokens of each sequence are new."""
        cell, lens = self.cell, self.cell.lens()
        table = torch.zeros(cell.batch, max(self.pages), dtype=torch.int32)
        ends = list(itertools.accumulate(self.pages))
        for b, (end, count) in enumerate(zip(ends, self.pages, strict=True)):
            table[b, :count] = frames[end - count : end]
        positions = torch.cat([torch.arange(n - cell.new, n) for n in lens])
        rows = torch.arange(cell.batch).repeat_interleave(cell.new)
        slots = table[rows, positions // cell.block_size].long() * cell.block_size + positions % cell.block_size
        starts = torch.arange(cell.batch + 1, dtype=torch.int32) * cell.new
        return PagedBatch(table, torch.tensor(lens, dtype=torch.int32), starts, slots, positions, cell.new, max(lens))
