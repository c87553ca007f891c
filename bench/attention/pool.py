"""Cold memory for benchmarks: a pool of one layer, larger than any cache; each step uses other frames of the pool.

Pools that are compared are views of the same region of bytes. Memory is not equally fast everywhere: for example, the
host of a virtual machine backs only parts of it with huge pages. With a region for each pool, this difference would
enter the comparison.
This file knows a cell's geometry and the layout of pagedkv.cache (K of all heads, then V). It knows no kernel and no
clock.
"""

from __future__ import annotations

import itertools
import mmap
from typing import Final

import torch

from pagedkv import KVLayer, PagedBatch
from pagedkv.bench.attention.cells import Cell
from pagedkv.kernels import quant
from pagedkv.spec import ELEMENTS

POOL_BYTES: Final = 384 << 20
NOISE: Final = 1 << 16


def region_of(size: int) -> torch.Tensor:
    """Return uint8 [size] of noise, on huge pages.

    The noise is a moderate number in every dtype, also as a scale: no NaN and no denormal number.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    region = torch.frombuffer(memory, dtype=torch.uint8)
    noise = torch.randint(0x30, 0x40, (NOISE,), dtype=torch.uint8)
    whole = size // NOISE * NOISE
    region[:whole].view(-1, NOISE).copy_(noise)  # one call: each call waits for all threads, on a busy machine for long
    region[whole:].copy_(noise[: size - whole])
    return region


class Pool:
    """A pool of one layer, in a region of its own or in a shared one.

    num_frames: the frames of one step, or the frames that fit POOL_BYTES if these are more. If the pool is larger than
                a step, each step draws other frames; otherwise, each step draws a new permutation of all frames.
    """

    def __init__(self, cell: Cell, region: torch.Tensor | None = None) -> None:
        spec, self.cell = cell.spec(), cell
        self.frame_bytes = spec.frame_bytes
        self.pages = [-(-n // cell.block_size) for n in cell.lens()]
        size = self.bytes_of(cell)
        self.num_frames = size // self.frame_bytes
        self.bytes = (region_of(size) if region is None else region)[:size]
        self.layer = KVLayer(**{name: self._view(name, *region) for name, region in spec.regions().items()})

    @staticmethod
    def bytes_of(cell: Cell) -> int:
        """Return the bytes that a pool of this cell needs."""
        frame_bytes = cell.spec().frame_bytes
        return max(sum(-(-n // cell.block_size) for n in cell.lens()), POOL_BYTES // frame_bytes) * frame_bytes

    def _view(self, name: str, offset: int, num_bytes: int) -> torch.Tensor:
        cell, is_scale = self.cell, name.endswith("_scale")
        dtype = torch.float16 if is_scale else quant.DTYPES[ELEMENTS[cell.kv or cell.dtype][name == "v"]]
        dim = num_bytes // (cell.kv_heads * cell.block_size * dtype.itemsize)
        shape = (self.num_frames, cell.block_size, cell.kv_heads, dim)
        strides = (self.frame_bytes // dtype.itemsize, dim, cell.block_size * dim, 1)
        view = self.bytes.view(dtype).as_strided(shape, strides, offset // dtype.itemsize)
        return view[..., 0] if is_scale else view

    def draw(self) -> torch.Tensor:
        """Return int64 [pages of all sequences]: distinct frames for one step.

        The frames are in random order; if the cell asks for pages in order, they ascend from a random frame.
        """
        count = sum(self.pages)
        if self.cell.pages == "in order":
            return (torch.arange(count) + int(torch.randint(self.num_frames, ()))) % self.num_frames
        return torch.randperm(self.num_frames)[:count]

    def batch(self, frames: torch.Tensor) -> PagedBatch:
        """Return a step of the cell over these frames, in which the last `new` tokens of each sequence are new."""
        cell, lens = self.cell, self.cell.lens()
        table = torch.zeros(cell.batch, max(self.pages), dtype=torch.int32)
        ends = list(itertools.accumulate(self.pages))
        for b, (end, count) in enumerate(zip(ends, self.pages, strict=True)):
            table[b, :count] = frames[end - count : end]
        positions = torch.cat([torch.arange(n - cell.new, n) for n in lens])
        rows = torch.arange(cell.batch).repeat_interleave(cell.new)
        slots = table[rows, positions // cell.block_size].long() * cell.block_size + positions % cell.block_size
        starts = torch.arange(cell.batch + 1, dtype=torch.int32) * cell.new
        return PagedBatch(
            table, torch.tensor(lens, dtype=torch.int32), starts, cell.new, max(lens), slots=slots, positions=positions
        )
