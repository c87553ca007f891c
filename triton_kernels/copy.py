"""copy_frames: whole frames inside the pool, every source read before one destination is written, even if a frame is both.

    scratch[c] = storage[copies[c, 0]]   then   storage[copies[c, 1]] = scratch[c]        two launches of one kernel, in order on the stream

Grid      (copies * runs of BLOCK words of a frame), in one dim: the others end at 65535. A program moves one run.
Words     A frame that is one run of memory, as a pool's is, is a run of bytes. Any other (a view across layers, every second head) is a
          box: its dims are merged where their strides allow, and an element's place is found by dividing through their sizes.
Bytes     4 * frame_bytes per copy. The way through `scratch` costs twice the traffic of a direct copy: chains and cycles of frames need it,
          and whether there are any only the device knows. A step copies a frame a forked sequence, not more.
Tuned     not on any GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from pagedkv.kernels.case import Case

BLOCK = 8192
WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What elements are moved as, by their bytes."""


@triton.jit
def places(at, sizes, strides):
    """Where the words `at` of a box lie, its last dim the fastest."""
    where = at * 0
    for i in tl.static_range(len(sizes) - 1):
        d: tl.constexpr = len(sizes) - 1 - i
        where += at % sizes[d] * strides[d]
        at = at // sizes[d]
    return where + at * strides[0]


@triton.jit
def copy_kernel(
    pool, scratch, copies, copy_stride, frame_stride, sizes, strides, count, OUT: tl.constexpr, BLOCK: tl.constexpr
):
    """One run of copy c between its frame and its place in `scratch`: out of the pool, to there; or back. copies: the column of frames."""
    runs = tl.cdiv(count, BLOCK)
    c, run = (tl.program_id(0) // runs).to(tl.int64), (tl.program_id(0) % runs).to(tl.int64)
    at = run * BLOCK + tl.arange(0, BLOCK)
    inside = pool + tl.load(copies + c * copy_stride).to(tl.int64) * frame_stride + places(at, sizes, strides)
    beside = scratch + c * count + at
    if OUT:
        tl.store(beside, tl.load(inside, mask=at < count, other=0), mask=at < count)
    else:
        tl.store(inside, tl.load(beside, mask=at < count, other=0), mask=at < count)


def copy_frames(storage: Tensor, copies: Tensor) -> None:
    """`storage[dst] = storage[src]` for each row of `copies`. Modifies: the destination frames."""
    if not len(copies) or not storage.numel():
        return
    words = _words(storage)
    sizes, strides = _box(words)
    count = words[0].numel()
    scratch = words.new_empty((len(copies), count))
    for out, column in ((True, copies[:, 0]), (False, copies[:, 1])):
        copy_kernel[(len(copies) * triton.cdiv(count, BLOCK),)](
            words, scratch, column, copies.stride(0), words.stride(0), sizes, strides, count, OUT=out, BLOCK=BLOCK
        )


def _words(storage: Tensor) -> Tensor:
    """[F, ...]: bytes where frames are runs of memory, else integers as large as the elements."""
    if storage[0].is_contiguous():
        runs = storage.as_strided((len(storage), storage[0].numel()), (storage.stride(0), 1))
        return runs.view(torch.uint8)
    if storage.is_complex():
        storage = torch.view_as_real(storage)
    return storage.view(WORDS[storage.element_size()])


def _box(words: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a frame's dims: those of one element left out, neighbours merged where one steps over the whole of the other."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(words.shape[1:], words.stride()[1:], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    dims = dims or [(1, 1)]
    return tuple(size for size, _ in dims), tuple(stride for _, stride in dims)


def objections(case: Case) -> list[str]:
    """Why this kernel cannot serve `case`: it moves whatever has frames."""
    return []
