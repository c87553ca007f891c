"""The memory of a GPU benchmark: one layer of a pool much larger than the L2 cache; each step reads other frames.

Keys and values are drawn from a normal distribution and stored as a cache would store them, so scores differ from key
to key, and bits flip on the wires as they do in service. This file knows the layout of pagedkv.cache and the cells; it
measures nothing.
"""

from __future__ import annotations

from typing import Final

import torch

from pagedkv import KVLayer, PagedBatch
from pagedkv.bench.attention.cells import Cell
from pagedkv.kernels import quant
from pagedkv.spec import ELEMENTS

ROTATED_BYTES: Final = 512 << 20
"""Bytes that the calls of one graph read together, at least: several times the L2 cache of any GPU."""

SCALE: Final = {"code4": 1 / 46, "int5": 1 / 8, "int8": 1 / 32}
"""The scale of a token that stores numbers of about 1 in these elements. The scale of 8-bit floats is 1."""

AT_ONCE: Final = 1 << 26
"""Elements that are drawn at once."""


class GpuPool:
    """One layer of a pool in the layout of pagedkv.cache, and steps that each read other frames, in random order.

    kv_bytes: bytes of keys, values and scales that a step must read, without tables and the unused rest of a last page.
    calls:    steps to measure together: enough that no step finds in the cache the keys that another step read.
    """

    def __init__(self, cell: Cell, device: str = "cuda") -> None:
        spec, self.cell, self.device = cell.spec(), cell, device
        self.pages = [-(-n // cell.block_size) for n in cell.lens()]
        self.frame_bytes = spec.frame_bytes
        self.kv_bytes = sum(cell.lens()) * spec.bytes_per_token
        self.calls = max(4, min(128, -(-ROTATED_BYTES // self.kv_bytes)))
        self.num_frames = max(sum(self.pages) * min(self.calls, 4), -(-2 * ROTATED_BYTES // spec.frame_bytes))
        size = self.num_frames * spec.frame_bytes
        self.bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        views = {name: self._view(name, *place) for name, place in spec.regions().items()}
        self.layer = KVLayer(**{"v": views["k"][..., : spec.value_dim]} | views)
        for stored in (self.layer.k, self.layer.v):
            self._draw(stored)

    def _view(self, name: str, offset: int, num_bytes: int) -> torch.Tensor:
        spec, is_scale = self.cell.spec(), name.endswith("_scale")
        element = ELEMENTS[spec.stored_dtype][name.startswith("v")]
        dtype = torch.float16 if is_scale else quant.DTYPES[element]
        dim = num_bytes // (spec.num_kv_heads * spec.block_size * dtype.itemsize)
        shape = (self.num_frames, spec.block_size, spec.num_kv_heads, dim)
        strides = (self.frame_bytes // dtype.itemsize, dim, spec.block_size * dim, 1)
        view = self.bytes.view(dtype).as_strided(shape, strides, offset // dtype.itemsize)
        if is_scale:
            view.copy_(torch.rand(shape, device=self.device).add_(0.5).mul_(SCALE.get(element, 1.0)))
        return view[..., 0] if is_scale else view

    def _draw(self, stored: torch.Tensor) -> None:
        frames, *rest = stored.shape
        for part in stored.split(max(1, AT_ONCE // (stored.numel() // frames))):
            shape = (len(part), *rest)
            if stored.dtype == torch.uint8:
                part.copy_(torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device))
            elif stored.dtype == torch.int8:
                part.copy_(torch.randn(shape, device=self.device).mul_(32).round_().clamp_(-127, 127))
            else:
                part.copy_(torch.randn(shape, device=self.device))

    def query(self, peak: float = 1.0) -> torch.Tensor:
        """Return queries of a step, normally distributed times `peak`: 1 for scores as of random vectors, 4 to 6 for a
        softmax of which a few keys have nearly all the weight, as in models."""
        cell = self.cell
        shape = (cell.batch * cell.new, cell.heads, cell.head_dim)
        return (torch.randn(shape, device=self.device) * peak).to(quant.DTYPES[cell.dtype])

    def batches(self) -> list[PagedBatch]:
        """Return a decode step for each call, frames in random order.

        No frame is read by two calls as long as the pool has other frames.
        """
        calls = min(self.calls, self.num_frames // sum(self.pages))
        order = torch.randperm(self.num_frames).int()[: calls * sum(self.pages)].view(calls, -1)
        return [self._batch(order[call % calls]) for call in range(self.calls)]

    def _batch(self, frames: torch.Tensor) -> PagedBatch:
        """Return a step of `new` tokens of each sequence, as for drafts to verify, over `frames` in this order."""
        B, table = self.cell.batch, torch.full((self.cell.batch, max(self.pages)), -1, dtype=torch.int32)
        for row, (count, drawn) in enumerate(zip(self.pages, frames.split(self.pages), strict=True)):
            table[row, :count] = drawn
        lens = torch.tensor(self.cell.lens(), dtype=torch.int32, device=self.device)
        starts = torch.arange(B + 1, dtype=torch.int32, device=self.device) * self.cell.new
        return PagedBatch(
            table.to(self.device),
            lens,
            starts,
            max_seqlen_q=self.cell.new,
            max_seqlen_k=max(self.cell.lens()),
        )
